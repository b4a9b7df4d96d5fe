"""The placers: `elastic`, `paper`, `fcfs:K`, `static:K` and their parts.

Each placer reads a snapshot and returns a placement, behind `base.Placer`; `placer_registry.py`
finds one by the name that a person writes. A placer keeps no state from one pass to the next and
changes nothing.
"""
