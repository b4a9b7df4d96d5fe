"""Trainers on tangram_hpc: thin adapters over client and session, and the reference trainer.

There is one file or folder for each framework. An adapter adds no scheduling of its own.
`reference_trainer.py` and `reference_rank.py` are old names of `reference/`, kept for one release.
"""
