"""The placers `elastic`, `paper`, `first-fit`, `fcfs:K` and `static:K`, and their parts.

A placer reads a snapshot and returns a placement (`base.Placer`); `placer_registry.py` makes one
from the name that a person writes. A placer changes no state of the scheduler. What it remembers
from one cycle to the next only saves work, and a restart may lose it.
"""
