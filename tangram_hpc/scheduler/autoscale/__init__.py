"""Decides when to ask Slurm for more nodes, to withdraw a request, and to give nodes back.

`alloc_demand.py` collects the facts, `elastic_allocs.py` decides, and `backoff.py` says when a
rejected shape may be requested again. The broker's driver calls Slurm through the Slurm port; this
package does not.

Experimental: it has run in the simulator and on the dev cluster, never at a site.
"""
