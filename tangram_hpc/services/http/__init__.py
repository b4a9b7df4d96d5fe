"""Model engines behind HTTP: vLLM, SGLang, and a plain protocol that any service can speak.

`web.py` is the only importer of httpx. These modules never start or end an engine's process and
hold no weights.

Experimental: tested against fakes of the protocols, never run against a real vLLM or SGLang server.
"""
