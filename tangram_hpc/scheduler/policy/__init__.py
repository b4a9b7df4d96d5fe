"""Rules about what may start and what must end.

`admission.py` says what can never be granted and why something still waits. `session_life.py` ends
idle sessions, `ending.py` drains nodes before their allocation ends, and `moving.py` takes sessions
off a drained node. Every rule reads the ledger and returns events or reasons; none changes it.
"""
