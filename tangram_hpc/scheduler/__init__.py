"""The scheduler: one deterministic `Scheduler` turns events into decisions. Pure.

`scheduler.py` is the entry (`handle` and `plan`); `state/` holds the ledger and the queues,
`handlers/` apply events by subject, `placement/` decides which action starts where, `policy/`
refuses requests, ends sessions and moves them, `routing/` routes turns among rollout services, and
`autoscale/` decides when to ask Slurm for nodes. `forecast.py` runs a copy of the scheduler ahead.
The package uses no clock, socket, file or randomness; drivers hand the time in and carry decisions
out.
"""
