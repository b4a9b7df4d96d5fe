"""Runs a workload live on this machine and compares the run with a simulation (`tangram replay`).

The package drives a `LocalCluster` with real processes through the public client. It therefore
stands after `app/` in the import order, unlike the rest of the simulator, which may not see real
backends.
"""
