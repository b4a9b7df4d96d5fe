"""Carries Libra out in a trainer's processes: the hybrid pool over sockets, and external cost
models.

Which replica moves when is decided in `libra/hybrid`; this package only carries it out. The trainer
hands in its own communicator, which is used and never changed, so mpi4py is not imported here. The
modules `core.py` and `lend.py` are old names, kept for one release.

Experimental: run on CPUs only, never on GPUs or over a fast fabric.
"""
