"""A real broker among workers and clients that say whatever the protocol allows, drawn by a seed.

The swarm (`tests/swarm`) looks for faults of processes, disks and connections, and plays whole
frames, files and threads. This model has none of these, so it is some ten times as fast, and it
draws what the swarm does not: every kind of action and session, snapshots and prepared
environments, several services with batches, rollout pools, endpoints, tenants, allocations that
end, and every placer. Clients close, are lost, do not read and come back at any point, and so does
the broker, from its journal or a checkpoint, on a machine whose clock may be behind. The job may be
suspended.
"""
