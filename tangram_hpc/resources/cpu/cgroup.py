"""What cgroup versions 1 and 2 have in common: a worker's cgroups, one for each execution process.

A limit is written only when it has changed. The names of files, which differ by version, are in
`cgroup1.py` and `cgroup2.py`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from . import affinity, cgroupfs
from .usage import GroupUsage

PERIOD_US = 100_000
# seconds; a process that takes longer to freeze waits for a disk, and cannot fork meanwhile
_FREEZE_S = 0.02
_CLOSE_S = 5.0

CORES, QUOTA, MEMORY, PIDS = "cores", "quota", "memory", "pids"
ALL = frozenset({CORES, QUOTA, MEMORY, PIDS})


class CgroupGroup:
    """The cgroups of one execution process: one in each hierarchy that is used.

    Subclasses write the limits.

    Attributes:
        folders: the cgroups.
        joins: the files by which a process with one thread enters them.
    """

    _JOIN = "cgroup.procs"

    def __init__(self, owner: CgroupEnforcer, pid: int, folders: list[str]) -> None:
        self._owner = owner
        self._pid = pid
        self.folders = folders
        self.joins = tuple(f"{folder}/{self._JOIN}" for folder in folders)
        self._cores: tuple[int, ...] = ()
        self._units = 0
        self._mem_mib = 0
        self._pids = 0

    # ---- what differs by version ----

    @property
    def cpu_file(self) -> str:
        """See `enforce.Group`."""
        raise NotImplementedError

    def _write_cores(self, cores: tuple[int, ...]) -> None:
        raise NotImplementedError

    def _write_quota(self, period_us: int, quota_us: int) -> None:
        raise NotImplementedError

    def _write_memory(self, size: int) -> bool:
        """Writes the limit, and returns whether it is `size`; else it is the memory in use, which
        is more.
        """
        raise NotImplementedError

    def _write_pids(self, pids: int) -> None:
        raise NotImplementedError

    def _freezer(self) -> str:
        """The folder of the cgroup that can be frozen; empty when there is none."""
        raise NotImplementedError

    def _freeze(self, folder: str, on: bool) -> None:
        raise NotImplementedError

    def _frozen(self, folder: str) -> bool:
        raise NotImplementedError

    def _kill_all(self) -> bool:
        """Kills all processes in one call; returns whether this version can."""
        return False

    def oom_kills(self) -> int:
        """Returns how many of the group's processes the kernel has killed for memory."""
        raise NotImplementedError

    def usage(self) -> GroupUsage:
        """Returns the resources that the group has used so far."""
        raise NotImplementedError

    # ---- what both versions share ----

    def limit(self, mem_mib: int, pids: int) -> None:
        """Limits memory, in MiB, and processes with their threads; 0 means no limit.

        If more memory is in use than the kernel can take back, the memory in use becomes the limit,
        and the next call tries again.

        Raises:
            OSError: the kernel refuses.
        """
        limits = self._owner.limits
        if mem_mib != self._mem_mib and MEMORY in limits:
            self._mem_mib = mem_mib if self._write_memory(mem_mib << 20) else -1
        if pids != self._pids and PIDS in limits:
            self._write_pids(pids)
            self._pids = pids

    def bind(self, cores: tuple[int, ...], units: int) -> bool:
        """Binds the execution process before an action, when nothing else runs in the group: to
        `cores`, or, for (), to the CPU time of `units` cores. Returns whether this is enforced.
        """
        return self._bind(cores, units, self._bind_process)

    def rebind(self, cores: tuple[int, ...], units: int) -> bool:
        """Does the same as `bind` for all processes that already run in the group."""
        return self._bind(cores, units, self._bind_tree)

    def _bind(self, cores: tuple[int, ...], units: int,
              unforced: Callable[[tuple[int, ...]], bool]) -> bool:
        limits = self._owner.limits
        holds = bool(cores) or not units or QUOTA in limits
        try:
            if CORES in limits:
                if cores != self._cores:
                    self._write_cores(cores)
                    self._cores = cores
                if cores:
                    units = 0  # the cores are the limit
            elif cores:
                units = len(cores)  # a quota, as a program may change its own affinity
                if not unforced(cores) and QUOTA not in limits:
                    return False
            if QUOTA in limits and units != self._units:
                self._write_quota(PERIOD_US, units * PERIOD_US)
                self._units = units
        except OSError:  # a core went away, or the execution process has ended
            return False
        return holds

    def _bind_process(self, cores: tuple[int, ...]) -> bool:
        os.sched_setaffinity(self._pid, cores)
        return True

    def _bind_tree(self, cores: tuple[int, ...]) -> bool:
        return affinity.apply(self._pid, cores) > 0

    def kill(self, spare: frozenset[int] = frozenset()) -> bool:
        """Kills all processes of the group but `spare`; returns whether certainly none was missed.
        """
        if not spare and self._kill_all():
            return True
        if not self._freezer():
            return False
        try:
            frozen = self.freeze(True)
            cgroupfs.kill_members(self._freezer(), spare)
        finally:
            self.freeze(False)
        return frozen

    def freeze(self, on: bool) -> bool:
        """Stops all processes of the group (also the execution process), or continues them.

        Returns:
            Whether all processes have stopped or continued within 20 ms. If not, the rest follow
            later.
        """
        folder = self._freezer()
        if not folder:
            return False
        deadline = time.monotonic() + _FREEZE_S
        try:
            self._freeze(folder, on)
            while self._frozen(folder) != on:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.0002)
        except OSError:  # it has been removed
            return False
        return True

    def remove(self) -> None:
        """Removes the cgroups after the execution process has died.

        Processes that still live in them are killed; the cgroups are then removed a little later,
        when the next group is made or removed, or by `close`.
        """
        self._owner.forget(self)


