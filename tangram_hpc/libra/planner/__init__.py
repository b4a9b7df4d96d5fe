"""The planner: how many GPUs train, how many roll out, and in which layouts.

The package holds the cost models, the layout search tree of the training side, the dynamic program
of the rollout side, and the planner that runs beside a trainer. All modules are pure functions of
their arguments. Files that a person writes for the planner are read in `config/planner`.
"""
