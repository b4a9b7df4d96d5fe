"""Which cores this process may use, and how running process trees are held to their share of them.

`enforce.py` is the port, filled by cgroup version 1, cgroup version 2, or affinity alone. Which
core goes to whom is not decided here.
"""
