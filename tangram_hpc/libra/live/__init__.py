"""Libra in a trainer's processes: the hybrid pool over sockets, and cost models in other programs.

What moves when is decided in `libra/hybrid`; it is only carried out here. The trainer hands its own
communicator in, which is used and never changed, so mpi4py is not imported here.

Experimental: run on CPUs only, never on GPUs or over a fast fabric.
"""
