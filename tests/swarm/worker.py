"""One worker of the swarm: the real driver, and an executor whose sandboxes are played.

What the executor runs takes as long as the world likes: an attempt ends, its units become free, and
a sandbox is ready whenever a turn says so. The executor believes nothing: it checks that its orders
keep to the node's units, sessions and order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from swarm.wires import Wire
from swarm.world import GRACE_S, Process, S
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import BrokerUnreachable
from tangram_hpc.ports import Reports
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol import payload as pl
from tangram_hpc.protocol.frame import BUSY_GAP_S
from tangram_hpc.protocol.value import encode_value
from tangram_hpc.worker.driver import WorkerDriver

if TYPE_CHECKING:
    from swarm.job import Job

_PAUSE_S, _PAUSE_MAX_S = 0.05, 1.0  # between two attempts to reach a broker, as `BrokerRedial`
MEM_MIB = 4096
JOB = "7"


@dataclass
class Execution:
    """One attempt that began on a node.

    Attributes:
        number: counts all executions of the run.
        worker: where it runs, as long as that start of the worker lives.
        ended: how it ended; None while it runs.
    """

    number: int
    order: ms.StartAttempt
    token: str
    worker: WorkerProcess
    node: int
    cores: tuple[int, ...] = ()
    ended: Outcome | None = None
    value: str = ""


def _token(payload: memoryview) -> str:
    """What a client named its work, out of the call."""
    match pl.decode(payload):
        case pl.ExecCall(argv=argv):
            return argv[-1]
        case pl.FunctionCall(arguments=data) | pl.ServiceCall(arguments=data):
            return bytes(data).decode()
        case other:
            raise AssertionError(f"a call that nobody made: {other}")


class PlayedExecutor:
    """The executor of one start of a worker (`ports.Executor`).

    Attributes:
        running: what runs, by lease.
        cleaning: what has ended and still holds its units, by lease.
        behind: orders that were accepted early (`follow`), by lease.
        sandboxes: the sessions here: "opening" or "up".
    """

    def __init__(self, worker: WorkerProcess, reports: Reports, node: int) -> None:
        self.worker, self.world, self.reports, self.node = worker, worker.world, reports, node
        self.running: dict[int, Execution] = {}
        self.cleaning: dict[int, Execution] = {}
        self.behind: dict[int, tuple[ms.StartAttempt, bytes]] = {}
        self.sandboxes: dict[int, str] = {}
        self.services: set[str] = set()
        self._closed = False

    # ---- what the driver orders (`ports.Sandboxes`) ----

    def open_session(self, spec: SessionSpec) -> None:
        self.sandboxes.setdefault(spec.id, "opening")
        self.world.laws.sandbox_opened(self, spec)

    def close_session(self, session: int) -> None:
        for lease, execution in list(self.running.items()):
            if execution.order.action.session == session:
                self.finish(lease, Outcome(ActionState.CANCELLED, reason="its session was closed"))
        for lease, (order, _) in list(self.behind.items()):
            if order.action.session == session:
                del self.behind[lease]
                self.reports.finished(lease, Outcome(ActionState.CANCELLED), None, True)
        if self.sandboxes.pop(session, None) is not None:
            self.reports.session_down(session, "")

    def pack_session(self, session: int) -> None:
        if self.sandboxes.pop(session, None) is not None:
            self.reports.session_packed(session, "files")

    def order_snapshot(self, order: ms.SnapshotOrder) -> None:
        pass

    def snapshot_reports(self) -> Iterable[ms.SnapshotReport]:
        return ()

    def prepare_service(self, spec: ServiceSpec) -> None:
        self.services.add(spec.name)

    def start(self, order: ms.StartAttempt, payload: memoryview) -> None:
        execution = Execution(next(self.world.counter), order, _token(payload), self.worker,
                              self.node, order.cores)
        self.world.laws.began(self, execution)
        self.running[order.lease] = execution
        self.reports.started(order.lease)

    def follow(self, order: ms.StartAttempt, payload: memoryview) -> bool:
        accepts = order.action.kind is Kind.EXEC and self.world.rng.random() < 0.3
        if accepts:
            self.behind[order.lease] = order, bytes(payload)
        return accepts

    def take_back(self, lease: int) -> bool:
        return self.behind.pop(lease, None) is not None

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        if lease in self.running:
            later = self.world.rng.random() < 0.3
            kill = lambda: self._killed(lease, state, reason)  # noqa: E731
            self.worker.after(0.5, kill) if later else kill()

    def _killed(self, lease: int, state: ActionState, reason: str) -> None:
        if lease in self.running and not self._closed:
            self.finish(lease, Outcome(state, reason=reason))

    def give_input(self, lease: int, kind: int, data: bytes, number: int, other: int) -> None:
        pass

    def carry(self, message: ms.StreamMessage, data: bytes) -> None:
        pass

    def resize(self, lease: int, cores: tuple[int, ...]) -> None:
        if lease in self.running:
            self.world.laws.resized(self, self.running[lease], cores)

    def close(self) -> None:
        self._closed = True
        for lease in list(self.running):
            self.finish(lease, Outcome(ActionState.CANCELLED, reason="its worker was closed"))
        for one in (self.running, self.cleaning, self.behind, self.sandboxes):
            one.clear()

    # ---- what happens by itself ----

    def choices(self) -> list[Callable[[], None]]:
        """What could happen now."""
        found: list[Callable[[], None]] = [
            lambda lease=lease: self.finish(lease) for lease in self.running]
        found += [lambda lease=lease: self.release(lease) for lease in self.cleaning]
        found += [lambda lease=lease: self._give_back(lease) for lease in self.behind]
        found += [lambda session=session: self._up(session)
                  for session, state in self.sandboxes.items() if state == "opening"]
        return found

    def finish(self, lease: int, outcome: Outcome | None = None) -> None:
        """Ends an attempt; without an outcome it has completed, or has failed by itself."""
        execution = self.running.pop(lease)
        rng, payload = self.world.acts, None
        if outcome is None:
            fails = execution.order.action.kind is Kind.EXEC and rng.random() < 0.05
            state = ActionState.FAILED if fails else ActionState.COMPLETED
            execution.value = f"{execution.token}#{execution.number}"
            payload = _result(execution)
            outcome = Outcome(state, exit_code=int(state is ActionState.FAILED), exec_ns=S // 100)
        if execution.order.restore_ns:
            outcome = msgspec.structs.replace(outcome, restore_ns=S // 5)
        clean = self._closed or rng.random() < 0.7
        execution.ended = outcome
        if not clean:
            self.cleaning[lease] = execution
        returning = outcome.returning(payload)
        self.reports.finished(lease, returning, payload, clean, True)
        self.reports.settled()
        if clean:
            self._advance(lease)

    def release(self, lease: int) -> None:
        """The units of an attempt that has ended are free."""
        del self.cleaning[lease]
        self.reports.released(lease)
        self._advance(lease)

    def _advance(self, gone: int) -> None:
        for lease, (order, payload) in list(self.behind.items()):
            if order.after == gone:
                del self.behind[lease]
                self.start(order, memoryview(payload))

    def _give_back(self, lease: int) -> None:
        """Gives an order back that was accepted early."""
        doomed = [lease]
        for later, (order, _) in list(self.behind.items()):
            if order.after in doomed:
                doomed.append(later)
        for each in reversed(doomed):
            if each in self.behind:
                del self.behind[each]
                self.reports.returned(each)

    def _up(self, session: int) -> None:
        self.sandboxes[session] = "up"
        self.reports.session_up(session)


def _result(execution: Execution) -> bytes:
    if execution.order.action.kind is Kind.EXEC:
        return pl.encode(pl.ExecReturn(execution.value.encode()))
    return pl.encode(pl.ValueReturn(encode_value(execution.value)))


class WorkerProcess(Process):
    """A worker of one node, from one start to its end; `Job` starts another one in its place.

    Attributes:
        driver: its connection with brokers.
        executor: what runs here; None before the first welcome.
        shut_until: its way to brokers is cut off before (world's ns).
    """

    world: Job

    def __init__(self, world: Job, name: str, ends_at_ns: int = 0) -> None:
        super().__init__(world, name)
        self.spec = NodeSpec(
            name, name, (0, 1, 2, 3), MEM_MIB, gpus=(0, 1), untrusted=("model",), ahead=2,
            ends_at_ns=ends_at_ns, allocation="7" if ends_at_ns else "")
        self.driver: WorkerDriver | None = None
        self.executor: PlayedExecutor | None = None
        self.wire: Wire | None = None
        self.shut_until = 0
        self._lost_at, self._pause_s, self._dialing = 0, _PAUSE_S, False
        self.after(0, self._join)

    @property
    def node(self) -> int:
        """Its number; 0 before the first welcome."""
        return self.executor.node if self.executor is not None else 0

    def _join(self) -> None:
        try:
            self.wire = self.world.dial(self)
        except BrokerUnreachable:
            return self.after(0.5, self._join)
        self.driver = WorkerDriver(JOB, self.spec, self.wire.at_peer, self, self._make,
                                   self._ended, BUSY_GAP_S,
                                   f"{self.name}.{next(self.world.worker_uids)}")
        self._listen(self.driver)
        self.driver.start()

    def _make(self, reports: Reports, welcome: ms.WorkerWelcome) -> Any:
        self.executor = PlayedExecutor(self, reports, welcome.node)
        return self.executor

    def _listen(self, driver: WorkerDriver) -> None:
        assert self.wire is not None
        self.wire.down.receive = driver.receive
        self.wire.down.lost = self.lost

    def lost(self, reason: str) -> None:
        """Goes on without a connection, and dials again."""
        assert self.driver is not None
        self.driver.connection_lost(reason)
        if not self.driver.over and not self._dialing:
            self._dialing, self._lost_at, self._pause_s = True, self.world.now, _PAUSE_S
            self._dial_again()

    def _dial_again(self) -> None:
        driver = self.driver
        assert driver is not None
        if not driver.over and not driver.connected:
            try:
                self.wire = self.world.dial(self)
            except BrokerUnreachable:
                pass
            else:
                driver.rejoin(self.wire.at_peer)
                self._listen(driver)
        if driver.over or driver.joined:
            self._dialing = False
        elif self.world.now - self._lost_at > GRACE_S * S:
            self._dialing = False
            driver.lost("no broker came back")
        else:
            self.after(self._pause_s, self._dial_again)
            self._pause_s = min(_PAUSE_MAX_S, 2 * self._pause_s)

    def _ended(self, reason: str) -> None:
        self.after(1.0, lambda: self.world.worker_ended(self))

