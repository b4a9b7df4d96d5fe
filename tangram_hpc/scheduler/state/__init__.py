"""The state of the scheduler: the ledger, the queue of ready actions, and the tables inside them.

Core sets, GPU blocks, token buckets, run time estimates and the tables of legal moves are here. The
ledger is changed by `Scheduler.handle` alone and can check itself. This package makes no decisions;
the packages beside it do.
"""
