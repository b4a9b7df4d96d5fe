"""One MPI world of trainers and a gateway: how its ranks meet, send without blocking, and leave.

`mpi.py` is the only importer of mpi4py, and imports it lazily because the import starts MPI. MPI
gives no notice of a dead rank, so heartbeats and timeouts above MPI tell which ranks live.
"""
