"""Our own runner of Hugging Face models, in a process for each copy of a service.

This package is the only door to torch, transformers, safetensors and tokenizers, apart from the
reference trainer. It imports nothing of the broker, and the worker talks to it in frames of
`protocol/service_frames.py`.
"""
