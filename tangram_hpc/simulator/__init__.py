"""The simulator: the real scheduler and drivers under a clock that jumps, on modelled machines.

Here are workloads, modelled machines and Slurm, checkers of a run's laws, and the search for how
much to hold (`tangram size`). Apart from `replay/`, nothing here may import MPI, Slurm, sandboxes
or sockets.
"""
