"""Which GPUs a node has, how a process names them, and what they do while a lease runs.

`nvml.py` is the only importer of pynvml. A node without GPUs is a normal answer. Nothing here
allocates memory on a GPU or starts a daemon.

Experimental: tested against a fake NVML; `docs/GPUS.md` says what was run on a GPU.
"""
