"""A real broker driver in this process: its clock and timers move by hand, its links keep what was
said, and every message passes through the real frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from helpers.hand_clock import HandClock
from tangram_hpc.broker.driver import Broker, Settings
from tangram_hpc.broker.peers import Peer
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol.frame import Inbox, Outbox
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler


class FakePeer:
    """A client or worker that the test speaks for: the other end of one connection."""

    def __init__(self, rig: BrokerRig) -> None:
        self.rig, self.closed = rig, False
        self.heard: list[tuple[Any, bytes | None]] = []
        self._out, self._in = Outbox(), Inbox()
        self.peer: Peer = rig.broker.accept(self)

    # ---- the broker's side (`ports.Link`) ----

    unsent = 0

    def send(self, message: Any, payload: Any = None) -> None:
        self._out.put(message, payload)

    def flush(self) -> None:
        for message, payload in self._in.feed(b"".join(self._out.take())):
            self.heard.append((message, None if payload is None else bytes(payload)))

    def discard(self) -> None:
        self._out.take()

    def close(self) -> None:
        self.discard()
        self.closed = True

    # ---- the peer's side ----

    def say(self, message: Any, payload: bytes | None = None) -> None:
        """Says one message, through bytes, and lets the broker do what follows at once."""
        box = Outbox()
        box.put(message, payload)
        for envelope in Inbox().feed(b"".join(box.take())):
            self.rig.broker.receive(self.peer, *envelope)
        self.rig.settle()

    def leave(self) -> None:
        """The connection breaks."""
        self.rig.broker.lost(self.peer, "connection closed by the peer")
        self.rig.settle()

    def all(self, kind: type) -> list[Any]:
        return [message for message, _ in self.heard if isinstance(message, kind)]

    def last(self, kind: type) -> Any:
        return self.all(kind)[-1]


class MemoryJournal:
    """Keeps the events of a broker in memory."""

    mode = "none"

    def __init__(self) -> None:
        self.events: list[Any] = []

    def append(self, events: Any) -> int:
        msgspec.msgpack.encode(events)  # what cannot be written would end a real one
        self.events += events
        return len(self.events)

    def commit(self, then: Callable[[], None]) -> None:
        then()

    def superseded(self) -> bool:
        return False

    def close(self) -> None:
        pass


class BrokerRig(HandClock):
    """The broker of job `j`, its clock, and its timers. `check`: its ledger's laws are proven after
    every message."""

    def __init__(self, placer: str = "elastic", check: bool = True, spool: Any = None,
                 spill: Any = None, scheduler: Scheduler | None = None, **settings: Any
                 ) -> None:
        super().__init__()
        self._check = check
        self.journal = MemoryJournal()
        self.scheduler = scheduler or Scheduler(make_placer(placer))
        self.broker = Broker(self.scheduler, self.journal, self, self,
                             Settings("j", "/nowhere", **settings), lambda: None, spool,
                             **({} if spill is None else {"spill": spill}))
        self.broker.start()
        self.settle()

    def check(self) -> None:
        if self._check:
            self.scheduler.ledger.check()

    def client(self, uid: str = "u", **fields: Any) -> FakePeer:
        peer = FakePeer(self)
        peer.say(ms.ClientHello(ms.PROTOCOL_VERSION, "j", uid, **fields))
        return peer

    def worker(self, cpus: int = 4, name: str = "n1", **fields: Any) -> FakePeer:
        peer = FakePeer(self)
        spec = NodeSpec(name, "host", tuple(range(cpus)), 4096, backends=("model",),
                        untrusted=("model",), **fields)
        peer.say(ms.WorkerHello(ms.PROTOCOL_VERSION, "j", spec))
        return peer


def action_of(client: FakePeer, number: int, **fields: Any) -> Action:
    return Action(mint(client.last(ms.Welcome).client, number), "x", **fields)


def serves(rig: BrokerRig, client: FakePeer, worker: FakePeer, number: int) -> bool:
    """Whether an action of this client is started, ends, and comes back."""
    action = action_of(client, number)
    client.say(ms.Submit(action), b"call")
    started = {start.action.id: start.lease for start in worker.all(ms.StartAttempt)}
    if action.id not in started:
        return False
    worker.say(ms.Finished(started[action.id], Outcome(ActionState.COMPLETED), n=1), b"done")
    rig.run(0.1)
    result = client.last(ms.ActionResult)
    client.say(ms.Ack((action.id,)))
    return bool(result.action == action.id and result.outcome.state is ActionState.COMPLETED)
