"""The enforcement without a cgroup: binds a sandbox's process tree from outside and measures it.

This enforcement never promises that a program stays within a limit.
"""

from __future__ import annotations

import os

from .. import process_tree
from . import affinity
from .usage import GroupUsage

_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") >> 10


class UnforcedGroup:
    """See `enforce.Group`. Limits are not enforced; `usage` measures the processes that live."""

    joins: tuple[str, ...] = ()
    cpu_file = ""  # without a cgroup the kernel counts no CPU time of a group

    def __init__(self, pid: int, pinned: bool) -> None:
        self._pid = pid
        self._pinned = pinned
        self._peak_kib = 0

    def limit(self, mem_mib: int, pids: int) -> None:
        """Does nothing. Without a cgroup the sandbox's init compares the use with the limit.
        """

    def bind(self, cores: tuple[int, ...], units: int) -> bool:
        """Binds the execution process alone; the processes that it starts from then on inherit the
        binding. The call (1 us) is never skipped, because a program of the same user may have
        changed the binding.
        """
        if not cores or not self._pinned:
            return False
        try:
            os.sched_setaffinity(self._pid, cores)
        except OSError:  # a core went away, or the execution process has ended
            return False
        return True

    def rebind(self, cores: tuple[int, ...], units: int) -> bool:
        """Binds the execution process and every thread of its descendants."""
        return bool(cores) and self._pinned and affinity.apply(self._pid, cores) > 0

    def oom_kills(self) -> int:
        """Returns 0: without a cgroup nothing counts the processes that the kernel kills."""
        return 0

    def usage(self) -> GroupUsage:
        """Walks the process tree and returns what it uses.

        The memory of one walk is the private memory of all processes plus the largest shared memory
        of one process; the highest of all walks so far is returned. The CPU time of processes that
        have ended is unknown.
        """
        pids = (self._pid, *process_tree.descendants(self._pid))
        private = shared = 0
        for pid in pids:
            try:
                with open(f"/proc/{pid}/statm", "rb") as file:
                    fields = file.read().split()
            except OSError:
                continue
            private += int(fields[1]) - int(fields[2])
            shared = max(shared, int(fields[2]))
        self._peak_kib = max(self._peak_kib, (private + shared) * _PAGE_KIB)
        return GroupUsage(None, self._peak_kib, len(pids))

    def kill(self, spare: frozenset[int] = frozenset()) -> bool:
        """Returns False: a tree that forks can outrun a walk."""
        return False

    def freeze(self, on: bool) -> bool:
        """Returns False: a tree that forks can outrun a walk, as for `kill`."""
        return False

    def remove(self) -> None:
        """Does nothing."""


class Unforced:
    """See `enforce.Enforcer`. Its name is "affinity" when the CPUs are cores of this machine; else
    it is "counted", which binds nothing.
    """

    limits: frozenset[str] = frozenset()

    def __init__(self, pinned: bool) -> None:
        self.name = "affinity" if pinned else "counted"

    def group(self, number: int, pid: int) -> UnforcedGroup:
        """Makes the group. Raises OSError when the process has ended."""
        os.kill(pid, 0)
        return UnforcedGroup(pid, self.name == "affinity")

    def close(self) -> None:
        """Does nothing."""
