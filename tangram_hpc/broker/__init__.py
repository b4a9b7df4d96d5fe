"""The broker's driver: it feeds the scheduler with events and carries decisions out through ports.

Events go to the journal before the scheduler sees them. The broker never reads a payload, never
imports MPI and never unpickles a message. Decisions are made in `scheduler/`; the adapters for
sockets, files and Slurm are handed in.
"""
