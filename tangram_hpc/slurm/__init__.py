"""The door to Slurm: environment variables, commands, pyslurm in a child process, hostlists.

`environ.py` is the only reader of `SLURM_*`. All calls go through one budget, so that a controller
is never flooded. When to ask for nodes is decided in `scheduler/autoscale`. What a site installs on
its own nodes is in the folder `slurm/` of the repository, not here.
"""
