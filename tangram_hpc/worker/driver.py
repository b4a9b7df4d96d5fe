"""A worker's connection with its broker: messages become orders to the executor, and the executor's
reports become messages.

The driver decides nothing, runs nothing and does not know what a socket is. The driver keeps
prefetched leases (`domain/lease_queues`) and begins each when its units are free.

Invariants: everything that happens in one turn of the loop leaves as one frame. Once the worker
begins to end, it handles no further message of the broker.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from ..domain.lease_queues import LeaseQueues
from ..domain.node import NodeSpec
from ..domain.outcome import TEXT_MAX, Outcome
from ..domain.states import ActionState
from ..errors import ProtocolError
from ..ports import GIVE_BACK_S, Executor, Link, Reports, Timer
from ..protocol.frame import BUSY_MESSAGES
from ..protocol.liveness import PING_S
from ..protocol.message import (
    PROTOCOL_VERSION,
    AnyMessage,
    AttemptsStarted,
    BackgroundWants,
    CloseSandbox,
    Finished,
    Input,
    InputCredit,
    InstallService,
    KillAttempt,
    Leaving,
    Message,
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

REPORT_S = 0.1  # seconds between two AttemptsStarted messages
AHEAD = 512  # prefetched leases that a worker takes for one unit
SIGTERM_S = 0.5  # longest time between Slurm's SIGTERM to a command and that to its worker

MakeExecutor = Callable[[Reports, WorkerWelcome], Executor]
WaitingStart = tuple[StartAttempt, "memoryview | None"]  # an order and its payload


def _as_if_by_sigterm(outcome: Outcome) -> bool:
    """Whether SIGTERM may have ended an attempt: its command, a shell's child, or the execution
    process that ran the command, whose end leaves a failure without any status.
    """
    code, number = outcome.exit_code, outcome.signal
    by_signal = number == signal.SIGTERM or code == 128 + signal.SIGTERM
    return outcome.state is ActionState.FAILED and (by_signal or not (code or number))


class WorkerDriver:
    """One connection of a worker, from its hello to its end; it fills `Reports` for its executor.

    Args:
        job: the job that the broker must belong to.
        spec: the units and the memory that this worker lends.
        link: the connection with the broker.
        timer: calls back on the loop.
        make_executor: called once, with the broker's welcome.
        ended: called once with the reason when the worker has nothing left to do; by then the
            executor is closed and its last reports have been flushed.
        gap_s: the time between two frames of a busy worker in seconds, so that frames are few and
            large; 0: no gap.
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
    ) -> None:
        self._job = job
        self._spec = spec
        self._link = link
        self._timer = timer
        self._make_executor = make_executor
        self._on_ended = ended
        self._gap_s = gap_s
        self._said = 0  # messages since the last flush
        self._executor: Executor | None = None
        self._welcome: WorkerWelcome | None = None
        self._over = False
        self._flushing = False
        self._quiet = True  # nothing was sent since the last ping was due
        self._running: set[int] = set()  # leases without an outcome
        self._open: set[int] = set()  # leases of which processes may be left
        self._fresh: list[int] = []  # leases whose start is not reported yet
        self._report_due = False
        self._unconfirmed: dict[int, bool] = {}  # unreported ends by SIGTERM: are they clean?
        self._queues = LeaseQueues[WaitingStart]()
        self._watched: set[int] = set()  # leases that headed a queue at the last `_tick`
        self._ahead: set[int] = set()  # prefetched leases that the executor holds
        self._early: dict[int, Input] = {}  # signals for leases that wait in `_queues`
        self._due: list[WaitingStart] = []  # orders that begin in this turn of the loop
        self._ticking = False
        self._orders: dict[type, Callable[..., None]] = {
            StartAttempt: self._start,
            KillAttempt: self._kill,
            Resize: self._resize,
            Input: self._give_input,
            OpenStream: self._carry,
            StreamData: self._carry,
            StreamCredit: self._carry,
            StreamEnded: self._carry,
            OpenSandbox: self._open_sandbox,
            CloseSandbox: self._close_sandbox,
            PackSandbox: self._pack_sandbox,
            InstallService: self._prepare_service,
            SnapshotOrder: self._order_snapshot,
        }

    @property
    def welcome(self) -> WorkerWelcome | None:
        """The broker's welcome; None before it came."""
        return self._welcome

    def start(self) -> None:
        """Sends the hello and begins to send pings."""
        self._send(WorkerHello(PROTOCOL_VERSION, self._job, self._spec))
        self._timer.after(PING_S, self._ping)

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
            if self._executor is None:
                raise ProtocolError(f"{type(message).__name__} came before the welcome")
            order(self._executor, message, payload)
        elif isinstance(message, Ping):
            self._send(Pong(message.stamp))
        elif isinstance(message, WorkerWelcome):
            if self._executor is None:
                self._welcome = message
                self._executor = self._make_executor(self, message)
        elif isinstance(message, Shutdown):
            self.stop(message.reason)
        elif isinstance(message, PeerRefused):
            self.stop(message.text)
        elif not isinstance(message, Pong):
            raise ProtocolError(f"a worker does not expect {type(message).__name__}")

    def _start(self, executor: Executor, order: StartAttempt, payload: memoryview | None) -> None:
        if order.lease not in self._open:
            self._open.add(order.lease)
            if order.after in self._open:
                if payload is not None and executor.follow(order, payload):
                    self._running.add(order.lease)
                    self._ahead.add(order.lease)
                else:
                    self._queues.add(order.lease, order.after, (order, payload))
                    self._tick_later()
            else:
                self._begin(executor, (order, payload))

    def _begin(self, executor: Executor, held: WaitingStart) -> None:
        order, payload = held
        self._running.add(order.lease)
        executor.start(order, memoryview(b"") if payload is None else payload)
        if self._early and (early := self._early.pop(order.lease, None)) is not None:
            self._give_input(executor, early, None)

    def _begin_due(self) -> None:
        due, self._due = self._due, []
        for held in due:
            if self._executor is not None and not self._over:
                self._begin(self._executor, held)

    def _gone(self, lease: int, soon: bool = False) -> None:
        """Lets the lease behind this one begin, but later, because the executor is in the middle of
        a step. If the executor announces `settled`, no further turn of the loop is needed, which
        saves a busy worker a tenth of its time.
        """
        self._open.discard(lease)
        self._early.pop(lease, None)
        held = self._queues.remove(lease)
        if held is not None:
            if not self._due and not soon:
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
        self._ticking = False
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
        elif order.lease in self._ahead and executor.take_back(order.lease):
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
            executor.give_input(order.id, order.kind, data, order.number, order.other)

    def _carry(self, executor: Executor, message: StreamMessage,
               payload: memoryview | None) -> None:
        executor.carry(message, b"" if payload is None else bytes(payload))

    def _open_sandbox(self, executor: Executor, order: OpenSandbox, _: memoryview | None) -> None:
        executor.open_session(order.spec)

    def _prepare_service(self, executor: Executor, order: InstallService,
                         _: memoryview | None) -> None:
        executor.prepare_service(order.spec)

    def _close_sandbox(self, executor: Executor, order: CloseSandbox, _: memoryview | None) -> None:
        for lease in [lease for lease, (held, _) in self._queues.items()
                      if held.action.session == order.session]:
            self._end_held(lease, ActionState.CANCELLED, "its session was closed")
        executor.close_session(order.session)

    def _pack_sandbox(self, executor: Executor, order: PackSandbox, _: memoryview | None) -> None:
        executor.pack_session(order.session)

    def _order_snapshot(self, executor: Executor, order: SnapshotOrder, _: memoryview | None
                        ) -> None:
        executor.order_snapshot(order)

    # ---- its end ----

    def lost(self, reason: str) -> None:
        """Ends everything that runs, because the connection is over and no broker waits for it."""
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
            self._send(Leaving(reason))
            self._link.flush()  # flushed now, because the next steps may take a while
            self._over = True
            if self._executor is not None:
                self._executor.close()
            self._link.flush()
            self._link.close()
            self._on_ended(reason)

    def _end(self, reason: str) -> None:
        if self._over:
            return
        for lease in [lease for lease, _ in self._queues.items()]:
            self._end_held(lease, ActionState.CANCELLED, "its worker was closed")
        if self._executor is not None:
            self._executor.close()
        self._over = True
        self._link.flush()
        self._link.close()
        self._on_ended(reason)

    # ---- from the executor (`ports.Reports`) ----

    def started(self, lease: int) -> None:
        """Reports the start with the next `AttemptsStarted`; see `ports.Reports`."""
        self._ahead.discard(lease)
        self._fresh.append(lease)
        if not self._report_due:
            self._report_due = True
            self._timer.after(REPORT_S, self._beat)

    def finished(self, lease: int, outcome: Outcome, payload: bytes | None, clean: bool,
                 soon: bool = False) -> None:
        """Reports the outcome at once, or after `SIGTERM_S` if SIGTERM may have caused it. When
        Slurm ends a step, it sends SIGTERM to all of its processes, and the commands may get it
        before this worker. After the delay the worker knows whether it must leave, too.
        """
        self._running.discard(lease)
        self._ahead.discard(lease)
        if payload is None and _as_if_by_sigterm(outcome):
            self._unconfirmed[lease] = clean
            self._timer.after(SIGTERM_S, lambda: self._tell_after_all(lease, outcome))
        else:
            self._tell_end(lease, outcome, payload, clean, soon)

    def settled(self) -> None:
        """Begins the orders whose turn has come; see `ports.Reports`."""
        if self._due:
            self._begin_due()

    def _tell_after_all(self, lease: int, outcome: Outcome) -> None:
        self._tell_end(lease, outcome, None, self._unconfirmed.pop(lease))

    def _tell_end(self, lease: int, outcome: Outcome, payload: bytes | None, clean: bool,
                  soon: bool = False) -> None:
        if clean:
            self._gone(lease, soon)
        self._send(Finished(lease, outcome.brief(), clean, int(payload is not None)), payload)

    def released(self, lease: int) -> None:
        """Reports that nothing of the lease is left; see `ports.Reports`."""
        if lease in self._unconfirmed:
            self._unconfirmed[lease] = True
            return
        self._gone(lease)
        self._send(Released(lease))

    def returned(self, lease: int) -> None:
        """Returns the lease to the broker, and all leases that wait behind it on this worker."""
        behind = self._queues.behind(lease)
        for each in behind:
            self._queues.remove(each)
        self._ahead.discard(lease)
        for each in (*behind, lease):
            self._running.discard(each)
            self._open.discard(each)
        self._send(Returned((*behind, lease)))

    def output(self, lease: int, stream: int, data: bytes) -> None:
        """Forwards a piece of output; see `ports.Reports`."""
        self._send(Output(lease, stream), data)

    def input_credit(self, lease: int, count: int) -> None:
        """Forwards credit for input; see `ports.Reports`."""
        self._send(InputCredit(lease, count))

    def stream(self, message: StreamMessage, data: bytes | None = None) -> None:
        """Forwards what a port stream has brought; see `ports.Reports`."""
        self._send(message, data)

    def session_up(self, session: int, image: str = "") -> None:
        """Reports that the session's sandbox is ready; see `ports.Reports`."""
        self._send(SandboxUp(session, image))

    def session_down(self, session: int, reason: str, never: bool = False) -> None:
        """Reports that the session's sandbox is gone; see `ports.Reports`."""
        self._send(SandboxDown(session, reason[:TEXT_MAX], never))

    def session_packed(self, session: int, files: str) -> None:
        """Reports that the session's files are in the store; see `ports.Reports`."""
        self._send(SandboxPacked(session, files))

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

    def _ping(self) -> None:
        if self._over:
            return
        if self._quiet:
            self._send(Ping())
        self._quiet = True
        self._timer.after(PING_S, self._ping)

    def _send(self, message: Message, payload: bytes | None = None) -> None:
        if self._over:
            return
        self._quiet = False
        self._link.send(message, payload)
        self._said += 1
        if not self._flushing:
            self._flushing = True
            self._timer.after(0, self._flush)

    def _flush(self) -> None:
        busy = self._said >= BUSY_MESSAGES or (self._said and (self._queues or self._ahead))
        self._flushing = bool(busy) and self._gap_s > 0
        self._said = 0
        if not self._over:
            self._link.flush()
            if self._flushing:
                self._timer.after(self._gap_s, self._flush)
