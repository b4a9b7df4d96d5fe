"""The snapshots on this node: which ones there are, how many users each has, and which are removed.

A snapshot is a folder of frozen files (`files/frozen_files.py`). Sessions that begin from it, and
snapshots of such sessions, mount its layers below their own. So its files stay on the disk until
none of these users is left, even if a client has removed the snapshot before. A snapshot of another
node is fetched once, however many sessions wait for it.

Bounds hold for each node: the number of snapshots, their space, and how long an unused snapshot is
kept. The snapshot that was used least recently is removed first; a snapshot in use is never
removed. The broker is only told of removals. Everything here runs on the worker's loop; the work on
files is done in the payload cache's threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from ...domain.session import SNAPSHOT_NAME
from ...ports import Reports, SandboxSettings
from ...protocol.message import SnapshotOrder, SnapshotReport
from ...protocol.payload import SnapshotCall, decode
from .node_attempts import NodeSnapshot
from .payload_cache import PayloadCache
from .process_supervisor import ProcessSupervisor

_LOOK_S = 30.0  # the longest time between two checks for snapshots that were unused for too long


# is called with the snapshot and an empty text, or with None and the reason
SnapshotReady = Callable[[NodeSnapshot | None, str], None]


def _held(one: NodeSnapshot) -> SnapshotReport:
    return SnapshotReport(one.name, "held", one.session, one.image, one.digest, one.mib)


class NodeSnapshots:
    """The snapshots on one worker's node.

    Args:
        supervisor: names and removes their folders.
        cache: works on files, and reads and writes the job's store.
        reports: hears of the snapshots that clients know.
        settings: `snapshots_max`, `snapshots_mib` and `snapshot_idle_s`.
    """

    def __init__(self, supervisor: ProcessSupervisor, cache: PayloadCache, reports: Reports,
                 settings: SandboxSettings) -> None:
        self._supervisor, self._cache, self._reports = supervisor, cache, reports
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._all: list[NodeSnapshot] = []
        self._by_name: dict[str, NodeSnapshot] = {}
        self._waiting: dict[str, list[SnapshotReady]] = {}
        self._fetching: set[str] = set()
        self._look: asyncio.TimerHandle | None = None

    # ---- taking ----

    def freeze(self, origin: str, wanted: NodeSnapshot, session: int, then: SnapshotReady) -> None:
        """Freezes the files of a scratch directory in which nothing runs.

        Args:
            origin: the scratch directory.
            wanted: a new snapshot, from `new`.
            session: the number of the session, which the report to the broker names.
            then: is called once. The caller is then counted as a user of the snapshot, and must
                release it.
        """
        if wanted.name and (why := self._make_room(0, 1)):
            return then(None, why)

        def frozen(size: bytes, why: str) -> None:
            if not why and wanted.listed:  # layers that only forks share are not counted
                wanted.mib = int(size)
                why = self._make_room(wanted.mib, 1)
                if why:
                    self._supervisor.remove_directory(wanted.home)
            if why:
                return then(None, why)
            self._keep(wanted)
            wanted.users += 1
            wanted.session = session
            if wanted.listed:
                self._reports.snapshot(_held(wanted))
            then(wanted, "")

        self._cache.freeze(origin, wanted.folder, frozen)

    def wanted(self, payload: bytes) -> tuple[SnapshotCall | None, str]:
        """Decodes a client's request for a snapshot. The payload is not trusted.

        Returns:
            The request and an empty text; None and the reason if it is malformed or its name is
            already in use.
        """
        try:
            call = decode(payload)
        except msgspec.DecodeError as error:
            return None, f"its call cannot be read: {error}"
        if not isinstance(call, SnapshotCall) or not SNAPSHOT_NAME.fullmatch(call.name):
            return None, "its name is none that a client makes"
        if call.name in self._by_name or call.name in self._fetching:
            return None, f"{call.name} exists already"
        return call, ""

    def new(self, name: str, base: NodeSnapshot | None, image: str, digest: str) -> NodeSnapshot:
        """Returns a snapshot that is to be frozen; the arguments are its fields."""
        home, folder = self._supervisor.new_directory()
        return NodeSnapshot(name, home, folder, base, image, digest)

    def _keep(self, one: NodeSnapshot) -> None:
        self._all.append(one)
        if one.base is not None:
            one.base.users += 1
        if one.listed:
            self._by_name[one.name] = one
        self._watch()

    def reports(self) -> list[SnapshotReport]:
        """Returns a report of each snapshot that clients know, and of each for which sessions wait
        that is not being fetched.
        """
        missing = (name for name in self._waiting if name not in self._fetching)
        return [*map(_held, self._by_name.values()),
                *(SnapshotReport(name, "wanted") for name in missing)]

    # ---- use ----

    def need(self, name: str, then: SnapshotReady) -> None:
        """Gets a snapshot for a session that begins from it; fetches it if only another node has
        it. `then` is called once; the session is then counted as a user of the snapshot.
        """
        one = self._by_name.get(name)
        if one is not None:
            self.use(one)
            return then(one, "")
        first = name not in self._waiting
        self._waiting.setdefault(name, []).append(then)
        if first and name not in self._fetching:
            self._reports.snapshot(SnapshotReport(name, "wanted"))

    def use(self, one: NodeSnapshot) -> None:
        """Counts one more session or snapshot that needs these files."""
        one.users += 1
        one.used_s = time.monotonic()

    def discard(self, one: NodeSnapshot) -> None:
        """Unlists a snapshot whose client will never learn its name; its files go with its last
        user."""
        if one.listed:
            self._evict(one)

    def release(self, one: NodeSnapshot | None) -> None:
        """Counts one session or snapshot less that needs these files."""
        if one is None:
            return
        one.users -= 1
        one.used_s = time.monotonic()
        self._drop_unneeded(one)

    def _drop_unneeded(self, one: NodeSnapshot) -> None:
        if one.users or one.listed or one not in self._all:
            return
        self._all.remove(one)
        self._supervisor.remove_directory(one.home)
        self.release(one.base)

    # ---- orders of the broker ----

    def obey(self, order: SnapshotOrder) -> None:
        """See `ports.Sandboxes.order_snapshot`."""
        one = self._by_name.get(order.name)
        if order.what == "remove" and one is not None:
            self._unlist(one)
        elif order.what == "publish":
            self._publish(order.name, one)
        elif order.what == "fetch":
            self._fetch(order)
        elif order.what == "missing":
            self._answer(order.name, None, order.why)

    def _publish(self, name: str, one: NodeSnapshot | None) -> None:
        if one is None:
            return self._reports.snapshot(SnapshotReport(
                name, "published", why="it was removed from the node that had it"))
        self.use(one)

        def packed(digest: bytes, why: str) -> None:
            self.release(one)
            self._reports.snapshot(SnapshotReport(name, "published", files=digest.decode(),
                                                  why=why.removeprefix("move: ")))

        self._cache.pack(one.folder, name, packed)

    def _fetch(self, order: SnapshotOrder) -> None:
        if order.name in self._fetching or order.name in self._by_name:
            return
        self._fetching.add(order.name)
        one = self.new(order.name, None, order.image, order.digest)

        def unpacked(size: bytes, why: str) -> None:
            self._fetching.discard(one.name)
            if not why:
                one.mib = int(size)
                why = self._make_room(one.mib, 1)
            if why:
                self._supervisor.remove_directory(one.home)
                return self._answer(one.name, None, why)
            self._keep(one)
            self._reports.snapshot(_held(one))
            self._answer(one.name, one, "")

        users = self._supervisor.backends.bwrap.users
        self._cache.unpack_frozen(order.files, one.folder, users, unpacked)

    def _answer(self, name: str, one: NodeSnapshot | None, why: str) -> None:
        for then in self._waiting.pop(name, []):
            if one is not None:
                self.use(one)
            then(one, why)

    # ---- bounds ----

    def _make_room(self, mib: int, count: int) -> str:
        """Removes unused snapshots, the least recently used first, until `count` more snapshots of
        `mib` MiB in all fit.

        Returns:
            An empty text, or in one line why they cannot fit.
        """
        most, most_mib = self._settings.snapshots_max, self._settings.snapshots_mib
        if mib > most_mib:
            return (f"it takes {mib} MiB, and a node keeps snapshots_mib = {most_mib} MiB of "
                    "snapshots; remove files first, or raise snapshots_mib")
        idle = sorted((one for one in self._by_name.values() if not one.users),
                      key=lambda one: one.used_s)
        while (len(self._by_name) + count > most
               or sum(one.mib for one in self._all) + mib > most_mib):
            if not idle:
                return (f"this node keeps {len(self._by_name)} of at most snapshots_max = {most} "
                        f"snapshots and {sum(one.mib for one in self._all)} of at most "
                        f"snapshots_mib = {most_mib} MiB, all in use; remove some, or close the "
                        "sessions that began from them")
            self._evict(idle.pop(0))
        return ""

    def _evict(self, one: NodeSnapshot) -> None:
        self._reports.snapshot(SnapshotReport(one.name, "gone"))
        self._unlist(one)

    def _unlist(self, one: NodeSnapshot) -> None:
        one.listed = False
        del self._by_name[one.name]
        self._drop_unneeded(one)

    def _watch(self) -> None:
        idle_s = self._settings.snapshot_idle_s
        if self._look is None and self._by_name and idle_s:
            self._look = self._loop.call_later(min(_LOOK_S, idle_s / 2), self._expire)

    def _expire(self) -> None:
        self._look = None
        since = time.monotonic() - self._settings.snapshot_idle_s
        for one in [one for one in self._by_name.values() if not one.users and one.used_s < since]:
            self._evict(one)
        self._watch()

    # ---- the end ----

    def directories_lost(self) -> None:
        """Notes that all folders are gone, with the fork server."""
        for name in self._by_name:
            self._reports.snapshot(SnapshotReport(name, "gone"))
        self._all.clear()
        self._by_name.clear()

    def close(self) -> None:
        """Ends the checks; the folders are removed with the worker's scratch directory."""
        if self._look is not None:
            self._look.cancel()
