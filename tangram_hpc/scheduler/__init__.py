"""Pure decisions: one deterministic `Scheduler` turns events into decisions.

`scheduler.py` is the entry (`handle` and `plan`); `state/` holds what is known, `handlers/` apply
events by subject, `placement/` decides which action starts where, `policy/` admits, ends and moves,
`routing/` routes turns among rollout services, and `autoscale/` decides when to ask Slurm for
nodes. `forecast.py` runs the scheduler ahead on a copy. There is no clock, no socket, no file and
no randomness here; drivers hand the time in and carry decisions out.
"""
