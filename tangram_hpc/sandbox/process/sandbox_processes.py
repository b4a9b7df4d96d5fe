"""Reaches all processes of one sandbox at once from its init: to find, stop, continue or kill them.

There are two ways. Without a pid namespace they are the descendants of the init, which is their
subreaper. With one they are everything in its /proc except the pause process, and `kill(-1)` from
within reaches all of them in one step that no fork can outrun. Nothing here waits for a process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from ...resources import process_tree

_PASSES = 40  # walks; what still forks then is stopped by the next call
# A page table of 4 KiB covers 2 MiB of mappings, so that one who maps less has tables of 4 MiB at
# most. Reading their size takes longer than reading the rest.
_TABLES_FROM_KIB = 2 << 20
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


class SandboxProcesses(Protocol):
    """The processes of one sandbox, without its init and its pause process."""

    def pids(self) -> list[int]:
        """Their process ids as this process's /proc shows them."""
        ...

    def alone(self) -> bool:
        """Whether there is none. Children that ended must have been waited for."""
        ...

    def kill(self) -> None:
        """Sends SIGKILL to all of them; repeat it until `alone`."""
        ...

    def stop(self) -> None:
        """Sends SIGSTOP to all of them."""
        ...

    def go_on(self) -> None:
        """Sends SIGCONT to all of them."""
        ...

    def signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        """Sends a signal to some of them; `pids` are numbers that `pids` gave.

        Raises:
            OSError: the sandbox has no room for the process that would send it.
        """
        ...


class DescendantProcesses:
    """The descendants of this process."""

    def pids(self) -> list[int]:
        """See `SandboxProcesses`."""
        return process_tree.descendants(os.getpid())

    def alone(self) -> bool:
        """See `SandboxProcesses`."""
        return not process_tree.children(os.getpid())

    def kill(self) -> None:
        """See `SandboxProcesses`. They are stopped first, as a stopped process cannot fork away
        from the walk.
        """
        self.stop()
        process_tree.kill_beneath(os.getpid())

    def stop(self) -> None:
        """See `SandboxProcesses`. Walks until all are stopped at once, as one may have continued
        another.
        """
        for _ in range(_PASSES):
            awake = [pid for pid in self.pids() if process_tree.state(pid) not in "TtZX"]
            if not awake:
                return
            _signal(awake, signal.SIGSTOP)

    def go_on(self) -> None:
        """See `SandboxProcesses`."""
        _signal(self.pids(), signal.SIGCONT)

    def signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        """See `SandboxProcesses`."""
        _signal(pids, number)


class NamespaceProcesses:
    """The processes of the pid namespace in which this process starts its children.

    Args:
        own: the process ids, in that namespace, of the pause process and its children.
    """

    def __init__(self, own: frozenset[int]) -> None:
        self._own = own

    def pids(self) -> list[int]:
        """See `SandboxProcesses`."""
        try:
            return [int(n) for n in os.listdir("/proc") if n.isdigit() and int(n) not in self._own]
        except OSError:
            return []

    def alone(self) -> bool:
        """See `SandboxProcesses`."""
        return not self.pids()

    def kill(self) -> None:
        """See `SandboxProcesses`."""
        self._to_all(signal.SIGKILL)

    def stop(self) -> None:
        """See `SandboxProcesses`."""
        self._to_all(signal.SIGSTOP)

    def go_on(self) -> None:
        """See `SandboxProcesses`."""
        self._to_all(signal.SIGCONT)

    def _to_all(self, number: signal.Signals) -> None:
        """Signals all processes of the namespace. A child does it, because only a process inside
        the namespace reaches all of them at once.

        Raises:
            OSError: the namespace has no room for one more process; only ending the pause process
                helps.
        """
        self.signal((-1,), number)

    def signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        """See `SandboxProcesses`. The numbers mean something inside the namespace only."""
        pid = os.fork()
        if pid == 0:
            _signal(pids, number)  # pid -1 stands for all other processes
            os._exit(0)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):  # gone meanwhile
            os.kill(pid, number)


def threads(pids: list[int], enough: int) -> int:
    """Returns how many threads these processes have; counts no further than `enough`."""
    count = 0
    for pid in pids:
        try:
            count += os.stat(f"/proc/{pid}/task").st_nlink - 2  # the kernel's count of entries
        except OSError:  # it has ended meanwhile
            continue
        if count > enough:
            break
    return count


def memory_kib(pids: list[int], enough_kib: int) -> int:
    """The memory of these processes in KiB, with the page tables of those that map much. Shared
    pages are counted once only when the plain sum, which is quick, exceeds `enough_kib`.
    """
    total = tables = 0
    for pid in pids:
        fields = process_tree.read(f"/proc/{pid}/statm")
        if fields:
            mapped, resident = (int(pages) * _PAGE_KIB for pages in fields.split(None, 2)[:2])
            total += resident
            if mapped > _TABLES_FROM_KIB:
                tables += _line_kib(pid, "status", b"VmPTE:")
    if total + tables <= enough_kib:
        return total + tables
    return tables + sum(map(_proportional_kib, pids))


def _proportional_kib(pid: int) -> int:
    if found := _line_kib(pid, "smaps_rollup", b"Pss:"):
        return found
    fields = process_tree.read(f"/proc/{pid}/statm")
    return int(fields.split()[1]) * _PAGE_KIB if fields else 0


def _line_kib(pid: int, file: str, name: bytes) -> int:
    """Returns the figure of a line in a file of a process's /proc; 0 if there is none."""
    for line in (process_tree.read(f"/proc/{pid}/{file}") or b"").splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0
