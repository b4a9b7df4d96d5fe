"""Watchdogs around MPI: for a rank whose world never comes up, and for a stopped gateway.

MPI_Init waits for ever for a rank that never comes, inside C and with the GIL held, so no thread of
ours could help. A stopped process cannot help itself either. Both watchdogs are therefore child
processes, which write one line to standard error before they end their parent. They count their
waits instead of reading a clock: where the whole job step is stopped (`scontrol suspend`), they are
stopped as well, and that time must not count.

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
from collections.abc import Callable, Iterator, Sequence

from .mpi_shm import MPICH_FILES

_WATCH = """
import os, select, signal, sys
parent, limit, first, hung, died, shm, *step = sys.argv[1:]
def wake():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/environ", "rb") as environ:
                stopped = stat.read().rpartition(")")[2].split()[0] == "T"
                if stopped and {s.encode() for s in step} <= set(environ.read().split(b"\\0")):
                    os.kill(int(pid), signal.SIGCONT)
        except OSError:
            pass
def shared(names):
    try:
        with open(f"/proc/{parent}/maps", errors="surrogateescape") as maps:
            return names | {line[line.index(shm):].strip() for line in maps if shm in line}
    except OSError:
        return names
left, ready, looks, names = float(limit), [], 0, set()
while left > 0 and not ready:
    wait, looks = min(left, 1.0 if looks >= 10 else 0.1), looks + 1
    ready = select.select([0], [], [], wait)[0]
    left -= wait
    names = shared(names)
    if step and left < float(limit) / 2 and looks % 5 == 0:
        wake()
if ready and os.read(0, 1):
    sys.exit(0)
for name in names:
    try:
        os.unlink(name)
    except OSError:
        pass
if not ready:
    os.write(2, hung.encode())
    try:
        os.kill(int(parent), signal.SIGINT)
        os.kill(int(parent), signal.SIGCONT)  # if it is stopped, it ends only when it runs
    except ProcessLookupError:
        pass
elif first == "1":
    os.write(2, died.encode())
"""
_WATCH_STOPPED = """
import os, select, signal, sys
gateway, looks, stopped, hung = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
def state():
    with open(f"/proc/{gateway}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
silent, kill = 0, False
while True:
    if not select.select([0], [], [], 1.0)[0]:
        silent += 1
    elif told := os.read(0, 4096):
        silent, kill = 0, kill or b"k" in told
    else:
        sys.exit(0)
    if silent < looks:
        continue
    try:
        if state() in "Tt":
            os.write(2, stopped.encode())
            os.kill(gateway, signal.SIGCONT)
        elif kill:
            os.write(2, hung.encode())
            os.kill(gateway, signal.SIGKILL)
    except OSError:
        sys.exit(0)
    silent = 0
"""
_LATER_S = 2.0  # other ranks wait longer than rank 0, whose end usually ends the world


@contextlib.contextmanager
def start_watchdog(pid: int, rank: int, timeout_s: float, remedy: str,
                   step: Sequence[str] = ()) -> Iterator[None]:
    """Watches the body of a `with` statement, in which MPI starts.

    If the body takes longer than half of `timeout_s`, a rank may have been stopped before its
    program began: stopped processes of the same job step on this node are continued, as they would
    keep the step from ever ending. If the body takes longer than `timeout_s`, this process ends
    with one line and status 2. If the process ends by itself inside the body, rank 0's watchdog
    says so. In both cases the files of MPICH's shared memory that the process had mapped at the
    last look are unlinked: such a world never comes up, and MPICH would leave them behind.

    Args:
        pid: this process.
        rank: this process's number among the launched tasks.
        timeout_s: how long the body may take, seconds.
        remedy: the remedy that the lines name.
        step: environment entries, such as "NAME=VALUE", that processes of this job step alone have
            in common; empty where there is no job step.
    """
    hung = (f"tangram: the MPI world did not come up within {timeout_s:g} s (rank {rank} waits): "
            "every rank must call tangram_hpc.connect() or be `tangram gateway`. Do slow work, "
            "such as loading a model, after connect(), or set TANGRAM_MPI_TIMEOUT_S to the seconds "
            f"that all ranks wait; otherwise {remedy}\n")
    died = ("tangram: a rank ended while the MPI world came up; if the launcher's lines name no "
            f"other reason, this MPI does not fit the launcher: {remedy}\n")
    arguments = [str(pid), str(timeout_s + (_LATER_S if rank else 0)), str(int(rank == 0)), hung,
                 died, MPICH_FILES, *step]
    try:
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", _WATCH, *arguments],
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


def continue_if_stopped(pid: int, stopped_s: float, may_kill: bool) -> Callable[[], None]:
    """Starts a watchdog that continues a gateway which has been stopped.

    A stopped gateway would keep its job step from ever ending. The watchdog ends with this process.

    Args:
        pid: the gateway, which is this process.
        stopped_s: after this many seconds without a sign of life the gateway gets SIGCONT, if it
            is stopped, and again after as many.
        may_kill: whether it gets SIGKILL if it is not stopped, but has given a sign of life before.

    Returns:
        A function that the gateway calls as a sign of life.
    """
    stopped = (f"tangram: gateway: it was stopped for {stopped_s:.0f} s: continuing it, so that "
               "its job step can end\n")
    hung = (f"tangram: gateway: it hangs since {stopped_s:.0f} s: ending it, so that its job step "
            "can end; ranks go on over the broker's socket\n")
    arguments = [str(pid), str(max(1, round(stopped_s))), stopped, hung]
    sign = b"k" if may_kill else b"!"
    try:
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", _WATCH_STOPPED, *arguments],
                                 stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError:  # no interpreter was found: go on without a watchdog
        return lambda: None
    assert child.stdin is not None
    pipe = child.stdin.fileno()
    os.set_blocking(pipe, False)

    def alive(keep: subprocess.Popen[bytes] = child) -> None:
        with contextlib.suppress(OSError):  # the watchdog has ended, or its pipe is full
            os.write(pipe, sign)

    return alive
