"""Measures what a sandbox uses while a command runs, and says which limit it has broken.

Checks take at most a twentieth of a core's time: what takes long is checked less often, but the
disk at least every five seconds. Time in which the check waits for a core is not counted. The same
holds for the checks before files are written from outside, so that the cost of a write does not
depend on how many files there are. What was written since the last check counts in full. Nothing is
ended here.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress

from ...domain.states import ActionState
from ...protocol.process_frames import SandboxLimits
from ..files import modes
from ..isolation.image_root import ImageRoot
from .sandbox_processes import SandboxProcesses, memory_kib, threads

LOOK_NS = 50_000_000
_DISK_NS = 500_000_000
_DISK_LATEST_NS = 5_000_000_000  # many small files must not buy time for large ones
_SHARE = 20
# A cgroup refuses the thread that is one too many, and here the command is ended. So a limit of N
# processes allows this many threads for each: libraries start one for every core.
_THREADS = 8
_FILE = 8192  # bytes that a file is counted for beside its content: its last block, a directory
_PLAIN = 2  # folders of a sandbox without an image that it may write
_DEPTH_MAX = 512  # nested directories; deeper ones are made only to hide files
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SandboxMeter:
    """Checks the use of one sandbox.

    Args:
        folders: where its files lie.
        processes: reaches its processes.
        others: names directly in `folders` that are not its own and do not count.
        changes: what it changed in its image, if it may; an image that was copied does not count.

    Attributes:
        due: when it wants to check next (monotonic ns); 0 for never.
    """

    def __init__(self, folders: tuple[str, ...], processes: SandboxProcesses,
                 others: frozenset[str] = frozenset(), changes: ImageRoot | None = None) -> None:
        self._folders: tuple[str | int, ...] = folders
        self._others = others
        self._free_mib = 0
        if changes is not None:
            # the folder lies outside of the sandbox's root, so it is measured by its descriptor
            self._folders = (*folders, changes.changes_fd)
            self._free_mib = changes.image_mib
        self._processes = processes
        self._limits = SandboxLimits()
        self._watch = False
        self._disk_due = 0
        self._had_mib = 0  # what the disk held at the last check
        self._written = 0  # bytes that were written from outside since then, an upper bound
        self._fresh_until = 0  # until when no write needs another check, monotonic ns
        self.due = 0

    def begin(self, limits: SandboxLimits, watch: bool, now: int) -> None:
        """Begins with a command. Without `watch` only the disk is checked."""
        self._limits = limits
        self._watch = watch and bool(limits.mem_mib or limits.pids)
        self._disk_due = now + _DISK_NS if limits.disk_mib else 0
        if self.over(limits.disk_mib):
            self.disk(limits.disk_mib)  # only what is added is this command's doing
        self.due = now + LOOK_NS if self._watch else self._disk_due

    def over(self, limit_mib: int) -> bool:
        """Whether the disk held more than the limit at the last check, with what was written from
        outside since then."""
        return bool(limit_mib) and self._had_mib + (self._written >> 20) > limit_mib

    def end(self) -> None:
        """Ends with the command."""
        self.due = 0

    def _next(self, now: int, spent: int) -> None:
        times = [self._disk_due] if self._disk_due else []
        if self._watch:
            times.append(now + max(LOOK_NS, spent * _SHARE))
        self.due = min(times, default=0)

    def look(self, now: int) -> tuple[ActionState, str] | None:
        """Checks; returns a state and a reason when a limit is broken, else None."""
        limits, broken, began = self._limits, None, time.thread_time_ns()
        if self._watch:
            pids = self._processes.pids()
            if limits.pids and len(pids) > limits.pids:
                broken = (ActionState.FAILED, f"pids: more than {limits.pids} processes at once")
            elif limits.pids and threads(pids, limits.pids * _THREADS) > limits.pids * _THREADS:
                broken = (ActionState.FAILED,
                          f"pids: more than {limits.pids * _THREADS} threads at once")
            elif limits.mem_mib:
                used = memory_kib(pids, limits.mem_mib * 1024) // 1024
                if used > limits.mem_mib:
                    broken = (ActionState.OUT_OF_MEMORY,
                              f"mem: {used} MiB used, {limits.mem_mib} MiB asked for")
        if broken is None and self._disk_due and now >= self._disk_due:
            had = self._had_mib
            broken = self.disk(limits.disk_mib)
            # it was too much before this command, which removes files
            if broken and 0 <= self._had_mib <= had:
                broken = None
            spent = (time.thread_time_ns() - began) * _SHARE
            self._disk_due = now + min(max(_DISK_NS, spent), _DISK_LATEST_NS)
        self._next(now, time.thread_time_ns() - began)
        return broken

    def before_write(self, limit_mib: int, size: int, now: int) -> tuple[ActionState, str] | None:
        """Checks whether a file of so many bytes may be written from outside: the directories do
        not hold more than the limit already. O(1) soon after a check that found room."""
        known = now < self._fresh_until and self._had_mib >= 0 and not self.over(limit_mib)
        broken = None if known else self.disk(limit_mib)
        self._written += size + _FILE
        return broken

    def disk(self, limit_mib: int) -> tuple[ActionState, str] | None:
        """Checks whether the sandbox's directories hold more than the limit."""
        began = time.thread_time_ns()
        broken = self._measure(limit_mib)
        spent, self._written = time.thread_time_ns() - began, 0
        self._fresh_until = time.monotonic_ns() + min(spent * _SHARE, _DISK_LATEST_NS)
        return broken

    def _measure(self, limit_mib: int) -> tuple[ActionState, str] | None:
        used = [used_mib(folder, self._others) for folder in self._folders]
        if min(used) < 0:
            self._had_mib = -1
            return ActionState.FAILED, f"disk: directories more than {_DEPTH_MAX} deep"
        own = (*self._folders, "/") if len(self._folders) > _PLAIN else self._folders
        self._had_mib = max(0, sum(used) - self._free_mib) + unlinked_mib(
            self._processes.pids(), own)
        if self._had_mib <= limit_mib:
            return None
        return ActionState.FAILED, f"disk: {self._had_mib} MiB written, {limit_mib} MiB allowed"


