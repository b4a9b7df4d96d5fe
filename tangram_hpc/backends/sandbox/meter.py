"""Owns: measuring what one sandbox uses while a command runs, and saying
which limit it broke. Must not end anything.

Law: a look costs at most a twentieth of the time: what takes long is looked at less often.
"""

from __future__ import annotations

import os
import stat
import time

from ...domain.states import ActionState
from .hostwire import Limits
from .ward import Ward, memory_kib

LOOK_NS = 50_000_000
_DISK_NS = 500_000_000
_SHARE = 20
_DEPTH_MAX = 256  # directories in each other; deeper is only made to hide


class Meter:
    """Looks at the use of one sandbox, whose files lie in `folders`; `due` is when it wants to look
    next (monotonic ns, 0: never)."""

    def __init__(self, folders: tuple[str, ...], ward: Ward) -> None:
        self._folders = folders
        self._ward = ward
        self._limits = Limits()
        self._watch = False
        self._disk_due = 0
        self.due = 0

    def begin(self, limits: Limits, watch: bool, now: int) -> None:
        """A command begins. Without `watch` only the disk is looked at."""
        self._limits = limits
        self._watch = watch and bool(limits.mem_mib or limits.pids)
        self._disk_due = now + _DISK_NS if limits.disk_mib else 0
        self._next(now)

    def end(self) -> None:
        """It has ended."""
        self.due = 0

    def _next(self, now: int, spent: int = 0) -> None:
        times = [self._disk_due] if self._disk_due else []
        if self._watch:
            times.append(now + max(LOOK_NS, spent * _SHARE))
        self.due = min(times, default=0)

    def look(self, now: int) -> tuple[ActionState, str] | None:
        """Which limit is broken, as a state and a reason; None when none is."""
        limits, broken = self._limits, None
        if self._watch:
            pids = self._ward.pids()
            if limits.pids and len(pids) > limits.pids:
                broken = (ActionState.FAILED, f"pids: more than {limits.pids} processes at once")
            elif limits.mem_mib:
                used = memory_kib(pids, limits.mem_mib * 1024) // 1024
                if used > limits.mem_mib:
                    broken = (ActionState.OUT_OF_MEMORY,
                              f"mem: {used} MiB used, {limits.mem_mib} MiB asked for")
        if broken is None and self._disk_due and now >= self._disk_due:
            broken = self.disk(limits.disk_mib)
            self._disk_due = now + max(_DISK_NS, (time.monotonic_ns() - now) * _SHARE)
        self._next(now, time.monotonic_ns() - now)
        return broken

    def disk(self, limit_mib: int) -> tuple[ActionState, str] | None:
        """Whether the sandbox's directories hold more than that."""
        used = [used_mib(folder) for folder in self._folders]
        if min(used) < 0:
            return ActionState.FAILED, f"disk: directories more than {_DEPTH_MAX} deep"
        if sum(used) <= limit_mib:
            return None
        return ActionState.FAILED, f"disk: {sum(used)} MiB written, {limit_mib} MiB allowed"


def used_mib(home: str) -> int:
    """The blocks of all beneath a directory, in MiB; -1 when it is too deep to be measured. Entries
    that come or go meanwhile may be missed. O(entries)."""
    blocks, todo = 0, [(home, 0)]
    while todo:
        path, depth = todo.pop()
        if depth > _DEPTH_MAX:
            return -1
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    about = entry.stat(follow_symlinks=False)
                    blocks += about.st_blocks
                    if stat.S_ISDIR(about.st_mode):
                        todo.append((entry.path, depth + 1))
        except OSError:  # it went, or was closed to us: what is in it stays uncounted
            continue
    return blocks * 512 >> 20
