"""Whether a daemon of MPS (NVIDIA's multi-process service) serves this user.

Law: it only knocks: it starts no daemon, ends none and says nothing to it.
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
    """Whether the control pipe of `CUDA_MPS_PIPE_DIRECTORY` is there, is root's or this user's, and
    has somebody behind it."""
    path = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY") or _DEFAULT) / "control"
    try:
        about = path.stat()
    except OSError:
        return False
    if about.st_uid not in (0, os.getuid()):
        return False  # a daemon serves one user, or all when it is root's
    if stat.S_ISSOCK(about.st_mode):
        return _socket_answers(str(path))
    return stat.S_ISFIFO(about.st_mode) and _pipe_is_read(str(path))


def _socket_answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.settimeout(1.0)
        try:
            knock.connect(path)
        except OSError as error:
            return error.errno == errno.EPROTOTYPE  # somebody is there, with another kind of socket
    return True


def _pipe_is_read(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
