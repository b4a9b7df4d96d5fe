"""Gives the path of a Unix socket to one process after another.

A socket's file stays when its process is killed, and no other process can then listen at its path.
So a process that is about to listen removes a socket on which nobody listens. A file of something
else, or a socket on which a process listens, is never removed.

Invariants: only one process at a time looks at a path and changes what is there, since between its
look and its change another one could begin to listen. It therefore holds a name, made from the
path, among the abstract sockets of the machine, which end with their process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import InvalidInput


@contextmanager
def free_path(path: Path, option: str) -> Iterator[None]:
    """Makes a path free for a socket of this user alone. The caller binds the socket, and listens,
    within the `with` block.

    Args:
        path: where this process is about to listen.
        option: the option that named the path, for messages.

    Raises:
        InvalidInput: the path cannot be had, or an OSError was raised within the block.
    """
    with _alone_at(path, option):
        before = os.umask(0o177)
        try:
            _remove_stale(path, option)
            yield
        except OSError as error:
            raise InvalidInput(f"{option} {path}: {error.strerror or error}") from None
        finally:
            os.umask(before)


def remove_own_socket(path: Path) -> None:
    """Removes the file of a socket that this process has closed. If another process listens there
    by now, or is about to, the file is that one's.
    """
    with suppress(InvalidInput, OSError), _alone_at(path, ""):
        _remove_stale(path, "")


@contextmanager
def _alone_at(path: Path, option: str) -> Iterator[None]:
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mark:
        try:
            mark.bind(f"\0tangram-{name}")
        except OSError:
            raise InvalidInput(f"{option} {path}: another process begins or ends to listen there; "
                               "try again, or name another path") from None
        yield


def _remove_stale(path: Path, option: str) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidInput(f"{option} {path}: exists, and is no socket; name another path")
    except OSError:  # nothing is there, or binding says what is wrong
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # the listener's queue may be full
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                path.unlink(missing_ok=True)
                return
            if error.errno != errno.EAGAIN:  # the queue is full
                raise InvalidInput(f"{option} {path}: {error.strerror or error}") from None
    raise InvalidInput(f"{option} {path}: another process listens there; name another path")
