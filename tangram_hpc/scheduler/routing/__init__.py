"""Decides to which rollout service the next turn of a trajectory goes.

`cmlfq.py` estimates how many tokens a trajectory has left and chooses its bucket,
`rollout_router.py` chooses an instance by load and cached tokens, `rollout_pools.py` keeps the
state of one pool, and `turn_routing.py` makes the events. The placement on CPUs and GPUs is in
`placement/`.
"""
