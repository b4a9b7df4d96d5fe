"""The elastic hybrid pool, live: training's core (MPI), its desk and lanes (sockets), the members.

Law: what moves when is decided in `core/`; here it is only carried out. The core's communicator is
used and never changed. mpi4py is not imported: the trainer hands its communicator in.
"""
