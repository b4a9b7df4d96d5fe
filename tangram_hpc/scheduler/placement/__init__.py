"""Chooses which action starts on which node and on how many units, and makes lease events.

`snapshot.py` copies the free amounts that a placer may see, `placers/` choose, and `carry_out.py`
turns a choice into events with exact cores and GPUs. `prefetch.py` queues short leases behind
others on their unit, and `batches.py` does so for calls of services that run as one batch. Nothing
in this package changes the ledger.
"""
