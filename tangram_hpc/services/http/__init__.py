"""Engines behind HTTP: vLLM, SGLang, and the plain protocol that any service can speak.

`web.py` is the only door to httpx. These modules never start an engine's process and hold no
weights.
"""
