"""Walks a process tree through /proc, and ends one. Waits only for children of this process.

A walk can miss a process that is forked while it runs. So a caller that ends a tree repeats
`kill_beneath` until no children are left. Only a subreaper can know that none are left, because
orphans become its children.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress


def threads(pid: int) -> list[int]:
    """The thread ids of a process; empty when it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def read(path: str) -> bytes | None:
    """The content of a file of /proc; None when its process is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    pieces = []
    try:
        while piece := os.read(fd, 65536):
            pieces.append(piece)
    except OSError:  # it ended between the open and the read
        pass
    finally:
        os.close(fd)
    return b"".join(pieces)


def _parents() -> dict[int, list[int]]:
    """Children by parent, from one pass over /proc; for kernels without `children` files."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := read(f"/proc/{name}/stat")):
            parent = int(stat[stat.rindex(b")") + 2 :].split(None, 2)[1])
            found.setdefault(parent, []).append(int(name))
    return found


def _quick_children(pid: int) -> list[int]:
    found: list[int] = []
    for tid in threads(pid):
        if text := read(f"/proc/{pid}/task/{tid}/children"):
            found += map(int, text.split())
    return found


def state(pid: int) -> str:
    """The state of a process as a letter, as in ps: "T" is stopped; "X" when it is gone."""
    text = read(f"/proc/{pid}/stat")
    return chr(text[text.rindex(b")") + 2]) if text else "X"


def ended(pid: int) -> bool:
    """Whether a process has ended, also if nobody has waited for it. A process whose first thread
    has ended is shown as "Z" too, but lives on with its other threads.
    """
    return state(pid) in "ZX" and len(threads(pid)) < 2


def parent_and_start(pid: int) -> tuple[int, int]:
    """The parent of a process, and when it started, see `ticks_since_boot`; (0, 0) when it is gone.
    """
    text = read(f"/proc/{pid}/stat")
    if not text:
        return 0, 0
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[1]), int(fields[19])


def ticks_since_boot() -> int:
    """The time now in the clock ticks in which /proc says when a process started."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // _TICK_NS


def thread_state(pid: int, tid: int) -> str:
    """The state of a thread as a letter: "R" runs or waits for a core, "D" waits in the kernel for
    a disk or for memory; "X" when it is gone.
    """
    text = read(f"/proc/{pid}/task/{tid}/stat")
    return chr(text[text.rindex(b")") + 2]) if text else "X"


_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")


def cpu_ns(pid: int) -> int:
    """CPU time in ns of a process and of the children that it has waited for; 0 when the process is
    gone. The kernel counts in whole clock ticks.
    """
    text = read(f"/proc/{pid}/stat")
    if not text:
        return 0
    return sum(map(int, text[text.rindex(b")") + 2 :].split()[11:15])) * _TICK_NS


def high_water_kib(pid: int) -> int:
    """The most memory in KiB that a process had resident since it began its program; 0 when it is
    gone.
    """
    for line in (read(f"/proc/{pid}/status") or b"").splitlines():
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1])
    return 0


_quick = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    return _quick_children(pid) if _quick else _parents().get(pid, [])


def descendants(pid: int) -> list[int]:
    """All descendants of `pid`, parents before their children."""
    table = None if _quick else _parents()
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        below = _quick_children(parent) if table is None else table.get(parent, [])
        found += below
        todo += below
    return found


def kill_beneath(pid: int, spare: frozenset[int] = frozenset()) -> bool:
    """Kills all descendants of `pid`, except its children in `spare` and their descendants; returns
    whether there were any.
    """
    seen = False
    for child in children(pid):
        if child in spare:
            continue
        seen = True
        for victim in (child, *descendants(child)):
            with suppress(OSError):  # the process is gone, or now runs as another user
                os.kill(victim, signal.SIGKILL)
    return seen


def wait_for_all(seconds: float) -> None:
    """Waits up to `seconds` for the end of this process's children, which were killed before."""
    deadline = time.monotonic() + seconds
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.001)


def end_beneath(seconds: float) -> None:
    """Kills all descendants of this process, and waits for their end up to `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        kill_beneath(os.getpid())
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
