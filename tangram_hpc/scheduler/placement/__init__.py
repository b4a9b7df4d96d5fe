"""Who starts where, and on how many units: from a snapshot of the ledger to lease events.

`snapshot.py` says what a placer sees, `placers/` choose, and `carry_out.py` turns a choice into
events with exact cores and GPUs. Leases given ahead of time and batches of calls are here as well.
Nothing in this package changes the ledger.
"""
