"""How frames travel: sockets for everybody, MPI for clients through a gateway rank.

These modules fill the link, channel and pipe ports. What a frame means is defined in `protocol/`,
and who listens where is put together in `app/`.
"""
