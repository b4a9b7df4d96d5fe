"""A job whose broker is killed and started again at any moment, in one process without any I/O.

The broker's driver and its scheduler are the real ones. The journal, the connections, the clock and
the timers are played, and so are workers and clients, in the simplest way that keeps to the
protocol. All choices come from one seed. Messages are delivered one by one, in a random order of
the connections. When the broker is killed, everything that it had not flushed is gone, and of what
was on its way a random part arrives.
"""

from __future__ import annotations

import heapq
import random
import shutil
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tangram_hpc.broker.driver import Broker, Settings
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.storage.spool import FileSpool

S = 10**9
GRACE_S = 30.0
Parcel = tuple[Any, bytes | None]


class Wire:
    """One connection with a broker: a `ports.Link` on the broker's side."""

    unsent = 0

    def __init__(self, broker: Broker, owner: Worker | Client) -> None:
        self.broker, self.owner = broker, owner
        self.buffer: list[Parcel] = []
        self.down: deque[Parcel] = deque()  # to the peer
        self.up: deque[Parcel] = deque()  # to the broker
        self.open = True
        self.peer = broker.accept(self)

    def send(self, message: Any, payload: Any = None) -> None:
        self.buffer.append((message, None if payload is None else bytes(payload)))

    def flush(self) -> None:
        self.down.extend(self.buffer)
        self.buffer.clear()

    def close(self) -> None:
        self.flush()
        self.open = False

    def say(self, message: Any, payload: bytes | None = None) -> None:
        if self.open:
            self.up.append((message, payload))

    def cut(self) -> None:
        """Tells the peer that this connection is over, unless it has another one already."""
        if self.owner.wire is self:
            self.owner.cut()


class Killed(BaseException):
    """The broker is killed within a turn of its loop."""


class Journal:
    """Events that were committed stay when the broker is killed.

    Attributes:
        dies: where the next commit kills the broker: "before" or "after" it has written, or "".
    """

    mode = "none"

    def __init__(self, committed: list[ev.Event]) -> None:
        self.committed, self.pending, self.dies = committed, list[ev.Event](), ""

    def append(self, events: Any) -> int:
        self.pending += events
        return 0

    def commit(self, then: Callable[[], None]) -> None:
        if self.dies == "before":
            raise Killed
        self.committed += self.pending
        self.pending = []
        if self.dies:
            raise Killed
        then()

    def superseded(self) -> bool:
        return False

    def close(self) -> None:
        self.commit(lambda: None)


