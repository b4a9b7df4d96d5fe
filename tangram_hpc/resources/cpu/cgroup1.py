"""Enforcement by cgroup version 1: a cgroup of this worker in each hierarchy that it may write.

Each of these cgroups lies beneath the one in which this process is. Which action gets which limits
is decided elsewhere.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from . import cgroupfs
from .cgroup import CORES, MEMORY, PIDS, QUOTA, CgroupEnforcer, CgroupGroup, CgroupProbe
from .usage import GroupUsage

_GIVES = {"cpuset": CORES, "cpu": QUOTA, "memory": MEMORY, "pids": PIDS, "freezer": "",
          "cpuacct": ""}  # fmt: skip
# tries, as processes may take more memory after the use is read and before the limit is written
_LIMIT_TRIES = 20


class Group1(CgroupGroup):
    """See `enforce.Group`. `at` has the group's folder for each controller."""

    # A thread that moves only itself takes 0.3 ms (measured). A move through cgroup.procs, or by
    # another process, takes 10 ms and more, because the kernel waits for an RCU grace period.
    _JOIN = "tasks"

    def __init__(self, owner: Cgroup1, pid: int, at: dict[str, str]) -> None:
        super().__init__(owner, pid, list(dict.fromkeys(at.values())))
        self._at = at
        self._all_cores = owner.all_cores

    def _write_cores(self, cores: tuple[int, ...]) -> None:
        text = ",".join(map(str, cores)) if cores else self._all_cores
        cgroupfs.write(self._at["cpuset"] + "/cpuset.cpus", text)

    def _write_quota(self, period_us: int, quota_us: int) -> None:
        path = self._at["cpu"] + "/cpu.cfs_quota_us"
        try:
            cgroupfs.write(path, str(quota_us or -1))
        except OSError:  # more than our own cgroup has; then that cgroup's quota is the limit
            cgroupfs.write(path, "-1")

    def _write_memory(self, size: int) -> bool:
        home = self._at["memory"]
        now = cgroupfs.number(home + "/memory.limit_in_bytes") or 0
        names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
        # the limit on memory plus swap may at no time be below that on memory
        if not size or size > now:
            names.reverse()
        whole = True
        for name in names:
            try:
                whole &= self._write_limit(f"{home}/{name}", size)
            except OSError:
                if "memsw" not in name:  # a kernel may be built without counting swap
                    raise
        return whole

    def _write_limit(self, path: str, size: int) -> bool:
        """Writes a limit. If more memory is in use than the kernel can take back, it refuses. Then
        the memory in use becomes the limit, and a process that asks for more is killed.
        """
        asked = size
        for _ in range(_LIMIT_TRIES):
            try:
                cgroupfs.write(path, str(size or -1))
                return size == asked
            except OSError as error:
                if error.errno != errno.EBUSY or not size:
                    raise
                size = max(asked, cgroupfs.number(path.replace("limit", "usage")) or 0)
        return False

    def _write_pids(self, pids: int) -> None:
        cgroupfs.write(self._at["pids"] + "/pids.max", str(pids or "max"))

    def _freezer(self) -> str:
        return self._at.get("freezer", "")

    def _freeze(self, folder: str, on: bool) -> None:
        cgroupfs.write(folder + "/freezer.state", "FROZEN" if on else "THAWED")

    def _frozen(self, folder: str) -> bool:
        return cgroupfs.read(folder + "/freezer.state").strip() == "FROZEN"

    def oom_kills(self) -> int:
        """See `enforce.Group`."""
        if "memory" not in self._at:
            return 0
        return cgroupfs.flat_keyed(self._at["memory"] + "/memory.oom_control", "oom_kill") or 0

    @property
    def cpu_file(self) -> str:
        """See `enforce.Group`."""
        home = self._at.get("cpuacct")
        return f"{home}/cpuacct.usage" if home else ""

    def usage(self) -> GroupUsage:
        """See `enforce.Group`."""

        def told(controller: str, name: str) -> int | None:
            home = self._at.get(controller)
            return None if home is None else cgroupfs.number(f"{home}/{name}")

        peak = told("memory", "memory.max_usage_in_bytes")
        return GroupUsage(told("cpuacct", "cpuacct.usage"), None if peak is None else peak >> 10,
                          told("pids", "pids.current"))


