"""Removes a Unix socket that a process left which was killed.

A socket's file stays when its process is killed, and no other process can then listen at its path.
A file of something else, or a socket on which a process listens, is never removed.
"""

from __future__ import annotations

import errno
import socket
import stat
from pathlib import Path

from .errors import InvalidInput


def remove_stale_socket(path: Path, option: str) -> None:
    """Removes a socket on which nobody listens; does nothing if nothing is there.

    Args:
        path: where a process is about to listen.
        option: the option that named the path, for messages.

    Raises:
        InvalidInput: something else is at this path.
    """
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
