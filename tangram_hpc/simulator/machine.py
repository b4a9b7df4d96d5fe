"""A modelled machine, which implements `ports.Executor` for the real worker driver.

The machine knows how long actions take, and nothing of scheduling. Sandboxes open and close in no
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..domain.outcome import Outcome
from ..domain.service import ServiceSpec, endpoint_of, service_of
from ..domain.session import SessionSpec
from ..domain.states import ActionState
from ..ports import Reports
from ..protocol.message import SnapshotOrder, SnapshotReport, StartAttempt, StreamMessage
from . import progress
from .event_queue import EventQueue
from .workload import WorkAction


class Machine:
    """The executor of one node. `work_of` returns the workload's action for an action id, and a
    resize takes `resize_ns`.
    """

    def __init__(self, event_queue: EventQueue, reports: Reports,
                 work_of: Callable[[int], WorkAction], resize_ns: int = 0) -> None:
        self._event_queue, self._reports, self._work_of = event_queue, reports, work_of
        self._resize_ns = resize_ns
        self._runs: dict[int, progress.SimulatedAttempt] = {}

    def open_session(self, spec: SessionSpec) -> None:
        """See `ports.Executor`."""
        self._reports.session_up(spec.id)

    def close_session(self, session: int) -> None:
        """See `ports.Executor`."""
        self._reports.session_down(session, "")

    def pack_session(self, session: int) -> None:
        """See `ports.Executor`."""
        self._reports.session_packed(session, "modelled")

    def order_snapshot(self, order: SnapshotOrder) -> None:
        """See `ports.Executor`. No simulated session has a snapshot."""

    def snapshot_reports(self) -> Iterable[SnapshotReport]:
        """See `ports.Executor`."""
        return ()

    def prepare_service(self, spec: ServiceSpec) -> None:
        """See `ports.Executor`."""

    def start(self, order: StartAttempt, payload: memoryview) -> None:
        """See `ports.Executor`."""
        key = order.action.key
        units = 1 if endpoint_of(key) else len(order.gpus if service_of(key) else order.cores)
        work, now = self._work_of(order.action.id), self._event_queue.now
        self._runs[order.lease] = progress.SimulatedAttempt(work, units, now, order.restore_ns)
        self._reports.started(order.lease)
        self._await(order.lease)

    def follow(self, order: StartAttempt, payload: memoryview) -> bool:
        """See `ports.Executor`."""
        return False

    def take_back(self, lease: int) -> bool:
        """See `ports.Executor`."""
        return False

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        """See `ports.Executor`."""
        if lease in self._runs:
            self._end(lease, state, reason)

    def give_input(self, lease: int, kind: int, data: bytes, number: int, other: int) -> None:
        """Ignores input: a simulated command reads none."""

    def carry(self, message: StreamMessage, data: bytes) -> None:
        """Ignores port streams: nothing listens in a simulated session."""

    def resize(self, lease: int, cores: tuple[int, ...]) -> None:
        """See `ports.Executor`."""
        if lease in self._runs:
            self._runs[lease].resize(self._event_queue.now, len(cores), self._resize_ns)
            self._await(lease)

    def close(self) -> None:
        """See `ports.Executor`."""
        self._runs.clear()

    def _await(self, lease: int) -> None:
        run = self._runs[lease]
        end_at = run.end_at
        if end_at is not None:
            self._event_queue.put(end_at, 0, lambda: self._due(lease, run, end_at))

    def _due(self, lease: int, run: progress.SimulatedAttempt, end_at: int) -> None:
        if self._runs.get(lease) is run and run.end_at == end_at:
            self._end(lease, ActionState.COMPLETED, "")

    def _end(self, lease: int, state: ActionState, reason: str) -> None:
        run = self._runs.pop(lease)
        cpu_ns = run.cpu_ns if state is ActionState.COMPLETED else 0
        outcome = Outcome(state, exec_ns=self._event_queue.now - run.start, cpu_ns=cpu_ns,
                          reason=reason, resize_ns=run.resize_ns)
        self._reports.finished(lease, outcome, b"", True)
