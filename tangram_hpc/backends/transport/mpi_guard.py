"""Watches a process while its MPI world comes up, and ends it with one line when that never ends.

Law: MPI_Init waits for ever for a rank that never comes, inside C and with the interpreter's lock
held, so no thread of ours can help: the watcher is a child process. It says its line on stderr and
sends SIGINT, whose handler is for that time the C library's `_exit`: SIGINT is 2, and so is the
exit status.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator

_WATCH = """
import os, select, signal, sys
parent, limit, first, hung, died = sys.argv[1:6]
ready = select.select([0], [], [], float(limit))[0]
if ready and os.read(0, 1):
    sys.exit(0)
if not ready:
    os.write(2, hung.encode())
    try:
        os.kill(int(parent), signal.SIGINT)
    except ProcessLookupError:
        pass
elif first == "1":
    os.write(2, died.encode())
"""
_LATER_S = 2.0  # rank 0 speaks first; where it ends the world, nobody else needs to


@contextlib.contextmanager
def bring_up(pid: int, rank: int, timeout_s: float, remedy: str) -> Iterator[None]:
    """Guards the body: after `timeout_s` seconds this process ends with status 2 and one line; when
    it ends by itself in the body, rank 0's watcher says that."""
    hung = (f"tangram: the MPI world did not come up within {timeout_s:g} s (rank {rank} waits): "
            f"every rank must call tangram_hpc.connect() or be `tangram gateway`, and find the "
            "others. What takes longer, as loading a model, comes after connect(), or "
            f"TANGRAM_MPI_TIMEOUT_S says for how many seconds all wait; else {remedy}\n")
    died = ("tangram: a rank ended while the MPI world came up; if the launcher's lines name no "
            f"other reason, MPI does not fit it: {remedy}\n")
    words = [str(pid), str(timeout_s + (_LATER_S if rank else 0)), str(int(rank == 0)), hung, died]
    try:
        child = subprocess.Popen([sys.executable, "-S", "-E", "-c", _WATCH, *words],
                                 stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError:  # no interpreter to be found: go on unwatched
        yield
        return
    assert child.stdin is not None
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    old = libc.signal(signal.SIGINT, ctypes.cast(libc._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGINT, old)
        with contextlib.suppress(OSError):
            child.stdin.write(b"!")
            child.stdin.close()
        child.wait()
