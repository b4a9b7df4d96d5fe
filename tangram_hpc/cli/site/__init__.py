"""Holds the verb for a site's administrators.

It copies files; what these do is said in `slurm/README.md`.
"""
