"""Divides the policy's own GPUs between training and rollouts, and lends them between both.

`planner/` and `hybrid/` are pure decisions. `simulation/` simulates an asynchronous RL run. `live/`
carries decisions out in a trainer's processes. Turns of trajectories are routed in
`scheduler/routing`, not here. `docs/LIBRA.md` describes the whole.
"""
