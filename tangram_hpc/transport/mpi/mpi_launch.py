"""Reads from the environment which MPI world was launched, without touching MPI.

These functions read only the mapping they are given. `TANGRAM_WORLD_SIZE` takes precedence over the
process manager's variables, and these over Slurm's: under `mpiexec` inside a job, Slurm counts the
tasks of the launcher's daemons and not our ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import InvalidInput, WrongWorld
from ...slurm.job_environment import slurm_place

REMEDY = ("start it with `mpiexec` or `srun --mpi=pmi2` (MPICH, Intel MPI; Open MPI needs "
          "--mpi=pmix), or unset TANGRAM_GATEWAY to use the socket")
_MANAGERS = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_")
_SIZES = ("TANGRAM_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


@dataclass(frozen=True)
class Launch:
    """The MPI world that was launched, as far as it is known from the environment.

    Attributes:
        size: The number of ranks; 0 for unknown.
        source: The environment variable that told the size; empty for unknown.
        rank: Our number among the launched tasks; 0 for unknown.
        timeout_s: How long the start of MPI may take, seconds.
    """

    size: int
    source: str
    rank: int
    timeout_s: float


def launch_of(environ: Mapping[str, str]) -> Launch:
    """Returns the launch that the environment describes.

    Raises:
        InvalidInput: one of our variables is no number.
        WrongWorld: there is no process manager, so that each process would be a world of its own.
    """
    size, source = 0, ""
    for name in _SIZES:
        if environ.get(name):
            size, source = _number(environ, name), name
            break
    place = slurm_place(environ)
    tasks = place.ntasks if place is not None else 0
    if not managed(environ) and (tasks > 1 or not size):
        why = f"srun started {tasks} tasks with --mpi=none" if tasks > 1 else (
            "no launcher started this process")
        raise WrongWorld(f"the MPI world would have 1 rank: TANGRAM_GATEWAY is set, but {why}; "
                         f"{REMEDY}")
    if not size and tasks:
        size, source = tasks, "SLURM_STEP_NUM_TASKS"
    patience_s = _seconds(environ.get("TANGRAM_MPI_TIMEOUT_S", "60"))
    return Launch(size, source, launch_rank(environ), patience_s)


def managed(environ: Mapping[str, str]) -> bool:
    """Returns whether a process manager of MPI started this process."""
    return any(name.startswith(_MANAGERS) for name in environ)


def launch_rank(environ: Mapping[str, str]) -> int:
    """Returns our number among the launched tasks, 0 if unknown; MPI may number ranks differently.
    """
    return next((int(environ[n]) for n in _RANKS if environ.get(n, "").isdigit()), 0)


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdigit() or not int(environ[name]):
        raise InvalidInput(f"{name}: {environ[name]!r} is no number of ranks")
    return int(environ[name])


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86400:
        raise InvalidInput(f"TANGRAM_MPI_TIMEOUT_S: {text!r} is not between 0.1 and 86400 seconds")
    return value
