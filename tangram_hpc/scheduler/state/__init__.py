"""What the scheduler knows: the ledger, the queue of ready actions, and the tables inside them.

Core sets, GPU blocks, token buckets, run time estimates and the tables of legal moves are here. The
ledger is changed by `Scheduler.handle` alone and can check itself. What to do next is not decided
here; that is the task of the packages beside this one.
"""
