"""A worker's connection with its broker: messages become orders to the executor, and the executor's
reports become messages.

The driver decides nothing, runs nothing and does not know what a socket is. The driver keeps
prefetched leases (`domain/lease_queues`) and begins each when its units are free.

A connection may be lost and replaced (`connection_lost`, `rejoin`). What runs goes on meanwhile,
and prefetched leases begin. The driver keeps the results that no broker has confirmed
(`kept_results.py`) and what a broker must hear of sessions (`kept_sessions.py`). A broker that
knows this worker welcomes it under its old number and is told all of that. A broker that does not
know it refuses it or gives it another number. Then the worker's leases are fenced: the broker may
have started the same actions elsewhere, so everything here ends.

Invariants: everything that happens in one turn of the loop leaves as one frame. Without a
connection nothing is sent. Once the worker begins to end, it handles no further message of the
broker.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from ..domain.lease_queues import LeaseQueues
from ..domain.node import NodeSpec
from ..domain.outcome import TEXT_MAX, Outcome
from ..domain.states import ActionState
from ..errors import ProtocolError
from ..ports import GIVE_BACK_S, Executor, Link, Reports, SpillFiles, Timer
from ..protocol import input_flow
from ..protocol.message import (
    PROTOCOL_VERSION,
    AnyMessage,
    AttemptsStarted,
    BackgroundWants,
    CloseSandbox,
    Confirmed,
    Finished,
    Input,
    InputCredit,
    InstallService,
    KillAttempt,
    Leaving,
    OpenSandbox,
    OpenStream,
    Output,
    PackSandbox,
    PeerRefused,
    Ping,
    Pong,
    Released,
    Resize,
    Returned,
    SandboxDown,
    SandboxPacked,
    SandboxUp,
    Shutdown,
    SnapshotOrder,
    SnapshotReport,
    StartAttempt,
    StreamCredit,
    StreamData,
    StreamEnded,
    StreamMessage,
    WorkerHello,
    WorkerWelcome,
)
from .broker_link import BrokerLink
from .kept_results import KeptResults
from .kept_sessions import KeptSessions

REPORT_S = 0.1  # seconds between two AttemptsStarted messages
PREFETCH_MAX = 512  # prefetched leases that a worker takes for one unit
SIGNAL_S = 0.5  # longest time between Slurm's signal to a command and that to its worker
# how Slurm ends a step, and what `scancel --signal=USR1 JOB` sends to all of its processes
_SLURMS = (signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
RESEND_BYTES = 4 << 20  # kept results are sent again in pieces of about this size
RESEND_S = 0.01  # seconds between two of these pieces

MakeExecutor = Callable[[Reports, WorkerWelcome], Executor]
WaitingStart = tuple[StartAttempt, "memoryview | None"]  # an order and its payload


def _as_if_by_slurm(outcome: Outcome, payload: bytes | None) -> bool:
    """Whether a signal of Slurm's to a whole step may have ended an attempt: its command, a
    shell's child, or the execution process that ran the command. The end of that process leaves a
    failure without any status and without a payload. A command that goes on in the background was
    told to by its client.
    """
    if outcome.state is not ActionState.FAILED or outcome.reason == input_flow.DETACHED:
        return False
    code, number = outcome.exit_code, outcome.signal
    by_signal = number in _SLURMS or code - 128 in _SLURMS
    return by_signal or not (code or number or payload is not None)


class WorkerDriver:
    """A worker as its broker sees it, from its first hello to its end, over one connection after
    another; it fills `Reports` for its executor.

    Args:
        job: the job that the broker must belong to.
        spec: the units and the memory that this worker lends.
        link: the first connection with the broker.
        timer: calls back on the loop.
        make_executor: called once, with the broker's welcome.
        ended: called once with the reason when the worker has nothing left to do; by then the
            executor is closed and its last reports have been flushed.
        gap_s: the time between two frames of a busy worker in seconds, so that frames are few and
            large; 0: no gap.
        uid: the worker's own name for itself, by which a broker that came back knows it.
        spill: takes the payloads of kept results for which memory has no room; None to keep all in
            memory.

    Attributes:
        fenced: whether the worker ended because a broker did not take it back. It may join again
            as another node.
        refusal: why a broker refused this worker or a message of it; empty if none did.
    """

    def __init__(
        self,
        job: str,
        spec: NodeSpec,
        link: Link,
        timer: Timer,
        make_executor: MakeExecutor,
        ended: Callable[[str], None],
        gap_s: float = 0.0,
        uid: str = "",
        spill: SpillFiles | None = None,
    ) -> None:
        self._job = job
        self._spec = spec
        self._uid = uid
        self._timer = timer
        self._make_executor = make_executor
        self._on_ended = ended
        self._queues = LeaseQueues[WaitingStart]()
        self._followers: set[int] = set()  # leases that the executor holds behind others (`follow`)
        self._broker = BrokerLink(link, timer, gap_s, lambda: bool(self._queues or self._followers))
        self._send = self._broker.send
        self._executor: Executor | None = None
        self._welcome: WorkerWelcome | None = None
        self._over = False
        self.fenced, self.refusal = False, ""
        self._kept = KeptResults(spill)
        self._sessions = KeptSessions()
        # Leases without an outcome, and whether the executor has reported their start.
        self._running: dict[int, bool] = {}
        self._open: set[int] = set()  # leases of which processes may be left
        self._fresh: list[int] = []  # leases whose start is not reported yet
        self._report_due = False
        # ends that Slurm may have caused and that are not reported: are they clean?
        self._by_slurm: dict[int, bool] = {}
        self._streams: set[int] = set()  # port streams that are open
        # bytes of input that each lease was allowed, and that it has received, in all
        self._credit: dict[int, tuple[int, int]] = {}
        self._watched: set[int] = set()  # leases that headed a queue at the last `_tick`
        self._early: dict[int, Input] = {}  # signals for leases that wait in `_queues`
        self._due: list[WaitingStart] = []  # orders that begin in this turn of the loop
        self._ticking = False
        self._orders: dict[type, Callable[..., None]] = {
            StartAttempt: self._start,
            KillAttempt: self._kill,
            Resize: self._resize,
            Input: self._give_input,
            OpenStream: self._open_stream,
            StreamData: self._carry,
            StreamCredit: self._carry,
            StreamEnded: self._end_stream,
            OpenSandbox: self._open_sandbox,
            CloseSandbox: self._close_sandbox,
            PackSandbox: self._pack_sandbox,
            InstallService: self._prepare_service,
            SnapshotOrder: self._order_snapshot,
            Confirmed: self._confirm,
        }

    @property
    def welcome(self) -> WorkerWelcome | None:
        """The broker's last welcome; None before the first one came."""
        return self._welcome

    @property
    def connected(self) -> bool:
        """Whether there is a connection, with or without a welcome."""
        return self._broker.connected

    @property
    def joined(self) -> bool:
        """Whether the broker has welcomed this worker over the present connection."""
        return self._broker.joined

    @property
    def over(self) -> bool:
        """Whether the worker has ended, or is about to."""
        return self._over

    def start(self) -> None:
        """Sends the first hello and begins to send pings."""
        self._say_hello()
        self._broker.start_pings()

    def _say_hello(self) -> None:
        node = 0 if self._welcome is None else self._welcome.node
        leases = (*self._open, *(lease for lease in self._kept.results if lease not in self._open))
        self._broker.put(WorkerHello(PROTOCOL_VERSION, self._job, self._spec, self._uid, node,
                                     leases, self._sessions.numbers()))

    # ---- a connection that is lost and replaced ----

    def connection_lost(self, reason: str) -> None:
        """Goes on without a connection, until `rejoin`, `lost`, `stop` or `leave`. Nothing is
        written to the lost connection any more.

        Output and the bytes of port streams cannot be repeated, so output is dropped from now on
        and all port streams end.

        Args:
            reason: why the connection is lost, in one line.
        """
        if self._over:
            return
        self._broker.detach()
        self._kept.connection_lost()
        streams, self._streams = self._streams, set()
        if self._executor is not None:
            for stream in streams:
                self._executor.carry(StreamEnded(stream, f"connect: {reason}", "ECONNRESET"), b"")

    def rejoin(self, link: Link) -> None:
        """Sends a hello with all that this worker holds over a new connection. If the broker
        welcomes the worker under its old number, the worker goes on and repeats its reports;
        otherwise it ends, and `fenced` is set.
        """
        if not self._over:
            self._broker.attach(link)
            self._say_hello()

    def _welcomed(self, message: WorkerWelcome) -> None:
        if self._broker.joined:
            return
        if self._welcome is not None and 0 < message.epoch < self._welcome.epoch:
            return self._broker.drop()  # a superseded broker: this worker has seen its successor
        if self._welcome is not None and message.node != self._welcome.node:
            return self._fence("a broker that does not know this worker has taken its place")
        self._welcome, self._broker.joined = message, True
        if self._executor is None:
            self._executor = self._make_executor(self, message)
        else:
            self._report_again(self._executor)

    def _fence(self, reason: str) -> None:
        self.fenced = True
        self._end(reason)

    def _report_again(self, executor: Executor) -> None:
        """Repeats what the broker may not have heard. `BackgroundWants` is not among it, because
        the executor repeats these reports anyway.
        """
        begun = tuple(lease for lease, began in self._running.items() if began)
        self._fresh.clear()
        if begun:
            self._send(AttemptsStarted(begun))
        for report in self._sessions.reports():
            self._send(report)
        for snapshot in executor.snapshot_reports():
            self._send(snapshot)
        for late in self._broker.take_late():
            self._send(late)
        for lease, (allowed, received) in self._credit.items():
            self._send(InputCredit(lease, allowed, received))
        self._send_kept()

    def _send_kept(self) -> None:
        """Sends the next kept results as one frame, and the rest when the connection has taken
        them, so that neither a frame nor what waits in memory becomes too large.
        """
        if not self._broker.joined:
            return
        if self._broker.unsent < RESEND_BYTES:
            for result, payload in self._kept.take_unsent(RESEND_BYTES):
                self._send(result, payload)
            self._broker.flush()
        if self._kept.unsent:
            self._timer.after(RESEND_S, self._send_kept)

    # ---- from the broker ----

    def receive(self, message: AnyMessage, payload: memoryview | None) -> None:
        """Handles one message of the broker.

        Raises:
            ProtocolError: a worker may not get this message, or not before the welcome.
        """
        if self._over:
            return
        order = self._orders.get(type(message))
        if order is not None:
            if self._executor is None or not self._broker.joined:
                raise ProtocolError(f"{type(message).__name__} came before the welcome")
            order(self._executor, message, payload)
        elif isinstance(message, Ping):
            self._broker.put(Pong(message.stamp))
        elif isinstance(message, WorkerWelcome):
            self._welcomed(message)
        elif isinstance(message, Shutdown):
            self.stop(message.reason)
        elif isinstance(message, PeerRefused):
            self.refusal = message.text
            if self._welcome is None or self._broker.joined:
                self.stop(message.text)
            else:
                self._fence(message.text)
        elif not isinstance(message, Pong):
            raise ProtocolError(f"a worker does not expect {type(message).__name__}")

    def _start(self, executor: Executor, order: StartAttempt, payload: memoryview | None) -> None:
        if order.lease not in self._open and order.lease not in self._kept.results:
            self._open.add(order.lease)
            if order.after in self._open:
                if payload is not None and executor.follow(order, payload):
                    self._running[order.lease] = False
                    self._followers.add(order.lease)
                else:
                    self._queues.add(order.lease, order.after, (order, payload))
                    self._tick_later()
            else:
                self._begin(executor, (order, payload))

    def _begin(self, executor: Executor, held: WaitingStart) -> None:
        order, payload = held
        self._running[order.lease] = False
        executor.start(order, memoryview(b"") if payload is None else payload)
        if self._early and (early := self._early.pop(order.lease, None)) is not None:
            self._give_input(executor, early, None)

    def _begin_due(self) -> None:
        due, self._due = self._due, []
        for held in due:
            if self._executor is not None and not self._over:
                self._begin(self._executor, held)

    def _gone(self, lease: int, settles: bool = False) -> None:
        """Lets the lease behind this one begin, but later, because the executor is in the middle of
        a step. If the executor announces `settled`, no further turn of the loop is needed, which
        saves a busy worker a tenth of its time.
        """
        self._open.discard(lease)
        self._early.pop(lease, None)
        held = self._queues.remove(lease)
        if held is not None:
            if not self._due and not settles:
                self._timer.after(0, self._begin_due)
            self._due.append(held)

    def _end_held(self, lease: int, state: ActionState, reason: str) -> None:
        self._queues.remove(lease)
        self.finished(lease, Outcome(state, reason=reason), None, True)

    def _tick_later(self) -> None:
        if not self._ticking:
            self._ticking = True
            self._timer.after(GIVE_BACK_S, self._tick)

    def _tick(self) -> None:
        """Gives back the leases that have waited behind the same lease since the last call. Without
        a broker they stay: nobody could start them elsewhere.
        """
        self._ticking = False
        if self._over:
            return
        if not self._broker.joined:
            self._watched = set()
            return self._tick_later()
        heads = self._queues.heads()
        stuck = [lease for head in heads & self._watched for lease in self._queues.behind(head)]
        self._watched = heads
        for lease in stuck:
            self._queues.remove(lease)
            self._early.pop(lease, None)
            self._open.discard(lease)
        if stuck:
            self._send(Returned(tuple(stuck)))
        if self._queues:
            self._tick_later()

    def _kill(self, executor: Executor, order: KillAttempt, payload: memoryview | None) -> None:
        if order.lease in self._queues:
            self._end_held(order.lease, order.state, order.reason)
        elif order.lease in self._followers and executor.take_back(order.lease):
            self.finished(order.lease, Outcome(order.state, reason=order.reason), None, True)
        elif order.lease in self._running:
            executor.kill(order.lease, order.state, order.reason)

    def _resize(self, executor: Executor, order: Resize, payload: memoryview | None) -> None:
        if order.lease in self._running:
            executor.resize(order.lease, order.cores)

    def _give_input(self, executor: Executor, order: Input, payload: memoryview | None) -> None:
        if order.id in self._queues:
            self._early[order.id] = order
        elif order.id in self._running:
            data = b"" if payload is None else bytes(payload)
            if order.kind == input_flow.DATA and order.id in self._credit:
                allowed, received = self._credit[order.id]
                self._credit[order.id] = allowed, received + len(data)
            executor.give_input(order.id, order.kind, data, order.number, order.other)

    def _open_stream(self, executor: Executor, message: OpenStream,
                     payload: memoryview | None) -> None:
        self._streams.add(message.stream)
        self._carry(executor, message, payload)

    def _end_stream(self, executor: Executor, message: StreamEnded,
                    payload: memoryview | None) -> None:
        self._streams.discard(message.stream)
        self._carry(executor, message, payload)

    def _carry(self, executor: Executor, message: StreamMessage,
               payload: memoryview | None) -> None:
        executor.carry(message, b"" if payload is None else bytes(payload))

    def _open_sandbox(self, executor: Executor, order: OpenSandbox, _: memoryview | None) -> None:
        if self._sessions.opening(order.spec):
            executor.open_session(order.spec)

    def _prepare_service(self, executor: Executor, order: InstallService,
                         _: memoryview | None) -> None:
        executor.prepare_service(order.spec)

    def _close_sandbox(self, executor: Executor, order: CloseSandbox, _: memoryview | None) -> None:
        for lease in [lease for lease, (held, _) in self._queues.items()
                      if held.action.session == order.session]:
            self._end_held(lease, ActionState.CANCELLED, "its session was closed")
        self._sessions.closing(order.session)
        executor.close_session(order.session)

    def _pack_sandbox(self, executor: Executor, order: PackSandbox, _: memoryview | None) -> None:
        executor.pack_session(order.session)

    def _order_snapshot(self, executor: Executor, order: SnapshotOrder, _: memoryview | None
                        ) -> None:
        executor.order_snapshot(order)

    def _confirm(self, executor: Executor, order: Confirmed, _: memoryview | None) -> None:
        self._kept.confirm(order.leases)

    # ---- its end ----

    def lost(self, reason: str) -> None:
        """Ends everything that runs, because the connection is over and no broker waits for this
        worker any more.
        """
        self._end(reason)

    def stop(self, reason: str) -> None:
        """Ends everything that runs, tells the broker how it ended, and closes the connection."""
        if not self._over:
            self._end(reason)

    def leave(self, reason: str) -> None:
        """Ends everything because this node leaves the job, and closes the connection. How the
        leases ended is not reported: the broker starts their actions again elsewhere.
        """
        if not self._over:
            self._broker.put(Leaving(reason))
            self._broker.flush()  # flushed now, because the next steps may take a while
            self._over = True
            self._broker.mute()
            if self._executor is not None:
                self._executor.close()
            self._broker.close()
            self._on_ended(reason)

    def _end(self, reason: str) -> None:
        """Ends everything; the broker hears how, if this worker has joined it."""
        if self._over:
            return
        for lease in [lease for lease, _ in self._queues.items()]:
            self._end_held(lease, ActionState.CANCELLED, "its worker was closed")
        if self._executor is not None:
            self._executor.close()
        self._over = True
        self._broker.close()
        self._on_ended(reason)

    # ---- from the executor (`ports.Reports`) ----

    def started(self, lease: int) -> None:
        """Reports the start with the next `AttemptsStarted`; see `ports.Reports`."""
        self._followers.discard(lease)
        if lease in self._running:
            self._running[lease] = True
        self._fresh.append(lease)
        if not self._report_due:
            self._report_due = True
            self._timer.after(REPORT_S, self._beat)

    def finished(self, lease: int, outcome: Outcome, payload: bytes | None, clean: bool,
                 settles: bool = False) -> None:
        """Reports the outcome at once, or after `SIGNAL_S` if Slurm's signal may have caused it.
        Slurm sends such a signal to all processes of a step, and the commands may get it before
        this worker. After the delay the worker knows whether it must leave, too; if the signal
        has ended it, the broker knows that the node is lost.
        """
        self._running.pop(lease, None)
        self._followers.discard(lease)
        if self._credit:
            self._credit.pop(lease, None)
        if _as_if_by_slurm(outcome, payload):
            self._by_slurm[lease] = clean
            self._timer.after(SIGNAL_S, lambda: self._tell_after_all(lease, outcome, payload))
        else:
            self._tell_end(lease, outcome, payload, clean, settles)

    def settled(self) -> None:
        """Begins the orders whose turn has come; see `ports.Reports`."""
        if self._due:
            self._begin_due()

    def _tell_after_all(self, lease: int, outcome: Outcome, payload: bytes | None) -> None:
        self._tell_end(lease, outcome, payload, self._by_slurm.pop(lease))

    def _tell_end(self, lease: int, outcome: Outcome, payload: bytes | None, clean: bool,
                  settles: bool = False) -> None:
        if clean:
            self._gone(lease, settles)
        result = Finished(lease, outcome.brief(), clean, int(payload is not None))
        self._kept.add(result, payload, self._broker.joined)
        self._send(result, payload)

    def released(self, lease: int) -> None:
        """Reports that nothing of the lease is left; see `ports.Reports`."""
        if lease in self._by_slurm:
            self._by_slurm[lease] = True
            return
        self._gone(lease)
        if not self._kept.release(lease):  # else the result says so when it is sent again
            self._send(Released(lease))

    def returned(self, lease: int) -> None:
        """Returns the lease to the broker, and all leases that wait behind it on this worker."""
        behind = self._queues.behind(lease)
        for each in behind:
            self._queues.remove(each)
        self._followers.discard(lease)
        for each in (*behind, lease):
            self._running.pop(each, None)
            self._open.discard(each)
            self._early.pop(each, None)
        self._send(Returned((*behind, lease)))

    def output(self, lease: int, stream: int, data: bytes) -> None:
        """Forwards a piece of output; see `ports.Reports`."""
        self._send(Output(lease, stream), data)

    def input_credit(self, lease: int, count: int) -> None:
        """Forwards credit for input; see `ports.Reports`."""
        allowed, received = self._credit.get(lease, (0, 0))
        self._credit[lease] = allowed + count, received
        self._send(InputCredit(lease, count))

    def stream(self, message: StreamMessage, data: bytes | None = None) -> None:
        """Forwards what a port stream has brought; see `ports.Reports`."""
        if isinstance(message, StreamEnded):
            self._streams.discard(message.stream)
        self._send(message, data)

    def session_up(self, session: int, image: str = "") -> None:
        """Reports that the session's sandbox is ready; see `ports.Reports`."""
        report = SandboxUp(session, image)
        self._sessions.up(report)
        self._send(report)

    def session_down(self, session: int, reason: str, infeasible: bool = False) -> None:
        """Reports that the session's sandbox is gone; see `ports.Reports`."""
        self._session_ended(SandboxDown(session, reason[:TEXT_MAX], infeasible))

    def session_packed(self, session: int, files: str) -> None:
        """Reports that the session's files are in the store; see `ports.Reports`."""
        self._session_ended(SandboxPacked(session, files))

    def _session_ended(self, report: SandboxDown | SandboxPacked) -> None:
        """Reports the end of a sandbox, and opens the session again if it was requested meanwhile.
        """
        self._sessions.ended(report)
        self._send(report)
        again = self._sessions.reopened(report.session)
        if again is not None and self._executor is not None:
            self._open_sandbox(self._executor, OpenSandbox(again.spec), None)
            if again.closed:
                self._close_sandbox(self._executor, CloseSandbox(report.session), None)

    def background_wants(self, session: int) -> None:
        """Reports that background processes could run; see `ports.Reports`."""
        self._send(BackgroundWants(session))

    def snapshot(self, report: SnapshotReport) -> None:
        """Forwards what happened to a snapshot; see `ports.Reports`."""
        self._send(report)

    # ---- periodic reports ----

    def _beat(self) -> None:
        self._report_due = False
        running = tuple(lease for lease in self._fresh if lease in self._running)
        self._fresh.clear()
        if running:
            self._send(AttemptsStarted(running))
