"""Sends each order to the part of a node that carries it out: its sandboxes or its services.

An action that is lent GPUs and is no call of a service starts when the services have freed the
memory of these GPUs, as the scheduler expects of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..domain.action import Kind
from ..domain.outcome import Outcome
from ..domain.service import ServiceSpec
from ..domain.session import SessionSpec
from ..domain.states import ActionState
from ..ports import Reports, Sandboxes
from ..protocol.message import SnapshotOrder, SnapshotReport, StartAttempt, StreamMessage
from ..services.processes.service_executor import ServiceExecutor
from ..unawaited import raise_failure


@dataclass
class _DelayedStart:
    """An action whose GPUs are being freed.

    Attributes:
        session: the action's session; 0 for none.
        later: the orders about the action that came in the meantime.
    """

    session: int
    later: list[Callable[[], None]] = field(default_factory=list)


class NodeExecutor:
    """The executor of a node (serves `ports.Executor`, which documents the methods).

    Args:
        sandboxes: runs actions that are code.
        services: runs calls of services.
        reports: the worker, which is told of outcomes.
    """

    def __init__(self, sandboxes: Sandboxes, services: ServiceExecutor, reports: Reports) -> None:
        self._sandboxes, self._services, self._reports = sandboxes, services, reports
        self._delayed: dict[int, _DelayedStart] = {}  # by lease
        self._freeing: set[asyncio.Task[None]] = set()

    def open_session(self, spec: SessionSpec) -> None:
        """Opens a session; see `ports.Executor`."""
        self._sandboxes.open_session(spec)

    def close_session(self, session: int) -> None:
        """Closes a session; see `ports.Executor`."""
        for lease in [n for n, each in self._delayed.items() if each.session == session]:
            self.kill(lease, ActionState.CANCELLED, "its session was closed")
        self._sandboxes.close_session(session)

    def pack_session(self, session: int) -> None:
        """Packs a session; see `ports.Executor`."""
        self._sandboxes.pack_session(session)

    def order_snapshot(self, order: SnapshotOrder) -> None:
        """Carries out an order about a snapshot; see `ports.Executor`."""
        self._sandboxes.order_snapshot(order)

    def snapshot_reports(self) -> Iterable[SnapshotReport]:
        """Returns the reports of all snapshots; see `ports.Executor`."""
        return self._sandboxes.snapshot_reports()

    def prepare_service(self, spec: ServiceSpec) -> None:
        """Prepares a service; see `ports.Executor`."""
        self._services.prepare(spec)

    def start(self, order: StartAttempt, payload: memoryview) -> None:
        """Starts an action; see `ports.Executor`."""
        if order.action.kind is Kind.CALL:
            self._services.start(order, payload)
        elif order.lease in self._delayed:
            return  # the order came twice
        elif self._services.occupies(order.gpus):
            self._delayed[order.lease] = _DelayedStart(order.action.session)
            task = asyncio.ensure_future(self._start_later(order, bytes(payload)))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)
            task.add_done_callback(raise_failure)
        else:
            self._sandboxes.start(order, payload)

    async def _start_later(self, order: StartAttempt, payload: bytes) -> None:
        try:
            await self._services.vacate(order.gpus)
        finally:  # whatever happens to the copies there, the action must end in its own way
            delayed = self._delayed.pop(order.lease, None)
            if delayed is not None:
                self._sandboxes.start(order, memoryview(payload))
                for each in delayed.later:
                    each()

    def _give_up(self, lease: int) -> bool:
        """Forgets an action whose start is delayed; returns whether there is one. Its GPUs are
        freed all the same, since a copy must not be interrupted while it is parked.
        """
        return self._delayed.pop(lease, None) is not None

    def follow(self, order: StartAttempt, payload: memoryview) -> bool:
        """Takes a prefetched action; see `ports.Executor`. A call is handed over at once, because
        its service has a queue of its own.
        """
        if order.action.kind is Kind.CALL:
            self._services.start(order, payload)
            return True
        return self._sandboxes.follow(order, payload)

    def take_back(self, lease: int) -> bool:
        """Gives up a prefetched lease; see `ports.Executor`."""
        if lease in self._services:
            return self._services.take_back(lease)
        if self._give_up(lease):
            return True
        return self._sandboxes.take_back(lease)

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        """Ends what runs under a lease; see `ports.Executor`."""
        if lease in self._services:
            self._services.kill(lease, state, reason)
        elif self._give_up(lease):
            self._reports.finished(lease, Outcome(state, reason=reason), None, True)
        else:
            self._sandboxes.kill(lease, state, reason)

    def give_input(self, lease: int, kind: int, data: bytes, number: int, other: int) -> None:
        """Gives input to a command; calls of services take none."""
        self._once_started(lease, lambda: self._sandboxes.give_input(lease, kind, data, number,
                                                                     other))

    def carry(self, message: StreamMessage, data: bytes) -> None:
        """Passes a port stream on; only sessions have ports."""
        self._sandboxes.carry(message, data)

    def resize(self, lease: int, cores: tuple[int, ...]) -> None:
        """Moves an action to other cores; the GPUs of a call stay what they are."""
        self._once_started(lease, lambda: self._sandboxes.resize(lease, cores))

    def _once_started(self, lease: int, do: Callable[[], None]) -> None:
        if lease in self._delayed:
            self._delayed[lease].later.append(do)
        else:
            do()

    def close(self) -> None:
        """Ends sandboxes at once and begins to end services; await `closed` for the services."""
        for lease in list(self._delayed):
            self.kill(lease, ActionState.CANCELLED, "its worker was closed")
        self._services.close()
        self._sandboxes.close()

    async def closed(self) -> None:
        """Waits until nothing of the services is left."""
        await self._services.closed()
        await asyncio.gather(*self._freeing, return_exceptions=True)
