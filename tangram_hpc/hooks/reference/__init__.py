"""The reference trainer: a small but real asynchronous GRPO, as an example of the public API.

`python -m tangram_hpc.hooks.reference` runs it. `reference_rank.py` shows how a trainer uses
tangram_hpc; the other modules are its model, task, rollouts and planner. It imports only
`tangram_hpc`, `tangram_hpc.errors` and `tangram_hpc.training`, as a user's own trainer does. It
needs the extras torch and mpi. No other part of the package imports it.
"""
