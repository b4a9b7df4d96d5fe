"""Writes what a job does, and what its actions used, in the formats of other programs.

A running job is told as metrics, from the broker's view `top`; a job's actions are told as spans,
tables and usage records, from its accounting records. Nothing is computed here that `tangram top`
and `tangram acct` do not show. No broker, journal or Slurm is asked here: `cli` hands the figures
in.
"""
