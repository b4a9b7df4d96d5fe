"""The gateway's driver: one rank of the trainers' MPI world that carries bytes to the broker.

It reads no message and decides nothing. MPI itself is in `transport/mpi`. A gateway may die at any
time; its ranks then go on over the socket.
"""
