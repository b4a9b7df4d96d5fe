"""Whether a daemon of MPS (NVIDIA's multi-process service) serves this user.

The check only tries to connect: it starts no daemon, ends none and sends nothing to one.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

_DEFAULT = "/tmp/nvidia-mps"  # where CUDA itself looks


def mps_serves(environ: Mapping[str, str]) -> bool:
    """Whether the control pipe in `CUDA_MPS_PIPE_DIRECTORY` exists, belongs to root or this user,
    and has a process behind it.
    """
    path = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY") or _DEFAULT) / "control"
    try:
        about = path.stat()
    except OSError:
        return False
    if about.st_uid not in (0, os.getuid()):
        return False  # a daemon serves its own user, and a daemon of root serves all users
    if stat.S_ISSOCK(about.st_mode):
        return _socket_answers(str(path))
    return stat.S_ISFIFO(about.st_mode) and _pipe_is_read(str(path))


def _socket_answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.settimeout(1.0)
        try:
            knock.connect(path)
        except OSError as error:
            # EPROTOTYPE: a process listens there, on a socket of another type
            return error.errno == errno.EPROTOTYPE
    return True


def _pipe_is_read(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
