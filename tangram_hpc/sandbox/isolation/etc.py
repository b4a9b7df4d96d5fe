"""A worker's copy of what sandboxes may see of /etc, in one directory.

A mount for each of some fifty files is most of what it costs to build a sandbox with mounts, so
such sandboxes are given one directory. The copy is as old as its worker, and its `hosts` also names
the sandbox. Directories of hundreds of links are mounted over it, because to copy them takes a
worker up to half a second on ext4.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress

from ...errors import DISK_FULL
from . import hosts

_ETC = "/etc/"
_OF_MANY_LINKS = frozenset({"/etc/alternatives", "/etc/ssl/certs", "/etc/pki/ca-trust"})


def copy_etc(read: Iterable[str], folder: str) -> str:
    """Copies the paths of `read` that lie in /etc into a new `folder`; returns the folder. Files
    that cannot be read are left out, because the sandbox could not read them either. Where a
    directory is to be mounted, the copy has an empty one.

    Raises:
        OSError: the disk of `folder` is full, or it cannot be written.
    """
    os.mkdir(folder, 0o755)
    inside = [path for path in read if path.startswith(_ETC)]
    to_mount = mounted(inside)
    for path in inside:
        if path not in to_mount:
            _copy(path, os.path.join(folder, os.path.relpath(path, _ETC)))
    for path in to_mount:
        os.makedirs(os.path.join(folder, os.path.relpath(path, _ETC)), exist_ok=True)
    _complete_hosts(os.path.join(folder, "hosts"))
    return folder


def _copy(path: str, target: str) -> None:
    """Copies a file or a directory, to which `path` may be a link, and leaves out what cannot be
    read. The program `cp` of Ubuntu 25.10 skips directories when it is to follow links so.
    """
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        if os.path.isdir(path):
            shutil.copytree(path, target, symlinks=True)
        else:
            shutil.copy2(path, target)
    except shutil.Error as error:  # after all was copied that can be; of an errno it keeps the text
        _check_room(" ".join(str(why) for _, _, why in error.args[0]))
    except OSError as error:
        _check_room(str(error))


def _check_room(why: str) -> None:
    """Raises an error if a copy failed because the disk is full: a file that was cut off must not
    be shown as the node's."""
    for code in DISK_FULL:
        if f"[Errno {code}]" in why:
            raise OSError(code, os.strerror(code))


def _complete_hosts(path: str) -> None:
    text = b""
    with suppress(FileNotFoundError):
        with open(path, "rb") as file:
            text = file.read()
        os.unlink(path)  # it has the mode of the node's file, which its owner may not write
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
        file.write(hosts.completed(text))


def mounted(read: Iterable[str]) -> list[str]:
    """Returns the directories of `read` that are mounted over the copy of /etc."""
    return [path for path in read if path in _OF_MANY_LINKS and os.path.isdir(path)]


def others(read: Iterable[str]) -> list[str]:
    """Returns the paths of `read` that do not lie in /etc."""
    return [path for path in read if not path.startswith(_ETC)]