class Cgroup1(CgroupEnforcer):
    """See `enforce.Enforcer`. Uses every cgroup hierarchy that this worker may write.

    Attributes:
        all_cores: the cores of this worker's cpuset, as text.
        missing: why a controller is not used.

    Raises:
        OSError: this worker may write no hierarchy that limits anything.
    """

    name = "cgroup1"

    def __init__(self) -> None:
        super().__init__()
        self.all_cores = ""
        self._name = cgroupfs.new_name()
        self._at: dict[str, str] = {}  # this worker's folder by controller
        self._balanced = False
        self.missing: dict[str, str] = {}  # why a controller is not used
        self._occupied: list[str] = []  # cgroups with a probe in them that could not be moved out
        for controller in _GIVES:
            self._found(controller)
        if self._at:
            probe = CgroupProbe()
            try:
                for controller in list(self._at):
                    self._try(controller, probe.pid)
            finally:
                probe.end()
            cgroupfs.destroy(self._occupied, 1.0)
        self.limits = frozenset(filter(None, map(_GIVES.__getitem__, self._at)))
        if not self.limits:
            self.close()
            raise OSError("; ".join(f"{c}: {why}" for c, why in self.missing.items()))

    def _found(self, controller: str) -> None:
        """Makes this worker's cgroup of a controller, if it may."""
        folder = ""
        try:
            folder = os.path.join(cgroupfs.own_folder(controller), self._name)
            with suppress(FileExistsError):  # two controllers of one hierarchy have one folder
                cgroupfs.make(folder)
            self._at[controller] = folder
            if controller == "cpuset":
                self._share_cores(folder)
        except OSError as error:
            self._without(controller, folder, error)

    def _try(self, controller: str, pid: int) -> None:
        """Tests a controller: makes, limits, fills, empties and removes a cgroup."""
        home = self._at[controller]
        folder = home + "/trial"
        try:
            self._fill([folder])
            cgroupfs.put(folder, pid)
            self._limit_once(controller, Group1(self, pid, {controller: folder}))
            if pid not in cgroupfs.members(folder):
                raise OSError("a process that was moved in is not there")
            cgroupfs.put(os.path.dirname(home), pid)
            if not cgroupfs.discard(folder):
                raise OSError("an empty cgroup cannot be removed")
        except OSError as error:
            with suppress(OSError):
                cgroupfs.put(os.path.dirname(home), pid)
            self._without(controller, home, error)

    def _without(self, controller: str, folder: str, error: OSError) -> None:
        self.missing[controller] = str(error)
        self._at.pop(controller, None)
        if folder and folder not in self._at.values() and not cgroupfs.discard(folder):
            self._occupied.append(folder)

    def _limit_once(self, controller: str, group: Group1) -> None:
        if controller == "cpuset":
            first = min(os.sched_getaffinity(0))
            group._write_cores((first,))
            group._write_cores(())
        elif controller == "cpu":
            group._write_quota(100_000, 100_000)
        elif controller == "memory":
            group._write_memory(1 << 30)
        elif controller == "pids":
            group._write_pids(1000)

    def _share_cores(self, folder: str) -> None:
        """Gives this worker's cpuset the cores and memory nodes of its parent. A new cpuset has
        none; cpusets that are made beneath this one get the same.
        """
        home = os.path.dirname(folder)
        self.all_cores = cgroupfs.read(home + "/cpuset.cpus").strip()
        cgroupfs.write(folder + "/cpuset.cpus", self.all_cores)
        cgroupfs.write(folder + "/cpuset.mems", cgroupfs.read(home + "/cpuset.mems").strip())
        cgroupfs.write(folder + "/cgroup.clone_children", "1")
        self._balanced = cgroupfs.read(home + "/cpuset.sched_load_balance").strip() == "1"
        self._prepare(folder)

    def _prepare(self, folder: str) -> None:
        """Turns load balancing off in a new cpuset. The cpuset above balances these cores already.
        With it on here too, each change would make the kernel rebuild its scheduling domains.
        """
        if self._balanced and folder.startswith(self._at.get("cpuset", "/")):
            cgroupfs.write(folder + "/cpuset.sched_load_balance", "0")

    def _make(self, number: int | str, pid: int) -> Group1:
        at = {controller: f"{folder}/{number}" for controller, folder in self._at.items()}
        self._fill(list(dict.fromkeys(at.values())))
        return Group1(self, pid, at)

    def _end(self) -> None:
        cgroupfs.destroy(list(dict.fromkeys(self._at.values())), 1.0)


def sweep() -> list[str]:
    """Kills the processes that dead workers left and removes their cgroups; returns these."""
    left = []
    for mount in cgroupfs.mounts():
        if mount.kind == "cgroup" and mount.controllers & _GIVES.keys():
            for here, folders, _ in os.walk(mount.point):
                mine = [name for name in folders if cgroupfs.is_ours(name)]
                left += [f"{here}/{name}" for name in mine if cgroupfs.is_left(name)]
                folders[:] = [name for name in folders if name not in mine]
    stayed = cgroupfs.destroy(left, 1.0)
    return [folder for folder in left if folder not in stayed]
