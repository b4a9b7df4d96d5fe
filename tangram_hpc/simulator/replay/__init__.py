"""A workload run live on this machine, beside its simulation (`tangram replay`).

It drives a `LocalCluster` with real processes through the public client. It therefore stands after
`app/` in the import order, unlike the rest of the simulator, which may not see real backends.
"""
