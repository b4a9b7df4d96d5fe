"""The policy's own GPUs: divided between training and rollouts, and lent between both.

`planner/` and `hybrid/` are pure decisions. `simulation/` plays an asynchronous RL run on paper.
`live/` carries decisions out in a trainer's processes. Turns of trajectories are dealt in
`scheduler/routing`, not here. `docs/LIBRA.md` describes the whole.
"""
