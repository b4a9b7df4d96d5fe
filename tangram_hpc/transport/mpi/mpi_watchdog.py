"""Watchdogs around MPI: for a rank whose world never comes up, and for a stopped gateway.

MPI_Init waits for ever for a rank that never comes, inside C and with the GIL held, so no thread of
ours could help. A stopped process cannot help itself either. Both watchdogs are therefore child
processes, which write one line to standard error before they end their parent.

While the start is watched, the handler of SIGINT is the C library's `_exit`. The watchdog sends
SIGINT, so the process ends at once. Its exit status is then 2, SIGINT's number.
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
# This watchdog counts its waits instead of reading a clock: where the whole job step is stopped
# (`scontrol suspend`), the watchdog is stopped as well, and that time must not count.
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
_LATER_S = 2.0  # other ranks wait longer than rank 0, whose end usually ends the world


@contextlib.contextmanager
def start_watchdog(pid: int, rank: int, timeout_s: float, remedy: str) -> Iterator[None]:
    """Watches the body of a `with` statement, in which MPI starts.

    If the body takes longer than `timeout_s`, this process ends with one line and status 2. If the
    process ends by itself inside the body, rank 0's watchdog says so.

    Args:
        pid: this process.
        rank: this process's number among the launched tasks.
        timeout_s: how long the body may take, seconds.
        remedy: the remedy that the lines name.
    """
    hung = (f"tangram: the MPI world did not come up within {timeout_s:g} s (rank {rank} waits): "
            "every rank must call tangram_hpc.connect() or be `tangram gateway`. Do slow work, "
            "such as loading a model, after connect(), or set TANGRAM_MPI_TIMEOUT_S to the seconds "
            f"that all ranks wait; otherwise {remedy}\n")
    died = ("tangram: a rank ended while the MPI world came up; if the launcher's lines name no "
            f"other reason, this MPI does not fit the launcher: {remedy}\n")
    arguments = [str(pid), str(timeout_s + (_LATER_S if rank else 0)), str(int(rank == 0)), hung,
                 died]
    try:
        child = subprocess.Popen([sys.executable, "-S", "-E", "-c", _WATCH, *arguments],
                                 stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError:  # no interpreter was found: go on without a watchdog
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
    """Starts a watchdog that ends a gateway which has been stopped.

    A stopped gateway would keep its job step from ever ending. The watchdog ends with this process.

    Args:
        pid: the gateway, which is this process.
        stopped_s: after this many seconds without a sign of life the gateway gets SIGKILL.

    Returns:
        A function that the gateway calls as a sign of life.
    """
    line = (f"tangram: gateway: it was stopped for {stopped_s:.0f} s: ending it, so that its job "
            "step can end; ranks go on over the broker's socket\n")
    arguments = [str(pid), str(max(1, round(stopped_s))), line]
    try:
        child = subprocess.Popen([sys.executable, "-S", "-E", "-c", _WATCH_STOPPED, *arguments],
                                 stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError:  # no interpreter was found: go on without a watchdog
        return lambda: None
    assert child.stdin is not None
    pipe = child.stdin.fileno()
    os.set_blocking(pipe, False)

    def alive(keep: subprocess.Popen[bytes] = child) -> None:
        with contextlib.suppress(OSError):  # the watchdog has ended, or its pipe is full
            os.write(pipe, b"!")

    return alive
