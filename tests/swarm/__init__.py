"""A job in one process under all faults together: what can go wrong is drawn from one seed.

The broker's driver, its scheduler, journal, spool, checkpoints and folder lock are the real ones,
and so are the workers' driver and the clients' connection with their real frames. Played are the
clock, the network, the sandboxes, and the people who submit work. `docs/FAULTS.md` says how to run
it: `make swarm`, or in this folder's parent `python -m swarm --help`.

As swarm testing does (Groce et al., Swarm Testing, ISSTA 2012), each seed also draws which kinds of
faults are possible at all and how often each strikes. So some seeds go deep into a few kinds, where
a seed with all kinds at once would never get.
"""
