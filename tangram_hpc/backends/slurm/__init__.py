"""Slurm's doors: `environ` reads what Slurm told this process, the rest fills `ports.Slurm`."""
