"""Everything that talks to Slurm: environment variables, commands, pyslurm, hostlists.

`job_environment.py` is the only reader of `SLURM_*`. All calls of a broker go through one rate
limit (`budget.py`), so that a controller is never flooded. When to ask for nodes is decided in
`scheduler/autoscale`. What a site installs on its own nodes is in the folder `slurm/` of the
repository, not here.
"""
