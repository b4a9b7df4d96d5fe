"""How frames travel: sockets for everybody, and MPI for clients behind a gateway rank.

These modules are the adapters of the link, channel and pipe ports. What a frame means is defined in
`protocol/`, and `app/` decides who listens where.
"""
