"""Rules about which actions may start and which sessions and nodes must end.

`admission.py` refuses requests that are infeasible and says why others wait. `session_life.py` ends
idle sessions, `ending.py` drains nodes before their allocation ends, and `moving.py` takes sessions
off a drained node. Every rule reads the ledger and returns events or reasons; none changes it.
"""