class CgroupEnforcer:
    """The cgroups of this worker.

    Attributes:
        limits: which of CORES, QUOTA, MEMORY and PIDS are enforced so that no program can exceed
            them.
    """

    name = ""

    def __init__(self) -> None:
        self.limits: frozenset[str] = frozenset()
        self._groups: dict[CgroupGroup, None] = {}
        self._late: list[str] = []

    def _make(self, number: int | str, pid: int) -> CgroupGroup:
        """Makes the cgroups of a group. Raises OSError, and leaves nothing behind."""
        raise NotImplementedError

    def _end(self) -> None:
        """Removes the cgroups that this worker has made for itself, not for one of the groups."""
        raise NotImplementedError

    def group(self, number: int, pid: int) -> CgroupGroup:
        """Makes the group of execution process `number`, which then enters it.

        Raises:
            OSError: the kernel refuses; nothing is left behind.
        """
        self._again()
        group = self._make(number, pid)
        self._groups[group] = None
        return group

    def _fill(self, folders: list[str]) -> None:
        """Makes the cgroups of these names, or none of them."""
        made: list[str] = []
        try:
            for folder in folders:
                cgroupfs.make(folder)
                made.append(folder)
                self._prepare(folder)
        except OSError:
            self._late += [folder for folder in made if not cgroupfs.discard(folder)]
            raise

    def _prepare(self, folder: str) -> None:
        """Prepares a new cgroup of a group."""

    def forget(self, group: CgroupGroup) -> None:
        """Removes a group; see `CgroupGroup.remove`."""
        if group in self._groups:
            del self._groups[group]
            self._late += group.folders
            self._again()

    def _again(self) -> None:
        if self._late:
            self._late = cgroupfs.destroy(self._late, 0.0)

    def close(self) -> None:
        """Kills everything in this worker's groups and removes them. Blocks until that is done, at
        most 5 s.
        """
        folders = [folder for group in self._groups for folder in group.folders]
        self._groups.clear()
        self._late = cgroupfs.destroy([*self._late, *folders], _CLOSE_S)
        self._end()


class CgroupProbe:
    """An idle process, to test whether processes can be moved between cgroups."""

    def __init__(self) -> None:
        program = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
        self.pid = os.posix_spawn(program[0], program, {})

    def stands_in(self, folder: str) -> bool:
        """Whether the kernel lists the probe's process in this cgroup."""
        return self.pid in cgroupfs.members(folder)

    def end(self) -> None:
        """Kills the probe's process and waits for its end."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
