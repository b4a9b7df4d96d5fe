"""Finds the `mpiexec` that starts programs of this interpreter's MPI.

An MPI library that was installed with pip has its launcher beside the interpreter. A launcher of
another MPI on the search path would start worlds of size 1, so the one beside the interpreter wins.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from ...errors import MissingExtra, how_to_install


def mpiexec() -> str:
    """Returns the path of the launcher of this interpreter's MPI.

    Raises:
        MissingExtra: There is no launcher.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise MissingExtra(f"mpiexec is not here; install it with {how_to_install('demo')}")
    return found
