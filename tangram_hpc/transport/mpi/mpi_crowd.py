"""Whether a node's ranks outnumber the cores they may use, and how they are to wait for MPI then.

Law: reads only what it is given. A rank that waits by `sched_yield` keeps its core busy, and some
kernels (Linux 6.18 was seen) then leave everything else on the node without a core for seconds, the
broker and slurmd too. Where ranks share cores they sleep instead; what the user has set stays.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...slurm.environ import slurm_place

_HERE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")  # Hydra's word, and Open MPI's
_SLEEP = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}  # MPICH; Open MPI can only yield


def crowded(environ: Mapping[str, str], usable: int, online: int) -> bool:
    """Whether this node has more ranks than cores for them.

    Args:
        usable: how many CPUs this process may run on.
        online: how many the machine has.
    """
    place = slurm_place(environ)
    told = next((int(environ[n]) for n in _HERE if environ.get(n, "").isdigit()), 0)
    ranks = told or (place.tasks_here if place is not None else 0)
    own = not told and place is not None and place.bound  # srun gave each task CPUs of its own
    return ranks > (online if own else min(usable, online))


def shares_fate(environ: Mapping[str, str]) -> bool:
    """Whether the launcher ends all ranks when one exits without finalising MPI: `mpiexec` does,
    `srun --kill-on-bad-exit=0` does not."""
    return any(environ.get(name) for name in _HERE)


def waiting(environ: Mapping[str, str], is_crowded: bool) -> dict[str, str]:
    """What MPI must find in the environment before it starts, beside what is set there."""
    return {k: v for k, v in _SLEEP.items() if is_crowded and k not in environ}
