"""The placers `elastic`, `paper`, `first-fit`, `fcfs:K` and `static:K`, and their parts.

A placer reads a snapshot and returns a placement (`base.Placer`); `placer_registry.py` makes a
placer from its name. A placer changes no state of the scheduler. Its memory from one cycle to the
next only saves work, and a restart may lose it.
"""
