"""The simulator: the real scheduler and drivers with a simulated clock, on modelled machines.

The package holds workloads, modelled machines and a modelled Slurm, checkers of a run's invariants,
and the search for the resources that a workload needs (`tangram size`). Apart from `replay/`,
nothing here may import MPI, Slurm, sandboxes or sockets.
"""
