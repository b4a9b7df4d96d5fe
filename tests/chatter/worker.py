"""A worker of the model: it keeps its orders and reports what its node might report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from helpers.broker_rig import FakePeer

from chatter.job import JOB, S
from chatter.snapshots import NodeSnapshots
from tangram_hpc.broker.client_outbox import LINK_MAX
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import service_of
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms

if TYPE_CHECKING:
    from chatter.job import ChatterJob

_ENDS = (ActionState.COMPLETED, ActionState.COMPLETED, ActionState.COMPLETED, ActionState.FAILED,
         ActionState.TIMEOUT, ActionState.OUT_OF_MEMORY, ActionState.NODE_FAIL)
FILES = "ab" * 32


def value_of(action: Action) -> bytes:
    """The result of an action."""
    return f"value of {action.once or action.id}".encode()


class Link(FakePeer):
    """A connection whose messages to the peer are read one by one.

    Attributes:
        slow: whether the peer does not read now, so that the connection has no room.
    """

    def __init__(self, job: ChatterJob) -> None:
        self.slow = False
        super().__init__(job)  # type: ignore[arg-type]
        self.read = 0

    @property
    def unsent(self) -> int:  # type: ignore[override]
        """Bytes that wait in the connection."""
        return LINK_MAX + 1 if self.slow else 0

    def flush(self) -> None:
        if not self.slow:
            super().flush()

    def go_on(self) -> None:
        """The peer reads again."""
        self.slow = False
        if not self.closed:
            self.flush()
            self.rig.broker.room(self.peer)
            self.rig.settle()

    def unread(self) -> list[tuple[Any, bytes | None]]:
        """What has arrived and is not read; it counts as read now."""
        found = self.heard[self.read:]
        self.read = len(self.heard)
        return found


class Worker:
    """A worker of one node.

    Attributes:
        leases: the orders that have not ended, in the order of their arrival.
        killed: how orders are to end that the broker has killed.
        cleaning: leases that have ended and hold their units.
        results: ends that no broker has confirmed, with their values.
        sandboxes: sessions here: `fetching` a snapshot, `opening`, `up`, `packing` or `closing`.
        streams: streams to ports that clients have asked for.
        gone: whether its process has ended.
    """

    def __init__(self, job: ChatterJob, name: str, spec: NodeSpec) -> None:
        self.job, self.spec, self.uid = job, spec, f"{name}.{job.rng.random()}"
        self.node, self.gone = 0, False
        self.leases: dict[int, ms.StartAttempt] = {}
        self.killed: dict[int, Outcome] = {}
        self.started: set[int] = set()
        self.cleaning: dict[int, None] = {}
        self.results: dict[int, tuple[ms.Finished, bytes | None]] = {}
        self.sandboxes: dict[int, str] = {}
        self.closed: list[int] = []
        self.snapshots, self.streams = NodeSnapshots(self), list[int]()
        self.link: Link | None = None
        self.join()

    @property
    def is_satellite(self) -> bool:
        """Whether its node is of a job that the broker has submitted."""
        return self.spec.allocation not in ("", JOB)

    # ---- its connection ----

    def join(self) -> None:
        """Connects with the broker, for the first time or again."""
        self.link = Link(self.job)
        self.link.say(ms.WorkerHello(
            ms.PROTOCOL_VERSION, JOB, self.spec, self.uid, self.node,
            (*self.leases, *self.cleaning, *(n for n in self.results if n not in self.cleaning)),
            tuple(self.sandboxes) + tuple(self.closed)))
        back = bool(self.node)
        self.hear()
        if back and not self.gone:
            self.snapshots.report_again()
            for result in list(self.results.values()):
                self.say(*result)
            for session in self.closed:
                self.say(ms.SandboxDown(session, "it ended"))
            for session, state in list(self.sandboxes.items()):
                if state == "up":
                    self.say(ms.SandboxUp(session))
            self.say(ms.AttemptsStarted(tuple(self.started & self.leases.keys())))
        self.closed.clear()

    def say(self, message: Any, payload: bytes | None = None) -> None:
        """Says something, if there is a connection."""
        if self.link is not None and not self.link.closed and not self.gone:
            self.link.say(message, payload)

    def lose(self, reason: str = "lost") -> None:
        """Ends the process."""
        self.gone = True
        if self.link is not None and not self.link.closed:
            self.link.leave()
            self.link.closed = True

    def hear(self) -> None:
        """Reads all that has arrived."""
        if self.link is None or self.gone:
            return
        for message, _ in self.link.unread():
            self._hear(message)
        if self.link.closed:
            self.gone = True

    def _hear(self, message: Any) -> None:
        match message:
            case ms.WorkerWelcome(node=node):
                if self.node and node != self.node:
                    self.gone = True
                self.node = node
            case ms.PeerRefused() | ms.Shutdown():
                self.gone = True
            case ms.StartAttempt(lease=lease):
                self.leases[lease] = message
            case ms.KillAttempt(lease=lease, state=state, reason=reason):
                if lease in self.leases:
                    self.killed[lease] = Outcome(state, reason=reason)
            case ms.OpenSandbox(spec=spec):
                if spec.id not in self.sandboxes:
                    self.sandboxes[spec.id] = "fetching"
                    if not spec.snapshot or self.snapshots.need(spec.snapshot, spec.id):
                        self.sandboxes[spec.id] = "opening"
            case ms.OpenStream(stream=stream):
                self.streams.append(stream)
            case ms.SnapshotOrder():
                self.snapshots.orders.append(message)
            case ms.CloseSandbox(session=session):
                if session in self.sandboxes:
                    self.sandboxes[session] = "closing"
            case ms.PackSandbox(session=session):
                if self.sandboxes.get(session) == "up":
                    self.sandboxes[session] = "packing"
            case ms.Confirmed(leases=leases):
                for lease in leases:
                    self.results.pop(lease, None)

    # ---- what happens on the node ----

    def able(self, lease: int) -> bool:
        """Whether an order has its units: those behind others on CPUs wait for them."""
        order = self.leases[lease]
        if service_of(order.action.key):
            return True
        return order.after not in self.leases and order.after not in self.cleaning

    def act(self) -> None:
        """One thing that happens on the node."""
        rng = self.job.rng
        chance = rng.random()
        if chance < 0.25 or not (self.leases or self.sandboxes or self.cleaning):
            self.hear()
        elif chance < 0.35:
            self._start()
        elif chance < 0.6:
            self._finish_one()
        elif chance < 0.7 and self.cleaning:
            self.release(rng.choice(list(self.cleaning)))
        elif chance < 0.76:
            self._return()
        elif chance < 0.82:
            self.snapshots.act()
        elif chance < 0.85 and self.started & self.leases.keys():
            lease = rng.choice(sorted(self.started & self.leases.keys()))
            self.say(ms.Output(lease, rng.choice((1, 2))), b"text")
        elif chance < 0.88 and self.streams:
            stream = rng.choice(self.streams)
            self.say(*rng.choice((
                (ms.StreamCredit(stream, 9), None), (ms.StreamEnded(stream), None),
                (ms.StreamData(stream, rng.random() < 0.1), b"data"))))
        elif self.sandboxes:
            self._sandbox(rng.choice(list(self.sandboxes)))

    def _start(self) -> None:
        able = [lease for lease in self.leases if self.able(lease)]
        self.started.update(able)
        self.say(ms.AttemptsStarted(tuple(able)))

    def _finish_one(self) -> None:
        able = [n for n in self.leases if n in self.killed or self.able(n)]
        if able:
            self.finish(self.job.rng.choice(able))

    def finish(self, lease: int, outcome: Outcome | None = None, clean: bool | None = None) -> None:
        """Ends an order."""
        rng, order = self.job.rng, self.leases.pop(lease)
        outcome = outcome or self.killed.get(lease)
        if outcome is None or (rng.random() < 0.3 and outcome.state is ActionState.CANCELLED):
            outcome = self._outcome(order)
        done = outcome.state is ActionState.COMPLETED and order.action.kind is not Kind.BACKGROUND
        payload = value_of(order.action) if done else None
        outcome = outcome.returning(payload)
        self.killed.pop(lease, None)
        clean = rng.random() < 0.7 if clean is None else clean
        if not clean:
            self.cleaning[lease] = None
        n = int(payload is not None)
        self.results[lease] = ms.Finished(lease, outcome, True, n), payload
        self.say(ms.Finished(lease, outcome, clean, n), payload)

    def _outcome(self, order: ms.StartAttempt) -> Outcome:
        rng, state = self.job.rng, self.job.rng.choice(_ENDS)
        if order.action.kind is Kind.BACKGROUND:
            state = rng.choice((ActionState.COMPLETED, ActionState.PREEMPTED))
        calls = rng.choice((0, 0, 5))
        pushed = rng.choice((0, 0, 0, 1, 2)) if state is ActionState.FAILED else 0
        return Outcome(state, exec_ns=rng.choice((0, S // 1000, S // 10)),
                       cpu_ns=rng.choice((0, S // 100)),
                       restore_ns=S // 7 if order.restore_ns else 0, batch=rng.choice((1, 1, 2)),
                       pushed=pushed, retry_after_ns=rng.choice((0, S)) if pushed else 0,
                       resize_ns=rng.choice((0, 1000)), direct_calls=calls, direct_ns=calls)

    def release(self, lease: int) -> None:
        """The units of an ended order are free."""
        del self.cleaning[lease]
        self.say(ms.Released(lease))

    def _return(self) -> None:
        behind = [n for n, order in self.leases.items()
                  if n not in self.started and n not in self.killed
                  and order.after in self.leases and not service_of(order.action.key)]
        if behind:
            doomed = [self.job.rng.choice(behind)]
            for lease, order in self.leases.items():
                if order.after in doomed:
                    doomed.append(lease)
            for lease in doomed:
                del self.leases[lease]
            self.say(ms.Returned(tuple(reversed(doomed))))

    def _sandbox(self, session: int) -> None:
        rng, state = self.job.rng, self.sandboxes[session]
        if state == "opening" and rng.random() < 0.9:
            self.up(session)
        elif state == "up":
            if rng.random() < self.job.snapshot_rate:
                self.snapshots.take(session)
            elif rng.random() < 0.5:
                self.say(ms.BackgroundWants(session))
            elif rng.random() < 0.1:
                self.down(session, "it failed")
        elif state == "packing" and rng.random() < 0.9:
            del self.sandboxes[session]
            self.say(ms.SandboxPacked(session, FILES))
        elif state != "fetching":
            self.down(session, "" if state == "closing" else "it failed")

    def up(self, session: int) -> None:
        """A sandbox is ready."""
        self.sandboxes[session] = "up"
        self.say(ms.SandboxUp(session))

    def down(self, session: int, reason: str) -> None:
        """A sandbox ends, and all that runs in it."""
        for lease, order in list(self.leases.items()):
            if order.action.session == session:
                self.finish(lease, Outcome(ActionState.CANCELLED, reason="its session ended"))
        del self.sandboxes[session]
        if self.link is None or self.link.closed:
            self.closed.append(session)
        self.say(ms.SandboxDown(session, reason))

    def wild(self) -> None:
        """A report that no good worker makes: it must not end the broker."""
        rng = self.job.rng
        known = [n for n, lease in self.job.ledger.leases.items() if lease.node == self.node]
        sessions = [n for n, s in self.job.ledger.sessions.items() if s.node == self.node]
        lease = rng.choice(known or [1])
        session = rng.choice(sessions or [1])
        self.say(rng.choice((
            ms.Released(lease), ms.Returned((lease,)), ms.AttemptsStarted((lease,)),
            ms.SandboxUp(session), ms.SandboxPacked(session, FILES), ms.BackgroundWants(session),
            ms.SandboxDown(session, "wild"), ms.InputCredit(lease, 1, 1),
            ms.Finished(lease, Outcome(rng.choice(_ENDS[3:])), rng.random() < 0.5))))
        self.leases.pop(lease, None)

    def come_to_the_end(self) -> None:
        """Ends all that can end."""
        self.say(ms.Ping())
        self.hear()
        self.snapshots.finish()
        for lease in list(self.leases):
            if lease in self.leases and (lease in self.killed or self.able(lease)):
                self.finish(lease, self.killed.get(lease) or Outcome(
                    ActionState.COMPLETED, exec_ns=1000), True)
        for lease in list(self.cleaning):
            self.release(lease)
        for session, state in list(self.sandboxes.items()):
            if state == "opening":
                self.up(session)
            elif state == "packing":
                del self.sandboxes[session]
                self.say(ms.SandboxPacked(session, FILES))
            elif state == "closing":
                self.down(session, "")
