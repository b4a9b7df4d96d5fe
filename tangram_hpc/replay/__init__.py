"""Live replay of a workload: real processes, real broker and worker, virtual CPUs."""
