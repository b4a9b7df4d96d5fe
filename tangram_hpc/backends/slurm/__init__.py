"""Slurm's doors. `environ` reads what Slurm told this process; nothing here calls Slurm."""
