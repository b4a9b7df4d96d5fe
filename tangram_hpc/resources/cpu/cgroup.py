"""Owns: what cgroup versions 1 and 2 have in common - a worker's cgroups, one for each of its
execution processes, changed only where something is new. Must not know a version's file names.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from . import affinity, cgroupfs
from .usage import Usage

PERIOD_US = 100_000
_FREEZE_S = 0.02  # what takes longer waits for a disk, and will not fork meanwhile
_CLOSE_S = 5.0

CORES, QUOTA, MEMORY, PIDS = "cores", "quota", "memory", "pids"
ALL = frozenset({CORES, QUOTA, MEMORY, PIDS})


class CgroupGroup:
    """What holds one execution process: the same cgroup in each hierarchy that is used.

    Subclasses say how a limit is written. `folders` are its cgroups, `joins` the files by which a
    process with one thread joins them.
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

    # ---- a version's own ----

    @property
    def cpu_file(self) -> str:
        """See `enforce.Group`."""
        raise NotImplementedError

    def _write_cores(self, cores: tuple[int, ...]) -> None:
        raise NotImplementedError

    def _write_quota(self, period_us: int, quota_us: int) -> None:
        raise NotImplementedError

    def _write_memory(self, size: int) -> bool:
        """Returns whether that is the limit now; else it is what is in use, as that is more."""
        raise NotImplementedError

    def _write_pids(self, pids: int) -> None:
        raise NotImplementedError

    def _freezer(self) -> str:
        """The folder whose processes freeze together; "": none does."""
        raise NotImplementedError

    def _freeze(self, folder: str, on: bool) -> None:
        raise NotImplementedError

    def _frozen(self, folder: str) -> bool:
        raise NotImplementedError

    def _kill_all(self) -> bool:
        """SIGKILLs all in one call; returns whether this version can."""
        return False

    def oom_kills(self) -> int:
        """How many of its processes the kernel has killed for memory."""
        raise NotImplementedError

    def usage(self) -> Usage:
        """What it has used so far."""
        raise NotImplementedError

    # ---- what both do alike ----

    def limit(self, mem_mib: int, pids: int) -> None:
        """Limits memory, in MiB, and processes with their threads; 0: no limit.

        Where more memory is in use than can be taken back, that is the limit, or who holds it
        ends; the next call tries again.

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
        """Before an action, with nothing of its own running yet: its cores, or for () as much CPU
        time as `units` cores give. Returns whether it holds."""
        return self._bind(cores, units, self._bind_process)

    def rebind(self, cores: tuple[int, ...], units: int) -> bool:
        """The same for all that runs in it already."""
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
                    units = 0  # they are the limit
            elif cores:
                units = len(cores)  # what a program gains by leaving them is nothing
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
        """SIGKILLs all of its processes but `spare`; returns whether none can have been missed."""
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
        """Stops all of its processes, the execution process as well, or lets them go on; returns
        whether all have. Waits 20 ms at most; what has not stopped by then still will."""
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
        """After its execution process has died. What lives in it still is killed, and it goes a
        little later: with the next group that is made or removed, or at the end."""
        self._owner.forget(self)


class CgroupEnforcer:
    """This worker's cgroups. `limits` says what no program can get around."""

    name = ""

    def __init__(self) -> None:
        self.limits: frozenset[str] = frozenset()
        self._groups: dict[CgroupGroup, None] = {}
        self._late: list[str] = []

    def _make(self, number: int | str, pid: int) -> CgroupGroup:
        """Makes a group's cgroups. Raises OSError, and leaves nothing."""
        raise NotImplementedError

    def _end(self) -> None:
        """Removes what is beside the groups."""
        raise NotImplementedError

    def group(self, number: int, pid: int) -> CgroupGroup:
        """Makes what holds execution process `number`, which joins it then.

        Raises:
            OSError: the kernel refuses; nothing is left behind.
        """
        self._again()
        group = self._make(number, pid)
        self._groups[group] = None
        return group

    def _fill(self, folders: list[str]) -> None:
        """Makes cgroups that have been named, or leaves none of them."""
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
        """What a new cgroup of a group needs first."""

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
        """Ends all that lives in this worker's groups and removes them. Blocks until that is done,
        5 s at most."""
        folders = [folder for group in self._groups for folder in group.folders]
        self._groups.clear()
        self._late = cgroupfs.destroy([*self._late, *folders], _CLOSE_S)
        self._end()


class CgroupProbe:
    """A process of no use, to see whether moving one works."""

    def __init__(self) -> None:
        program = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
        self.pid = os.posix_spawn(program[0], program, {})

    def stands_in(self, folder: str) -> bool:
        """Whether the kernel lists it in a cgroup."""
        return self.pid in cgroupfs.members(folder)

    def end(self) -> None:
        """Ends it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