@dataclass
class Worker:
    """A worker that keeps what it has while its broker is away.

    Attributes:
        open: orders whose lease is not over here, by lease; first the running ones.
        kept: ends that the broker has not confirmed, by lease, with their payloads.
        sandboxes: the sessions whose sandbox is here.
        downs: ends of sandboxes that were reported.
        held: what it will say as soon as it is welcome.
    """

    job: Job
    uid: str
    node: int = 0
    wire: Wire | None = None
    open: dict[int, tuple[ms.StartAttempt, bytes]] = field(default_factory=dict)
    running: dict[int, None] = field(default_factory=dict)
    cleaning: dict[int, None] = field(default_factory=dict)
    kept: dict[int, tuple[ms.Finished, bytes | None]] = field(default_factory=dict)
    sandboxes: dict[int, None] = field(default_factory=dict)
    downs: dict[int, ms.SandboxDown] = field(default_factory=dict)
    held: list[Parcel] | None = None
    dead: bool = False

    def connect(self) -> None:
        self.wire, self.held = self.job.dial(self), []
        self.wire.say(ms.WorkerHello(
            ms.PROTOCOL_VERSION, "j", NodeSpec(self.uid, "h", (0, 1, 2, 3), 4096,
                                               untrusted=("model",), ahead=4),
            self.uid, self.node, (*self.open, *self.kept), (*self.sandboxes, *self.downs)))
        self.repeat()

    def cut(self) -> None:
        self.wire = None

    def say(self, message: Any, payload: bytes | None = None) -> None:
        if self.held is not None:
            self.held.append((message, payload))
        elif self.wire is not None:
            self.wire.say(message, payload)

    def read(self, message: Any, payload: bytes | None) -> None:
        match message:
            case ms.WorkerWelcome(node=node):
                assert self.node in (0, node), "another number for a worker that is known"
                self.node, held, self.held = node, self.held or [], None
                for parcel in held:
                    self.say(*parcel)
            case ms.PeerRefused():
                self.fenced()
            case ms.StartAttempt(lease=lease) if lease not in self.open and lease not in self.kept:
                self.open[lease] = message, payload or b""
                self.advance()
            case ms.KillAttempt(lease=lease, state=state, reason=reason):
                if lease in self.open and lease not in self.cleaning:
                    self.finish(lease, Outcome(state, reason=reason))
            case ms.OpenSandbox(spec=spec):
                if spec.id not in self.sandboxes:
                    self.sandboxes[spec.id] = None
                    self.say(ms.SandboxUp(spec.id))
            case ms.CloseSandbox(session=session):
                self.close_sandbox(session)
            case ms.Confirmed(leases=leases):
                for lease in leases:
                    self.kept.pop(lease, None)
            case ms.Shutdown(reason=reason):
                raise AssertionError(reason)

    def repeat(self) -> None:
        self.say(ms.AttemptsStarted(tuple(self.running)))
        for session in self.sandboxes:
            self.say(ms.SandboxUp(session))
        for down in self.downs.values():
            self.say(down)
        for lease, (end, payload) in self.kept.items():
            self.say(ms.Finished(lease, end.outcome, lease not in self.open, end.n), payload)

    def close_sandbox(self, session: int) -> None:
        if session in self.sandboxes:
            for lease, (order, _) in list(self.open.items()):
                if order.action.session == session and lease not in self.cleaning:
                    self.finish(lease, Outcome(ActionState.CANCELLED, reason="closed"))
            del self.sandboxes[session]
            self.downs[session] = ms.SandboxDown(session, "")
            self.say(self.downs[session])

    def advance(self) -> None:
        """Begins the orders whose turn has come."""
        for lease, (order, _) in self.open.items():
            if lease not in self.running and lease not in self.cleaning \
                    and order.after not in self.open:
                assert not order.action.session or order.action.session in self.sandboxes
                self.running[lease] = None
                self.job.executions[order.action.id] += 1

    def finish(self, lease: int, outcome: Outcome | None = None, clean: bool = True) -> None:
        _, data = self.open[lease]
        payload = data + b"!" if outcome is None else None
        outcome = outcome or Outcome(ActionState.COMPLETED)
        end = ms.Finished(lease, outcome.returning(payload), clean, int(payload is not None))
        self.running.pop(lease, None)
        self.kept[lease] = end, payload
        self.say(end, payload)
        if clean:
            del self.open[lease]
        else:
            self.cleaning[lease] = None
        self.advance()

    def release(self, lease: int) -> None:
        del self.cleaning[lease], self.open[lease]
        self.say(ms.Released(lease))
        self.advance()

    def fenced(self) -> None:
        """Its broker gave it up: it ends everything and comes as a new node."""
        for one in (self.open, self.running, self.cleaning, self.kept, self.sandboxes, self.downs):
            one.clear()
        self.node, self.wire = 0, None


@dataclass
class Client:
    """A client that connects again and repeats what is open."""

    job: Job
    uid: str
    number: int = 0
    count: int = 0
    wire: Wire | None = None
    welcomed: bool = False
    pending: dict[int, tuple[Action, bytes]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    told: dict[int, list[ms.ActionResult | ms.Rejected]] = field(default_factory=dict)
    sessions: dict[int, SessionSpec] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)

    def connect(self) -> None:
        self.wire, self.welcomed = self.job.dial(self), False
        self.wire.say(ms.ClientHello(ms.PROTOCOL_VERSION, "j", self.uid))

    def cut(self) -> None:
        self.wire, self.welcomed = None, False

    def say(self, message: Any, payload: bytes | None = None) -> None:
        if self.wire is not None and self.welcomed:
            self.wire.say(message, payload)

    def read(self, message: Any, payload: bytes | None) -> None:
        match message:
            case ms.Welcome(client=client):
                assert self.number in (0, client), "the broker has forgotten this client"
                self.number, self.welcomed = client, True
                for spec in self.sessions.values():
                    self.say(ms.RequestSession(spec, True))
                for action, data in self.pending.values():
                    self.say(ms.Submit(action), data)
                    if action.id in self.cancelled:
                        self.say(ms.Cancel((action.id,)))
            case ms.ActionResult(action=action, outcome=outcome):
                if action in self.pending:
                    _, data = self.pending.pop(action)
                    self.told.setdefault(action, []).append(message)
                    if outcome.state is ActionState.COMPLETED:
                        assert payload == data + b"!", f"{message}: a wrong payload {payload!r}"
                self.say(ms.Ack((action,)))
            case ms.Rejected(id=number, text=text):
                if number in self.pending:
                    del self.pending[number]
                    self.told.setdefault(number, []).append(message)
                elif self.sessions.pop(number, None) is not None:
                    self.ended[number] = text
            case ms.SessionDown(session=session, reason=reason):
                if self.sessions.pop(session, None) is not None:
                    self.ended[session] = reason

    def submit(self, session: int = 0, once: str = "") -> None:
        self.count += 1
        number = mint(self.number, self.count)
        action = Action(number, "x", session=session, once=once, attempts_max=3)
        data = f"{number}".encode()
        self.pending[number] = action, data
        self.say(ms.Submit(action), data)

    def open_session(self) -> None:
        self.count += 1
        spec = SessionSpec(mint(self.number, self.count), mem_mib=10,
                           parallel=self.job.rng.random() < 0.3)
        self.sessions[spec.id] = spec
        self.say(ms.RequestSession(spec))

    def release(self, session: int) -> None:
        self.released.add(session)
        self.say(ms.ReleaseSession(session))

    def cancel(self, action: int) -> None:
        self.cancelled.add(action)
        self.say(ms.Cancel((action,)))


