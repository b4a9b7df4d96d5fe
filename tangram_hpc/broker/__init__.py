"""The broker: a dumb driver around the scheduler. Ports only; no MPI, no Slurm, no pickle."""
