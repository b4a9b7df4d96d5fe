"""One MPI world of trainers and a gateway: met, split, used by polling, and left in order.

`mpi.py` is the only door to mpi4py and imports it lazily, because the import starts MPI. Liveness
never rests on MPI; acknowledgements and silence are judged above it.
"""
