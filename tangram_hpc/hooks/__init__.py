"""Trainers on tangram_hpc: thin adapters over client and session, and the reference trainer."""
