"""Which cores this process may use, and how process trees are kept to the cores that they got.

`enforce.py` is the port. Its adapters are cgroup version 1, cgroup version 2, and affinity alone.
Which action gets which core is not decided here.
"""
