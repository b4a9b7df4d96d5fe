"""Owns: scratch directories - making, emptying and removing them whatever their user left inside.
Must not be called while anything still runs in one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

TMP = "tmp"


def make(path: str) -> None:
    """A fresh directory that only its owner can enter, with `tmp` inside.

    Raises:
        OSError: it could not be made.
    """
    os.mkdir(path, 0o700)
    os.mkdir(os.path.join(path, TMP), 0o700)


def empty(path: str) -> bool:
    """Makes a used directory fresh again; returns False when it had to be made anew."""
    tmp = os.path.join(path, TMP)
    try:
        names = os.listdir(path)
        if names == [TMP] and not os.path.islink(tmp) and not os.listdir(tmp):
            return True
        _strip(path)
        os.mkdir(tmp, 0o700)
        return True
    except OSError:
        remove(path)
        make(path)
        return False


def remove(path: str) -> bool:
    """Removes a directory with all in it; returns whether it is gone."""
    with suppress(OSError):
        _strip(path)
        os.rmdir(path)
    with suppress(OSError):  # a file or a link stands there instead
        os.unlink(path)
    return not os.path.lexists(path)


def _strip(root: str) -> None:
    """Removes all in `root`. A directory that is not empty is first moved up into `root`: so
    neither its depth nor the length of its path can be more than we can handle."""
    os.chmod(root, 0o700)
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    fresh = map(f".{os.urandom(8).hex()}-{{}}".format, count())  # names that cannot be there yet
    try:
        todo = [""]
        while todo:
            name = todo.pop()
            here = top if not name else _enter(name, top)
            try:
                for entry in os.listdir(here):
                    todo += _drop(entry, here, top, fresh)
            finally:
                if name:
                    os.close(here)
            if name:
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _enter(name: str, top: int) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=top)


def _drop(entry: str, here: int, top: int, fresh: Iterator[str]) -> list[str]:
    """Removes one entry, or moves it up and returns the name that is still to do."""
    if not stat.S_ISDIR(os.lstat(entry, dir_fd=here).st_mode):
        os.unlink(entry, dir_fd=here)
        return []
    with suppress(OSError):
        os.rmdir(entry, dir_fd=here)
        return []
    os.chmod(entry, 0o700, dir_fd=here)  # a user's own directory may be closed to its owner
    name = next(fresh)
    os.rename(entry, name, src_dir_fd=here, dst_dir_fd=top)
    return [name]
