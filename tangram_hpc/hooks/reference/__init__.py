"""The reference trainer: a small but real asynchronous GRPO.

`python -m tangram_hpc.hooks.reference` runs it. `reference_rank.py` is the living example of how a
trainer uses tangram_hpc, and the other modules are its model, task, rollouts and planner. It needs
the extras torch and mpi. No other part of the package imports it.
"""
