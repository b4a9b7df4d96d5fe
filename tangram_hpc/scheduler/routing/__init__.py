"""To which rollout service the next turn of a trajectory goes.

`cmlfq.py` holds the causal multi-level feedback queues, `rollout_router.py` chooses an instance by
load and cached tokens, and `rollout_pools.py` keeps the state of one pool. CPU and GPU placement is
not here.
"""
