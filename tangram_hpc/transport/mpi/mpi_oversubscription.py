"""Detects oversubscription (more ranks on a node than cores they may use), and chooses how to wait.

A rank that waits for MPI by `sched_yield` keeps its core busy. Where ranks share cores, some
kernels (seen on Linux 6.18) then leave everything else on the node without a core for seconds, the
broker and slurmd included. Oversubscribed ranks sleep instead (decision 0028).

These functions read only the environment they are given, and never override what the user has set.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...slurm.job_environment import slurm_place

_LOCAL_RANKS = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")  # set by Hydra, by Open MPI
# makes MPICH and Intel MPI sleep; Open MPI can only yield
_SLEEP = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "I_MPI_THREAD_YIELD": "3"}


def oversubscribed(environ: Mapping[str, str], usable: int, online: int) -> bool:
    """Returns whether this node has more ranks than cores for them.

    Args:
        environ: the environment that the launcher made.
        usable: the number of CPUs on which this process may run.
        online: the number of CPUs of the machine.
    """
    place = slurm_place(environ)
    launched = next((int(environ[n]) for n in _LOCAL_RANKS if environ.get(n, "").isdigit()), 0)
    ranks = launched or (place.tasks_here if place is not None else 0)
    # srun gave each task CPUs of its own, so `usable` is one rank's part and not the node's
    own = not launched and place is not None and place.bound
    return ranks > (online if own else min(usable, online))


def shares_fate(environ: Mapping[str, str]) -> bool:
    """Returns whether the launcher ends all ranks when one exits without finalising MPI.

    `mpiexec` does, `srun --kill-on-bad-exit=0` does not.
    """
    return any(environ.get(name) for name in _LOCAL_RANKS)


def wait_environment(environ: Mapping[str, str], is_shared: bool) -> dict[str, str]:
    """Returns variables to add to the environment before MPI starts, without those already set."""
    return {k: v for k, v in _SLEEP.items() if is_shared and k not in environ}
