"""Enforcement by cgroup version 2: cgroups beneath the one of this process, if it was delegated.

A cgroup that enables controllers for its children may hold no processes itself, except the
machine's root. So the processes of our cgroup move into a leaf, and back when the last worker in it
ends. Which action gets which limits is decided elsewhere.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress

from . import cgroupfs
from .cgroup import CORES, MEMORY, PIDS, QUOTA, CgroupEnforcer, CgroupGroup, CgroupProbe
from .usage import GroupUsage

_GIVES = {"cpuset": CORES, "cpu": QUOTA, "memory": MEMORY, "pids": PIDS}
_PASSES, _PAUSE_S = 250, 0.002
_MARGIN = 1 << 20  # bytes that a group may take while its limit is being set


class Group2(CgroupGroup):
    """See `enforce.Group`."""

    def __init__(self, owner: Cgroup2, pid: int, folder: str) -> None:
        super().__init__(owner, pid, [folder])
        self._at = folder
        self._all_cores = owner.all_cores

    def _write_cores(self, cores: tuple[int, ...]) -> None:
        # an empty list would mean all cores as well, but is refused while processes are in the
        # group
        cgroupfs.write(self._at + "/cpuset.cpus",
                       ",".join(map(str, cores)) or self._all_cores)

    def _write_quota(self, period_us: int, quota_us: int) -> None:
        cgroupfs.write(self._at + "/cpu.max", f"{quota_us or 'max'} {period_us}")

    def _write_memory(self, size: int) -> bool:
        with suppress(FileNotFoundError):  # a kernel may be built without swap
            cgroupfs.write(self._at + "/memory.swap.max", "0" if size else "max")
        limit = self._above_use(size) if size else 0
        cgroupfs.write(self._at + "/memory.max", str(limit or "max"))
        return limit == size

    def _above_use(self, size: int) -> int:
        """Returns the lowest limit from `size` on that is not below the memory in use, after the
        kernel has taken back what it can. A limit below the use would make the kernel kill at once,
        and often one process more than necessary: it does not wait until the memory of the first
        is free. That could be the sandbox's init.
        """
        use = cgroupfs.number(self._at + "/memory.current") or 0
        if use <= size:
            return size
        cgroupfs.write(self._at + "/memory.high", str(size))  # makes the kernel take back
        cgroupfs.write(self._at + "/memory.high", "max")
        use = cgroupfs.number(self._at + "/memory.current") or 0
        return size if use <= size else use + _MARGIN

    def _write_pids(self, pids: int) -> None:
        cgroupfs.write(self._at + "/pids.max", str(pids or "max"))

    def _freezer(self) -> str:
        return self._at

    def _freeze(self, folder: str, on: bool) -> None:
        cgroupfs.write(folder + "/cgroup.freeze", "1" if on else "0")

    def _frozen(self, folder: str) -> bool:
        return cgroupfs.flat_keyed(folder + "/cgroup.events", "frozen") == 1

    def _kill_all(self) -> bool:
        try:
            cgroupfs.write(self._at + "/cgroup.kill", "1")
        except OSError:  # the file exists since Linux 5.14
            return False
        return True

    def oom_kills(self) -> int:
        """See `enforce.Group`."""
        return cgroupfs.flat_keyed(self._at + "/memory.events", "oom_kill") or 0

    @property
    def cpu_file(self) -> str:
        """See `enforce.Group`."""
        return f"{self._at}/cpu.stat"

    def usage(self) -> GroupUsage:
        """See `enforce.Group`."""
        cpu_us = cgroupfs.flat_keyed(self._at + "/cpu.stat", "usage_usec")
        peak = cgroupfs.number(self._at + "/memory.peak")  # since Linux 5.19
        return GroupUsage(None if cpu_us is None else cpu_us * 1000,
                          None if peak is None else peak >> 10,
                          cgroupfs.number(self._at + "/pids.current"))  # fmt: skip


class Cgroup2(CgroupEnforcer):
    """See `enforce.Enforcer`. Works with the controllers that were delegated.

    Attributes:
        all_cores: the cores that it may use, as text.
        missing: why a controller is not used.

    Raises:
        OSError: our own cgroup may not be written, or no controller was delegated to it.
    """

    name = "cgroup2"

    def __init__(self) -> None:
        super().__init__()
        self.all_cores = ""
        home = cgroupfs.own_folder("")
        self._home = os.path.dirname(home) if os.path.basename(home) == cgroupfs.LEAF \
            else _beside(home) or home
        self._folder = f"{self._home}/{cgroupfs.new_name()}"
        self._enabled: list[str] = []
        self.missing: dict[str, str] = {}  # why a controller is not used
        cgroupfs.make(self._folder)
        try:
            with cgroupfs.locked(self._home):
                self._enable()
            self._try()
        except OSError:
            self.close()
            raise

    def _enable(self) -> None:
        offered = cgroupfs.read(self._home + "/cgroup.controllers").split()
        lent = cgroupfs.read(self._home + "/cgroup.subtree_control").split()
        wanted = [c for c in _GIVES if c in offered]
        self.missing = {c: "not delegated" for c in _GIVES if c not in offered}
        if not wanted:
            raise OSError(f"{self._home} was delegated none of {', '.join(_GIVES)}")
        for controller in wanted:
            try:
                if controller not in lent:
                    self._borrow(controller)
                cgroupfs.write(self._folder + "/cgroup.subtree_control", "+" + controller)
            except OSError as error:
                self.missing[controller] = str(error)
        self.limits = frozenset(_GIVES[c] for c in wanted if c not in self.missing)
        if not self.limits:
            raise OSError("; ".join(f"{c}: {why}" for c, why in self.missing.items()))
        if CORES in self.limits:
            self.all_cores = cgroupfs.read(self._folder + "/cpuset.cpus.effective").strip()

    def _borrow(self, controller: str) -> None:
        def then() -> None:
            cgroupfs.write(self._home + "/cgroup.subtree_control", "+" + controller)

        if _is_first(self._home):
            then()
        else:
            leaf = f"{self._home}/{cgroupfs.LEAF}"
            with suppress(FileExistsError):
                cgroupfs.make(leaf)
            _emptied(self._home, leaf, then)
        self._enabled.append(controller)

    def _try(self) -> None:
        """Tests the controllers: makes, fills, limits, empties and removes a cgroup."""
        probe = CgroupProbe()
        try:
            group = self._make("trial", probe.pid)
            cgroupfs.put(group.folders[0], probe.pid)
            group.limit(1024, 1000)
            if not group.bind((min(os.sched_getaffinity(0)),), 1):
                raise OSError("cores cannot be bound")
            if not probe.stands_in(self._folder):
                raise OSError("a process that was moved in is not there")
        finally:
            probe.end()
        if cgroupfs.destroy(group.folders, 1.0):
            raise OSError("an empty cgroup cannot be removed")

    def _make(self, number: int | str, pid: int) -> Group2:
        folder = f"{self._folder}/{number}"
        self._fill([folder])
        return Group2(self, pid, folder)

    def _end(self) -> None:
        cgroupfs.destroy([self._folder], 1.0)
        _restore(self._home, self._enabled)


def _beside(home: str) -> str:
    """Returns the cgroup that our SPANK plugin has made for this user beside the task's own one.

    It is empty when there is none. The worker itself must stay in the task's cgroup: Slurm sends
    signals only to the processes there.
    """
    above = os.path.dirname(home)
    with suppress(OSError):
        for name in os.listdir(above):
            folder = f"{above}/{name}"
            if name.startswith(cgroupfs.STEP) and os.stat(folder).st_uid == os.geteuid():
                return folder
    return ""


def _is_first(folder: str) -> bool:
    return not os.path.exists(folder + "/cgroup.type")


def _move_all(source: str, target: str) -> bool:
    """Moves the processes of one cgroup to another; returns whether there were any."""
    pids = [int(text) for text in cgroupfs.read(source + "/cgroup.procs").split()]
    if 0 in pids:
        raise OSError(f"{source} holds processes that we cannot see")
    for pid in pids:
        with suppress(ProcessLookupError):
            cgroupfs.put(target, pid)
    return bool(pids)


def _emptied(source: str, target: str, then: Callable[[], None]) -> None:
    """Empties a cgroup and calls `then`, which the kernel allows only in an empty cgroup.

    Processes that are forked meanwhile are moved on the next pass. Dying processes cannot be moved,
    but will be gone by a later pass.
    """
    for n in range(_PASSES):
        try:
            if not _move_all(source, target):
                return then()
        except OSError as error:
            if error.errno != errno.EBUSY or n + 1 == _PASSES:
                raise
        time.sleep(_PAUSE_S)
    raise OSError(f"{source} does not become empty")


def _restore(home: str, enabled: list[str]) -> None:
    """Undoes our changes of the cgroup `home` when no worker's cgroup is left in it.

    The controllers are disabled again, and the processes that had been moved into a leaf go back.
    In the machine's root cgroup no process was moved, and only the controllers in `enabled`, which
    we had enabled, are disabled.
    """
    leaf = f"{home}/{cgroupfs.LEAF}"
    with suppress(OSError), cgroupfs.locked(home):
        if any(cgroupfs.is_ours(name) for name in os.listdir(home)):
            return
        if os.path.isdir(leaf):
            enabled = cgroupfs.read(home + "/cgroup.subtree_control").split()
        for controller in enabled:
            cgroupfs.write(home + "/cgroup.subtree_control", "-" + controller)
        if os.path.isdir(leaf):
            _emptied(leaf, home, lambda: os.rmdir(leaf))


def sweep() -> list[str]:
    """Kills the processes that dead workers left and removes their cgroups; returns these."""
    left, homes = [], []
    for mount in cgroupfs.mounts():
        if mount.kind != "cgroup2":
            continue
        for here, folders, _ in os.walk(mount.point):
            mine = [n for n in folders if cgroupfs.is_ours(n) or n == cgroupfs.LEAF]
            left += [f"{here}/{name}" for name in mine if cgroupfs.is_left(name)]
            if mine:
                homes.append(here)
            folders[:] = [name for name in folders if name not in mine]
    stayed = cgroupfs.destroy(left, 1.0)
    for home in homes:
        _restore(home, [])
    return [folder for folder in left if folder not in stayed]
