"""The parts of the scheduler that apply facts to the ledger, one subject a file.

The subjects are nodes, sessions, services, allocations, endpoints, rollout pools, and a broker that
starts again. A handler changes the ledger in O(1) and returns what follows. It never plans;
planning is the task of `placement/`, `policy/` and `autoscale/`.
"""
