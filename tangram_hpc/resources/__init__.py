"""What a node has and how it is held to what was lent: CPUs, memory, GPUs, and trees of processes.

`cpu/` has affinity and cgroups, `gpu/` has NVML and MPS. `memory.py` reads how much memory there
is, and `process_tree.py` walks and ends trees of processes. Who gets which resource is decided in
`scheduler/`.
"""