class Job:
    """A broker, workers and clients, and all that happens by chance."""

    def __init__(self, folder: Path, seed: int, workers: int = 2, clients: int = 2) -> None:
        self.rng, self.folder, self.now = random.Random(seed), folder, 10**12
        self.committed: list[ev.Event] = []
        self.wires: list[Wire] = []
        self.timers: list[tuple[int, int, Callable[[], None]]] = []
        self.timer_count = self.kills = 0
        self.executions: Counter[int] = Counter()
        self.spool_folder = folder / "once"
        self.start_broker(0.0)
        self.workers = [Worker(self, f"w{n}") for n in range(workers)]
        self.clients = [Client(self, f"c{n}") for n in range(clients)]

    # ---- the broker ----

    def start_broker(self, rejoin_s: float) -> None:
        scheduler = Scheduler(make_placer("elastic"))
        for event in self.committed:
            scheduler.handle(event)
        scheduler.ledger.check()
        self.spool = FileSpool(self.spool_folder, 1 << 20)
        self.journal = Journal(self.committed)
        settings = Settings("j", "", 2, grace_s=GRACE_S, rejoin_s=rejoin_s, down_s=1.0)
        self.broker = Broker(scheduler, self.journal, self, self, settings, lambda: None,
                             self.spool)
        self.broker.start()

    def now_ns(self) -> int:
        return self.now

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.timer_count += 1
        heapq.heappush(self.timers, (self.now + int(delay_s * S), self.timer_count, call))

    def kill_broker(self, down_s: float = 1.0) -> None:
        """Kills the broker and starts another one. A part of what was on its way arrives."""
        self.kills += 1
        self.timers.clear()
        self._copy_spool()
        wires, self.wires = self.wires, []
        for wire in wires:
            wire.open = False
            for _ in range(self.rng.randrange(len(wire.down) + 1)):
                wire.owner.read(*wire.down.popleft())
            wire.cut()
        self.now += int(down_s * S)
        self.start_broker(GRACE_S)

    def _copy_spool(self) -> None:
        """Lets the next broker have the spool's files as they are, without what was not committed.
        """
        killed, self.spool_folder = self.spool_folder, self.folder / f"once{self.kills}"
        shutil.copytree(killed, self.spool_folder)
        self.spool.close(remove=True)

    def dial(self, owner: Worker | Client) -> Wire:
        wire = Wire(self.broker, owner)
        self.wires.append(wire)
        return wire

    # ---- time and messages ----

    def step(self) -> bool:
        """Delivers one message, runs one timer that is due, or lets somebody connect; returns
        whether there was anything to do.
        """
        choices: list[Callable[[], None]] = []
        for wire in self.wires:
            if wire.up:
                choices.append(lambda wire=wire: self.broker.receive(
                    wire.peer, *wire.up.popleft()))
            if wire.down:
                choices.append(lambda wire=wire: wire.owner.read(*wire.down.popleft()))
            elif not wire.open:
                choices.append(lambda wire=wire: (self.wires.remove(wire), wire.cut()))
        if self.timers and self.timers[0][0] <= self.now:
            choices.append(lambda: heapq.heappop(self.timers)[2]())
        for one in (*self.workers, *self.clients):
            if one.wire is None and not getattr(one, "dead", False):
                choices.append(one.connect)
        if choices:
            try:
                self.rng.choice(choices)()
            except Killed:
                self.kill_broker()
            self.broker.scheduler.ledger.check()
        return bool(choices)

    def settle(self) -> None:
        """Lets everything happen that needs no further cause."""
        while True:
            while self.step():
                pass
            idle = self.now + S // 5
            if not self.timers or self.timers[0][0] > idle:
                return
            self.now = max(self.now, self.timers[0][0])

    def pass_time(self, seconds: float) -> None:
        """Lets time pass, second by second; workers say that they live."""
        until = self.now + int(seconds * S)
        while self.now < until:
            self.settle()
            self.now = min(until, self.now + S)
            for worker in self.workers:
                worker.say(ms.Ping())
        self.settle()
