"""The snapshots of the job: which nodes have them, and which client builds a prepared environment.

The workers keep the files and enforce the bounds (`sandbox/manager/node_snapshots.py`); the broker
knows only names. A node that needs a snapshot of another node asks the broker for it: the other
node publishes an archive in the job's store, and the first node fetches the archive. A prepared
environment is identified by a fingerprint of everything it is made of. The first client that asks
for it builds it; all others wait for that client.

Nobody waits for a peer that is gone: another node publishes, another client builds, or the waiting
peers are told why not. While a builder's connection lives, the others wait as long as it takes:
each of the builder's steps has a time limit (`timeout` of `Client.prepared`), its waits for a node
have none.

This state is kept in memory only. To a broker that is started again, the workers tell which
snapshots they have, and prepared environments are built once more. Workers come back one after
another, so a node that needs a snapshot that nobody has reported yet waits until all are back.

Invariants: a snapshot is known exactly while a node has it; an environment has at most one builder;
while nodes wait for an archive, a node that has the snapshot was ordered to publish it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..domain.ids import show
from ..domain.session import SNAPSHOT_NAME, SessionSpec
from ..ports import Timer
from ..protocol import message as ms
from ..scheduler.state.ledger import Ledger

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_TEXT_MAX = 4000
HOLDERS_MOST = 32  # nodes with a snapshot that the scheduler is told of
REMOVED_MOST = 1000  # names of removed snapshots that are remembered
LATE_S = 2.0  # between two checks for workers that may have an unknown snapshot


@dataclass
class _Snapshot:
    """A snapshot that some node has.

    Attributes:
        image: the image of the session, as it was asked for; empty for none.
        digest: the digest of that image; empty for none and for a plain folder.
        session: the id of the session of which it was taken; 0 until a node tells it that took it.
        taken_ns: when it was taken, in epoch ns.
        nodes: the numbers of the nodes that have it, and the MiB that it takes on each.
        files: the name of its archive in the store; empty for none.
        wanted: the nodes that wait for the archive while another node makes it.
        publisher: the node that is making it; 0 while none is.
    """

    image: str
    digest: str
    session: int
    taken_ns: int
    nodes: dict[int, int] = field(default_factory=dict)
    files: str = ""
    wanted: set[int] = field(default_factory=set)
    publisher: int = 0


@dataclass
class _Environment:
    """A prepared environment.

    Attributes:
        builder: number of the client that builds it; 0 once it is ready.
        snapshot: its snapshot; empty until it is ready.
        waiting: the number of the request of each client that waits.
    """

    builder: int
    snapshot: str = ""
    waiting: dict[int, int] = field(default_factory=dict)


class Snapshots:
    """The broker's side of snapshots.

    Args:
        ledger: the scheduler's state.
        now: the broker's time in epoch ns.
        send_to_worker: queues a message to a node.
        send_to_client: queues a message to a client.
        sweep: begins to remove the entries of some owners from the store.
        timer: calls back on the broker's loop.
    """

    def __init__(self, ledger: Ledger, now: Callable[[], int],
                 send_to_worker: Callable[..., None], send_to_client: Callable[..., None],
                 sweep: Callable[[list[str]], None], timer: Timer) -> None:
        self._ledger, self._now, self._sweep, self._timer = ledger, now, sweep, timer
        self._send_to_worker, self._send_to_client = send_to_worker, send_to_client
        self._known: dict[str, _Snapshot] = {}
        self._late: dict[str, set[int]] = {}  # the nodes that wait for an unknown snapshot
        self._removed: dict[str, None] = {}  # what clients removed last, the oldest first
        self._environments: dict[str, _Environment] = {}

    # ---- sessions ----

    def filled(self, spec: SessionSpec) -> tuple[SessionSpec, str]:
        """Adds the image of its snapshot to the specification of a session.

        Returns:
            The specification, and in one line why the session cannot begin from this snapshot; the
            line is empty if it can.
        """
        if not spec.snapshot:
            return spec, ""
        if spec.origin:  # a fork has the image of its origin, which its client does not know
            origin = self._ledger.sessions.get(spec.origin)
            known_image = origin.spec.image if origin is not None else ""
            return spec.with_image(spec.image or known_image), ""
        known = self._known.get(spec.snapshot)
        if known is None:
            return spec, (f"snapshot: there is no snapshot {spec.snapshot} in this job; it was "
                          "removed, or was unused for too long: take it again")
        if spec.image:
            return spec, "image: a session that begins from a snapshot has its image; leave it out"
        if spec.movable and spec.writable and known.image and known.digest:
            return spec, ("movable: each node unpacks the snapshot's image for itself; leave out "
                          "movable, or pass writable=False")
        return spec.with_image(known.image), ""

    def nodes_with(self, name: str) -> tuple[int, ...]:
        """Returns the numbers of the nodes that have a snapshot, ascending; none if more than
        `HOLDERS_MOST` have it, because a session is then hardly ever far from one."""
        known = self._known.get(name)
        few = known is not None and len(known.nodes) <= HOLDERS_MOST
        return tuple(sorted(known.nodes)) if known is not None and few else ()

    # ---- what workers report ----

    def report(self, node: int, report: ms.SnapshotReport) -> None:
        """Takes a worker's report into account."""
        name = report.name
        known = self._known.get(name)
        if report.what == "held":
            self._held(node, report, known)
        elif report.what == "gone" and known is not None:
            self._gone(name, known, node)
        elif report.what == "wanted":
            self._wanted(name, known, node)
        elif report.what == "published" and known is None:
            self._sweep([name])  # the snapshot was removed while its node packed it
        elif report.what == "published" and known is not None:
            self._published(node, report, known)

    def _held(self, node: int, report: ms.SnapshotReport, known: _Snapshot | None) -> None:
        name = report.name
        if name in self._removed:  # while this node fetched it, or was away
            return self._send_to_worker(node, ms.SnapshotOrder(name, "remove"))
        if known is None:
            known = self._known[name] = _Snapshot(
                report.image, report.digest, report.session, self._now(),
                wanted=self._late.pop(name, set()))
        known.session = known.session or report.session
        known.nodes[node] = report.mib
        self._have_published(name, known)

    def _wanted(self, name: str, known: _Snapshot | None, node: int) -> None:
        if known is None:
            if name not in self._late:
                self._timer.after(LATE_S, lambda: self._look_for(name, not self._ledger.away))
            self._late.setdefault(name, set()).add(node)
        elif known.files:
            self._send_files(name, known, node, "")
        else:
            known.wanted.add(node)
            self._have_published(name, known)

    def _look_for(self, name: str, all_back: bool) -> None:
        """Tells the nodes that wait for an unknown snapshot that it is gone, once all workers are
        back that may have it. A worker reports its snapshots only after it was welcomed.

        Args:
            all_back: whether no worker was away at the check before this one.
        """
        if self._ledger.away or not all_back:
            back = not self._ledger.away
            self._timer.after(LATE_S, lambda: self._look_for(name, back))
        else:
            for node in self._late.pop(name, ()):
                self._send_files(name, None, node, "no node has it any more")

    def _have_published(self, name: str, known: _Snapshot) -> None:
        """Orders a node to publish, if nodes wait for the archive and none is making it."""
        if known.wanted and not known.publisher:
            known.publisher = next(iter(known.nodes))
            self._send_to_worker(known.publisher, ms.SnapshotOrder(name, "publish"))

    def _published(self, node: int, report: ms.SnapshotReport, known: _Snapshot) -> None:
        if not report.files and node != known.publisher:
            return  # it has removed the snapshot, and another node was ordered instead
        wanted, known.wanted, known.publisher = known.wanted, set(), 0
        known.files = report.files
        for each in wanted:
            self._send_files(report.name, known, each, report.why)

    def _send_files(self, name: str, known: _Snapshot | None, node: int, why: str) -> None:
        if known is not None and known.files:
            return self._send_to_worker(node, ms.SnapshotOrder(
                name, "fetch", known.files, known.image, known.digest))
        self._send_to_worker(node, ms.SnapshotOrder(name, "missing", why=why))

    def _gone(self, name: str, known: _Snapshot, node: int) -> None:
        """Forgets that a node has a snapshot, and the snapshot itself if no other node has it."""
        if known.nodes.pop(node, None) is None:
            return
        if not known.nodes:
            return self._forget(name, known, "the node that had it has removed it, or is gone")
        if known.publisher == node:
            known.publisher = 0
            self._have_published(name, known)

    def _forget(self, name: str, known: _Snapshot, why: str) -> None:
        del self._known[name]
        for each in known.wanted:
            self._send_files(name, None, each, why)
        if known.files:
            self._sweep([name])
        for fingerprint, one in list(self._environments.items()):
            if one.snapshot == name:
                del self._environments[fingerprint]

    def node_lost(self, node: int) -> None:
        """Forgets what a node had, because its worker is gone."""
        for waiting in self._late.values():
            waiting.discard(node)
        for name, known in list(self._known.items()):
            known.wanted.discard(node)
            self._gone(name, known, node)

    # ---- what clients ask ----

    def manage(self, client: int, asked: ms.ManageSnapshot) -> None:
        """Answers a client, at once or when an environment is ready."""
        if asked.op == "list":
            self._answer(client, asked.request, {"snapshots": self._listing()})
        elif asked.op == "remove":
            self._answer(client, asked.request, {"removed": self._remove(asked.name)})
        elif not _FINGERPRINT.fullmatch(asked.name):
            self._send_to_client(client, ms.Rejected(asked.request, "name: it is no fingerprint"))
        elif asked.op == "prepare":
            self._prepare(client, asked.request, asked.name)
        else:
            self._built(client, asked)

    def _answer(self, client: int, request: int, answer: dict[str, Any]) -> None:
        self._send_to_client(client, ms.QueryReply(request), json.dumps(answer).encode())

    def _listing(self) -> list[dict[str, Any]]:
        prepared = {one.snapshot for one in self._environments.values()}
        users: dict[str, int] = {}
        for entry in self._ledger.sessions.values():
            users[entry.spec.snapshot] = users.get(entry.spec.snapshot, 0) + 1
        return [{"name": name, "nodes": sorted(self._ledger.nodes[n].spec.name for n in one.nodes),
                 "mib": max(one.nodes.values()), "image": one.image, "digest": one.digest,
                 "session": show(one.session), "taken_s": one.taken_ns / 1e9,
                 "sessions": users.get(name, 0), "prepared": name in prepared}
                for name, one in self._known.items()]

    def _remove(self, name: str) -> bool:
        self._removed[name] = None
        if len(self._removed) > REMOVED_MOST:
            del self._removed[next(iter(self._removed))]
        known = self._known.get(name)
        if known is None:
            return False
        for node in known.nodes:
            self._send_to_worker(node, ms.SnapshotOrder(name, "remove"))
        self._forget(name, known, "it was removed")
        return True

    def _prepare(self, client: int, request: int, fingerprint: str) -> None:
        one = self._environments.get(fingerprint)
        if one is None:
            one = self._environments[fingerprint] = _Environment(client)
        if one.snapshot:
            self._answer(client, request, {"snapshot": one.snapshot})
        elif one.builder == client:  # a new builder, or one that repeats its question
            self._answer(client, request, {"build": True})
        else:
            one.waiting[client] = request

    def _built(self, client: int, asked: ms.ManageSnapshot) -> None:
        """Notes that a client has built its environment or failed, and answers all who wait. A
        client that stops waiting for another client's build reports a failure as well."""
        one = self._environments.get(asked.name)
        if one is not None and one.builder == client:
            ready = asked.op == "ready" and asked.text in self._known
            answer = {"snapshot": asked.text} if ready else {
                "error": asked.text if asked.op == "failed" else "its snapshot is gone already"}
            waiting, one.waiting = one.waiting, {}
            one.builder, one.snapshot = 0, asked.text
            if not ready:
                del self._environments[asked.name]
            for other, request in waiting.items():
                self._answer(other, request, answer)
        elif one is not None:
            one.waiting.pop(client, None)  # it must not become the builder later
        self._answer(client, asked.request, {})

    def client_gone(self, client: int) -> None:
        """Lets the next client that waits build what a client that is gone was building."""
        for fingerprint, one in list(self._environments.items()):
            one.waiting.pop(client, None)
            if one.builder == client:
                if not one.waiting:
                    del self._environments[fingerprint]
                    continue
                one.builder = next(iter(one.waiting))
                self._answer(one.builder, one.waiting.pop(one.builder), {"build": True})


def wrong_report(report: ms.SnapshotReport) -> str:
    """Returns what is wrong with a worker's report; an empty text if nothing is."""
    if not SNAPSHOT_NAME.fullmatch(report.name):
        return f"name: {report.name!r:.40} is no name of a snapshot"
    if not (0 <= report.mib <= 1 << 40 and 0 <= report.session <= 1 << 62):
        return "mib, session: out of bounds"
    if max(map(len, (report.what, report.image, report.digest, report.files, report.why))
           ) > _TEXT_MAX:
        return f"why: it has more than {_TEXT_MAX} characters"
    return ""


def wrong_question(asked: ms.ManageSnapshot) -> str:
    """Returns what is wrong with a client's question; an empty text if nothing is."""
    if not 0 <= asked.request <= 1 << 62:
        return f"request: {asked.request} is out of bounds"
    if asked.op not in ("list", "remove", "prepare", "ready", "failed"):
        return f"op: {asked.op!r:.40} is not one of list, remove, prepare, ready, failed"
    if max(len(asked.name), len(asked.text)) > _TEXT_MAX:
        return f"name, text: more than {_TEXT_MAX} characters"
    return ""
