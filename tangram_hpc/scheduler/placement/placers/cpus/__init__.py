"""The CPU side of `elastic`: which waiting actions start on a node, and on how many CPUs each runs.

`elastic_cpus.py` walks the nodes. On each, `start_choice.py` chooses the actions that may start,
and `cpu_division.py` divides the CPUs. The other modules hold what these take into account: sizes
that are kept, resizes that cost time, and units that gather for a wide action.
"""
