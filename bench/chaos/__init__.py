"""Parts of `bench_restarts.py`: the job that it disturbs, the disturbances, and what is checked."""
