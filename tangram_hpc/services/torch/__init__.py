"""Our own runner of Hugging Face models: one process for each copy of a service.

Only this package and the reference trainer import torch, transformers, safetensors and tokenizers.
It imports nothing of the broker; the worker talks to it in the frames of
`protocol/service_frames.py`.

Experimental: `docs/GPUS.md` says what was run on a GPU.
"""
