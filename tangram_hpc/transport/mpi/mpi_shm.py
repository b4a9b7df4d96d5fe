"""Unlinks MPICH's shared memory files once all ranks have mapped them, so that no file is left.

MPICH names such a file after Slurm's job and step, and removes it only in MPI_Finalize. Ranks that
are killed leave it behind, and a later world with the same numbers (of the requeued job) finds it
and waits in MPI_Init for ever. Call this when every rank of the world has left MPI_Init.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MPICH_FILES = "/dev/shm/mpich_shm_"  # what their paths begin with


def forget_names(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Unlinks the files of MPICH that this process has mapped, and returns their names.

    The memory itself stays mapped. Any rank may call this, and all may.
    """
    try:
        lines = maps.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    names = {line[line.index(MPICH_FILES):] for line in lines if MPICH_FILES in line}
    for name in names:
        with contextlib.suppress(OSError):  # another rank of this node has unlinked it
            os.unlink(name)
    return sorted(names)
