"""The CPU time and memory that one command has used, and which of the two figures are lower bounds.

CPU time comes from the command's cgroup where one counts it. Otherwise it is a sum: over all
processes that were waited for, and over those that still lived when the command ended, as /proc
showed them just before they were stopped or killed. The sum misses two things and is then a lower
bound: what a process used after it was looked at, and, in a pid namespace, processes whose parent
ended before them, as the namespace's first process adopts them unseen.

Memory: the kernel counts a process's memory from before it began its program, when it still shared
all memory of the init that started it. So a figure no larger than the init's own says nothing about
the command. It is replaced by what /proc told of the command's processes while they ran, which is a
lower bound.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from typing import Any

from ...domain.outcome import CPU_AT_LEAST, RSS_AT_LEAST
from ...resources import process_tree

_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024  # the least memory of a process
_FIRST_LOOK_NS, _LAST_LOOK_NS = 4_000_000, 64_000_000_000  # each pause doubles


def own_peak_kib() -> int:
    """The most memory that this process ever had. A process that it starts by vfork begins with
    this figure.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class GroupCpu:
    """The CPU time of the cgroup that holds this process and everything that it has started.

    Attributes:
        fd: the open file that has it; -1 for none.
    """

    def __init__(self, path: str) -> None:
        """Opens `path`, see `enforce.Group.cpu_file`. Without such a file nothing is counted."""
        self.fd = -1
        with suppress(OSError):
            if path:
                self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def ns(self) -> int:
        """The time in ns so far, without that of this process; -1 when nothing counts it."""
        if self.fd < 0:
            return -1
        try:
            words = os.pread(self.fd, 512, 0).split()
            used = int(words[0]) if len(words) == 1 else (
                int(words[words.index(b"usage_usec") + 1]) * 1000)
        except (OSError, ValueError, IndexError):
            return -1
        own = resource.getrusage(resource.RUSAGE_SELF)
        return max(0, used - round((own.ru_utime + own.ru_stime) * 1e9))


class ResourceUsage:
    """CPU time and memory of one command. Create it just before the command starts.

    Args:
        group: counts the CPU time of the cgroup; None without one.
        unseen: whether processes of the command can end without this process seeing it.
        others: processes that an earlier command has left.

    Attributes:
        look_at: when `look` must be called (monotonic ns); 0 for never.
    """

    __slots__ = ("_cpu_ns", "_group", "_group_began", "_hidden", "_main_ns", "_maxrss_kib",
                 "_missed", "_others", "_pause_ns", "_stopped_ns", "_unseen", "look_at")

    def __init__(self, group: GroupCpu | None = None, unseen: bool = False,
                 others: frozenset[int] = frozenset()) -> None:
        self._group, self._unseen, self._others = group, unseen, others
        self._stopped_ns = 0
        self._group_began = group.ns() if group is not None else -1
        self._cpu_ns = self._main_ns = self._maxrss_kib = 0
        self._missed = unseen
        self._hidden = False
        self._pause_ns = _FIRST_LOOK_NS
        self.look_at = 0

    def begin(self, now: int) -> None:
        """Notes that the command has started."""
        self.look_at = now + self._pause_ns

    def reaped(self, pid: int, usage: Any, main: bool) -> None:
        """Adds a process that ended. `main`: it is the command's first process."""
        if pid in self._others:  # its time during this command is unknown
            self._missed = True
            return
        used = round((usage.ru_utime + usage.ru_stime) * 1e9)
        self._cpu_ns += used
        if main:
            self._main_ns = used
            if usage.ru_maxrss <= own_peak_kib():
                self._hidden = True
                return
        self._maxrss_kib = max(self._maxrss_kib, usage.ru_maxrss)

    def counted(self, cpu_ns: int, maxrss_kib: int, hidden: bool, group_ns: int) -> None:
        """Takes over what the fast path has measured. `group_ns` is the time of the cgroup soon
        after the command's start; -1 if it was not read.
        """
        self._cpu_ns = self._main_ns = cpu_ns
        self._maxrss_kib, self._hidden = maxrss_kib, hidden
        if group_ns >= 0:
            self._group_began = group_ns

    def look(self, pids: list[int], now: int) -> None:
        """Measures the memory of the processes. Once one of them has used more memory than this
        process, no further look is needed, because the kernel's own figure will then be right.
        """
        for pid in self._own(pids):
            self._maxrss_kib = max(self._maxrss_kib, process_tree.high_water_kib(pid))
        self._pause_ns = min(2 * self._pause_ns, _LAST_LOOK_NS)
        self.look_at = 0 if self._maxrss_kib > own_peak_kib() else now + self._pause_ns

    def stopping(self, pids: list[int]) -> None:
        """Notes the processes of a command that is about to be stopped: those that then end unseen
        are counted as they are now.
        """
        if self._unseen and self._group_began < 0:
            self._stopped_ns = sum(map(process_tree.cpu_ns, self._own(pids)))

    def missed(self) -> None:
        """Notes that processes of the command go on after its end, so that their further use is not
        counted.
        """
        self._missed = True

    def left(self, pids: list[int]) -> None:
        """Adds processes that have not been waited for after the command's end. They are stopped,
        or about to be killed.
        """
        for pid in self._own(pids):
            self._cpu_ns += process_tree.cpu_ns(pid)
            self._maxrss_kib = max(self._maxrss_kib, process_tree.high_water_kib(pid))
        self._missed = self._missed or bool(pids)

    def _own(self, pids: list[int]) -> list[int]:
        return [pid for pid in pids if pid not in self._others]

    def figures(self) -> tuple[int, int, int]:
        """CPU time in ns, memory in KiB, and which of the two are lower bounds
        (`Outcome.at_least`).
        """
        cpu_ns, bounds = max(self._cpu_ns, self._stopped_ns), CPU_AT_LEAST if self._missed else 0
        if self._group is not None and self._group_began >= 0:
            grown = self._group.ns() - self._group_began
            if grown >= 0:
                cpu_ns, bounds = max(grown, self._main_ns), 0
        floor = _PAGE_KIB if self._hidden else 0
        if self._hidden and self._maxrss_kib <= own_peak_kib():
            bounds |= RSS_AT_LEAST
        return cpu_ns, max(self._maxrss_kib, floor), bounds
