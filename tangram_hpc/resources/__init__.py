"""A node's CPUs, memory, GPUs and process trees: what there is, and how limits are enforced.

`cpu/` has affinity and cgroups, `gpu/` has NVML and MPS. `memory.py` reads how much memory there
is, and `process_tree.py` walks and ends trees of processes. Who gets which resource is decided in
`scheduler/`.
"""
