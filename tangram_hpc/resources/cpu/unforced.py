"""Owns: what can be done for a sandbox's limits without a cgroup - binding its tree from outside,
and looking at what it uses. Must not promise that a program stays within it.
"""

from __future__ import annotations

import os

from .. import tree
from . import affinity
from .usage import Usage

_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") >> 10


class UnforcedGroup:
    """See `enforce.Group`. Limits are not enforced; `usage` is a look at what lives just now."""

    joins: tuple[str, ...] = ()
    cpu_file = ""  # the kernel counts processes here, not groups

    def __init__(self, pid: int, pinned: bool) -> None:
        self._pid = pid
        self._pinned = pinned
        self._peak_kib = 0

    def limit(self, mem_mib: int, pids: int) -> None:
        """Does nothing: without a cgroup whoever runs the sandbox compares `usage` with it."""

    def bind(self, cores: tuple[int, ...], units: int) -> bool:
        """Binds the execution process alone: what it starts from then on inherits it. Never
        skipped, as a program of the same user may have changed it (1 us)."""
        if not cores or not self._pinned:
            return False
        try:
            os.sched_setaffinity(self._pid, cores)
        except OSError:  # a core went away, or the execution process has ended
            return False
        return True

    def rebind(self, cores: tuple[int, ...], units: int) -> bool:
        """Binds the execution process and every thread of all beneath it."""
        return bool(cores) and self._pinned and affinity.apply(self._pid, cores) > 0

    def oom_kills(self) -> int:
        """0: nothing tells."""
        return 0

    def usage(self) -> Usage:
        """Walks the tree: the sum of private memory and the most that one shares, the highest of
        all looks so far; CPU time of what ended meanwhile cannot be told."""
        pids = (self._pid, *tree.descendants(self._pid))
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
        return Usage(None, self._peak_kib, len(pids))

    def kill(self, spare: frozenset[int] = frozenset()) -> bool:
        """Cannot: a tree that forks can outrun whoever walks it."""
        return False

    def freeze(self, on: bool) -> bool:
        """Cannot, for the same reason."""
        return False

    def remove(self) -> None:
        """Has nothing to remove."""


class Unforced:
    """See `enforce.Enforcer`: "affinity" when the units are cores of this machine, else "counted",
    which only keeps the books."""

    limits: frozenset[str] = frozenset()

    def __init__(self, pinned: bool) -> None:
        self.name = "affinity" if pinned else "counted"

    def group(self, number: int, pid: int) -> UnforcedGroup:
        """Raises OSError when the process has ended."""
        os.kill(pid, 0)
        return UnforcedGroup(pid, self.name == "affinity")

    def close(self) -> None:
        """Has nothing to remove."""
