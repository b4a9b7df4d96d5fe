"""The CPU side of `elastic`: which waiting actions start on a node, and on how many CPUs each runs.

`elastic_cpus.py` walks the nodes; `cpu_division.py` divides the CPUs of one. The other modules
hold what it takes into account: sizes that are kept, and resizes that cost time.
"""
