"""Watches a process while its MPI world comes up, and ends it with one line when that never ends;
watches a gateway that may be stopped for good, and ends that.

Law: MPI_Init waits for ever for a rank that never comes, inside C and with the interpreter's lock
held, so no thread of ours can help: the watcher is a child process. It says its line on stderr and
sends SIGINT, whose handler is for that time the C library's `_exit`: SIGINT is 2, and so is the
exit status.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

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
# Looks are counted, not seconds: where the whole step is stopped (`scontrol suspend`), so are we.
_WATCH_STOPPED = """
import os, select, signal, sys
gateway, looks, stopped = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
silent = 0
while silent < looks:
    if not select.select([0], [], [], 1.0)[0]:
        silent += 1
    elif os.read(0, 4096):
        silent = 0
    else:
        sys.exit(0)
os.write(2, stopped.encode())
try:
    os.kill(gateway, signal.SIGKILL)
except ProcessLookupError:
    pass
"""
_LATER_S = 2.0  # rank 0 speaks first; where it ends the world, nobody else needs to


@contextlib.contextmanager
def start_watchdog(pid: int, rank: int, timeout_s: float, remedy: str) -> Iterator[None]:
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


def end_if_stopped(pid: int, stopped_s: float) -> Callable[[], None]:
    """Starts a child process that ends this one (a gateway) with one line and SIGKILL when the
    function that is returned is not called for `stopped_s` seconds, since a process that is stopped
    can do nothing for itself and its job step would never end. The child ends with this process."""
    line = (f"tangram: gateway: it was stopped for {stopped_s:.0f} s: ending it, so that its job "
            "step can end; ranks go on over the broker's socket\n")
    words = [str(pid), str(max(1, round(stopped_s))), line]
    try:
        child = subprocess.Popen([sys.executable, "-S", "-E", "-c", _WATCH_STOPPED, *words],
                                 stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError:  # no interpreter to be found: go on unwatched
        return lambda: None
    assert child.stdin is not None
    pipe = child.stdin.fileno()
    os.set_blocking(pipe, False)

    def alive(keep: subprocess.Popen[bytes] = child) -> None:
        with contextlib.suppress(OSError):  # it has ended, or its pipe is full of our word
            os.write(pipe, b"!")

    return alive
