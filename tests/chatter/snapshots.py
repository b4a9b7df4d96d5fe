"""The snapshots of the model: what a node has and waits for, and which environments a client wants.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tangram_hpc.protocol import message as ms

if TYPE_CHECKING:
    from chatter.client import Client
    from chatter.worker import Worker

_FINGERPRINTS = tuple(f"{n:064x}" for n in range(3))
ARCHIVE = "cd" * 32


class NodeSnapshots:
    """The snapshots of one node.

    Attributes:
        held: those that are here, each with the session of which it was taken, or 0.
        wanted: those that sessions wait for.
        orders: what the broker has ordered and is not done yet.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.held: dict[str, int] = {}
        self.wanted: dict[str, list[int]] = {}
        self.orders: list[ms.SnapshotOrder] = []

    def report_again(self) -> None:
        """Tells a broker that was started again what is here, and what is waited for."""
        for name, session in self.held.items():
            self._report(name, "held", session)
        fetching = {order.name for order in self.orders if order.what == "fetch"}
        for name in self.wanted:
            if name not in fetching:
                self._report(name, "wanted")

    def need(self, name: str, session: int) -> bool:
        """Notes that a session begins from a snapshot; returns whether that is here."""
        if name in self.held:
            return True
        first = name not in self.wanted
        self.wanted.setdefault(name, []).append(session)
        if first:
            self._report(name, "wanted")
        return False

    def take(self, session: int) -> None:
        """Takes a snapshot of a session that is up."""
        names = self.worker.job.snapshots
        names.append(f"snap-{len(names):024x}")
        self.held[names[-1]] = session
        self._report(names[-1], "held", session)

    def act(self) -> None:
        """Does what was ordered first, or removes a snapshot that was not used for long."""
        rng = self.worker.job.rng
        if self.orders:
            self._do(self.orders.pop(0))
        elif self.held and rng.random() < 0.1:
            name = rng.choice(list(self.held))
            del self.held[name]
            self._report(name, "gone")

    def finish(self) -> None:
        """Does all that was ordered."""
        while self.orders:
            self._do(self.orders.pop(0))

    def _do(self, order: ms.SnapshotOrder) -> None:
        name = order.name
        if order.what == "remove":
            self.held.pop(name, None)
        elif order.what == "publish":
            fails = name not in self.held or self.worker.job.rng.random() < 0.2
            self._report(name, "published", files="" if fails else ARCHIVE,
                         why="it cannot" if fails else "")
        elif order.what == "missing" or self.worker.job.rng.random() < 0.1:
            for session in self.wanted.pop(name, ()):
                if self.worker.sandboxes.get(session):
                    self.worker.down(session, order.why or "it cannot be fetched")
        else:
            if name not in self.held:
                self.held[name] = 0
                self._report(name, "held")
            for session in self.wanted.pop(name, ()):
                if self.worker.sandboxes.get(session) == "fetching":
                    self.worker.sandboxes[session] = "opening"

    def _report(self, name: str, what: str, session: int = 0, **fields: Any) -> None:
        self.worker.say(ms.SnapshotReport(name, what, session, mib=1, **fields))


class Environments:
    """The prepared environments that one client wants.

    Attributes:
        asked: by number of the request, the environment that it has no answer about.
        builds: those that it is to build.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.asked: dict[int, str] = {}
        self.builds: list[str] = []
        self._requests = 100

    def act(self) -> None:
        """Asks for an environment, builds one, or no longer waits for one."""
        rng = self.client.job.rng
        if self.builds and rng.random() < 0.6:
            self.build(self.builds.pop(0))
        elif self.asked and rng.random() < 0.1:
            self._say("failed", self.asked.pop(rng.choice(list(self.asked))), "it stopped")
        else:
            wanted = rng.choice(_FINGERPRINTS)
            if wanted not in (*self.asked.values(), *self.builds):
                self._say("prepare", wanted)

    def build(self, fingerprint: str) -> None:
        """Ends a build, well or not."""
        taken = self.client.job.snapshots[-1:]
        if taken and self.client.job.rng.random() < 0.7:
            self._say("ready", fingerprint, taken[0])
        else:
            self._say("failed", fingerprint, "it failed")

    def hear(self, reply: ms.QueryReply, payload: bytes | None) -> None:
        """Reads an answer."""
        fingerprint = self.asked.pop(reply.request, "")
        if fingerprint and "build" in json.loads(payload or b"{}"):
            self.builds.append(fingerprint)

    def ask_again(self) -> None:
        """Repeats on a new connection what was not answered or may not have arrived."""
        unanswered = [*self.asked.values(), *self.builds]
        self.asked.clear()
        self.builds.clear()
        for fingerprint in unanswered:
            self._say("prepare", fingerprint)

    def _say(self, op: str, fingerprint: str, text: str = "") -> None:
        self._requests += 1
        if op == "prepare":
            self.asked[self._requests] = fingerprint
        self.client.say(ms.ManageSnapshot(self._requests, op, fingerprint, text))
