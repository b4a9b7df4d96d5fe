"""Which GPUs a node has, how they are numbered for a process, and what they do while a lease runs.

`nvml.py` is the only door to pynvml, and a node without GPUs is a normal answer. Nothing here
allocates memory on a GPU or starts a daemon.

Experimental: tested against a fake NVML, never run on a GPU.
"""
