"""Takes the name off MPICH's shared memory as soon as all ranks have it: nothing outlives them.

Law: called when every rank of the world has left MPI_Init. MPICH names the file after Slurm's job
and step and removes it in MPI_Finalize only: ranks that were killed leave it, and a world with the
same numbers (a requeued job's) finds it and waits in MPI_Init for ever.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_FOLDER = "/dev/shm/mpich_shm_"


def forget_names(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Unlinks the files of MPICH that this process has mapped; the memory stays. Every rank may."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    names = {line[line.index(_FOLDER):] for line in lines if _FOLDER in line}
    for name in names:
        with contextlib.suppress(OSError):  # a rank of the same node was first
            os.unlink(name)
    return sorted(names)
