"""When to ask Slurm for more nodes, when to withdraw a request, and when to give nodes back.

`alloc_demand.py` collects the facts and `elastic_allocs.py` decides. The calls of Slurm are made by
the broker's driver through the Slurm port, not here.

Experimental: run in the simulator and on the dev cluster, never at a site.
"""
