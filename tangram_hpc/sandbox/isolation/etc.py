"""A worker's copy of what sandboxes may see of /etc, in one directory.

A mount for each of some fifty files is most of what it costs to build a sandbox with mounts, so
such sandboxes are given one directory. The copy is as old as its worker.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable

_ETC = "/etc/"


def copy_etc(read: Iterable[str], folder: str) -> str:
    """Copies the paths of `read` that lie in /etc into a new `folder`; returns the folder. Files
    that cannot be read are left out, because the sandbox could not read them either.
    """
    os.mkdir(folder, 0o755)
    names = [os.path.relpath(path, _ETC) for path in read if path.startswith(_ETC)]
    if names:
        subprocess.run(["cp", "-a", "-H", "--no-preserve=ownership", "--parents", *names, folder],
                       cwd=_ETC, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return folder


def others(read: Iterable[str]) -> list[str]:
    """Returns the paths of `read` that do not lie in /etc."""
    return [path for path in read if not path.startswith(_ETC)]
