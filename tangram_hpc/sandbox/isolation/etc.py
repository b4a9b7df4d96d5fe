"""Owns: a worker's copy of what sandboxes may see of /etc, as one directory.

A mount for each of some fifty files is most of what it costs to build a sandbox with mounts, so
those are given one directory. The copy is as old as its worker.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable

_ETC = "/etc/"


def gather(read: Iterable[str], folder: str) -> str:
    """Copies what of `read` lies in /etc to a fresh `folder`; returns it. What cannot be read is
    passed over, as it could not be read inside either."""
    os.mkdir(folder, 0o755)
    names = [os.path.relpath(path, _ETC) for path in read if path.startswith(_ETC)]
    if names:
        subprocess.run(["cp", "-a", "-H", "--no-preserve=ownership", "--parents", *names, folder],
                       cwd=_ETC, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return folder


def others(read: Iterable[str]) -> list[str]:
    """What of `read` lies elsewhere."""
    return [path for path in read if not path.startswith(_ETC)]