def used_mib(home: str | int, others: frozenset[str] = frozenset()) -> int:
    """The blocks of everything beneath a directory, but for what `others` names in it, in MiB; -1
    when it is too deep to be measured. The directory is a path or an open descriptor. Entries that
    come or go meanwhile may be missed. O(entries). It holds a descriptor for each level, as a path
    of many levels is longer than the kernel accepts.
    """
    blocks = 0
    walk = [_Level.of(home, None) if isinstance(home, str) else _Level.of(".", home)]
    if walk[0] is not None and others:
        walk[0].folders = [name for name in walk[0].folders if name not in others]
    try:
        while walk:
            here = walk[-1]
            if here is None or not here.folders:
                walk.pop()
                if here is not None:
                    blocks += here.blocks
                    here.close()
            elif len(walk) > _DEPTH_MAX:
                return -1
            else:
                walk.append(_Level.of(here.folders.pop(), here.fd))
    finally:
        for level in walk:
            if level is not None:
                level.close()
    return blocks * 512 >> 20


class _Level:
    """An open directory: the blocks of its entries, and its directories that are still to be
    walked.
    """

    def __init__(self, fd: int, name: str, above: int | None, mode: int) -> None:
        self.fd, self._name, self._above, self._mode = fd, name, above, mode
        self.blocks, self.folders = 0, list[str]()
        with suppress(OSError), os.scandir(fd) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    self.blocks += about.st_blocks
                    if stat.S_ISDIR(about.st_mode):
                        self.folders.append(entry.name)

    @classmethod
    def of(cls, name: str, above: int | None) -> _Level | None:
        """Opens a directory; returns None when it is gone. If its mode does not allow this, the
        mode becomes 0700 until `close`, because its user may still write to the directory.
        """
        mode = -1
        try:
            try:
                fd = os.open(name, _FOLDER, dir_fd=above)
            except PermissionError:
                about = os.stat(name, dir_fd=above, follow_symlinks=False)
                modes.change(name, 0o700, above)
                mode = stat.S_IMODE(about.st_mode)
                fd = os.open(name, _FOLDER, dir_fd=above)
        except OSError:
            return None
        return cls(fd, name, above, mode)

    def close(self) -> None:
        """Closes the directory and gives back the mode that it had."""
        os.close(self.fd)
        if self._mode >= 0:
            with suppress(OSError):
                modes.change(self._name, self._mode, self._above)


def unlinked_mib(pids: list[int], folders: Sequence[str | int]) -> int:
    """The blocks in MiB of files without a name that processes hold open on the folders' file
    systems. Files of a process that may not be examined are missed.
    """
    blocks: dict[tuple[int, int], int] = {}
    devices = {os.stat(folder).st_dev for folder in folders if os.path.exists(folder)}
    for pid in pids:
        with suppress(OSError):  # the process ended, or may not be examined
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    about = os.stat(f"/proc/{pid}/fd/{name}")
                    if not about.st_nlink and about.st_dev in devices:
                        blocks[about.st_dev, about.st_ino] = about.st_blocks
    return sum(blocks.values()) * 512 >> 20
