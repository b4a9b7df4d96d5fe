"""The size of a folder in which files come and go while it is measured."""

from __future__ import annotations

import contextlib
from pathlib import Path


def bytes_in(folder: Path) -> int:
    """Returns the bytes of the files in a folder; those removed meanwhile count as 0, and so does
    a folder that is not there."""
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
