"""Sends each order to the part of a node that carries it out: its sandboxes or its services."""

from __future__ import annotations

from collections.abc import Iterable

from ..domain.action import Kind
from ..domain.service import ServiceSpec
from ..domain.session import SessionSpec
from ..domain.states import ActionState
from ..ports import Sandboxes
from ..protocol.message import SnapshotOrder, SnapshotReport, StartAttempt, StreamMessage
from ..services.processes.service_executor import ServiceExecutor


class NodeExecutor:
    """The executor of a node (serves `ports.Executor`, which documents the methods).

    Args:
        sandboxes: runs actions that are code.
        services: runs calls of services.
    """

    def __init__(self, sandboxes: Sandboxes, services: ServiceExecutor) -> None:
        self._sandboxes, self._services = sandboxes, services

    def open_session(self, spec: SessionSpec) -> None:
        """Opens a session; see `ports.Executor`."""
        self._sandboxes.open_session(spec)

    def close_session(self, session: int) -> None:
        """Closes a session; see `ports.Executor`."""
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
        else:
            self._sandboxes.start(order, payload)

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
        return self._sandboxes.take_back(lease)

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        """Ends what runs under a lease; see `ports.Executor`."""
        if lease in self._services:
            self._services.kill(lease, state, reason)
        else:
            self._sandboxes.kill(lease, state, reason)

    def give_input(self, lease: int, kind: int, data: bytes, number: int, other: int) -> None:
        """Gives input to a command; calls of services take none."""
        self._sandboxes.give_input(lease, kind, data, number, other)

    def carry(self, message: StreamMessage, data: bytes) -> None:
        """Passes a port stream on; only sessions have ports."""
        self._sandboxes.carry(message, data)

    def resize(self, lease: int, cores: tuple[int, ...]) -> None:
        """Moves an action to other cores; the GPUs of a call stay what they are."""
        self._sandboxes.resize(lease, cores)

    def close(self) -> None:
        """Ends sandboxes at once and begins to end services; await `closed` for the services."""
        self._services.close()
        self._sandboxes.close()

    async def closed(self) -> None:
        """Waits until nothing of the services is left."""
        await self._services.closed()
