"""Trainers on tangram_hpc: thin adapters over client and session, and the reference trainer.

There is one file or folder for each framework. An adapter adds no scheduling of its own. The
modules `reference_*.py` in this folder are old names of the modules in `reference/`, kept for one
release.
"""
