"""Owns: which part of a node carries an order out, its sandboxes or its services. Nothing else."""

from __future__ import annotations

from ..domain.action import Kind
from ..domain.service import ServiceSpec
from ..domain.session import SessionSpec
from ..domain.states import ActionState
from ..ports import Sandboxes
from ..protocol.message import StartAttempt
from ..services.processes.service_executor import ServiceExecutor


class NodeExecutor:
    """See `ports.Executor`. Args: its sandboxes, and its services."""

    def __init__(self, sandboxes: Sandboxes, services: ServiceExecutor) -> None:
        self._sandboxes, self._services = sandboxes, services

    def open_session(self, spec: SessionSpec) -> None:
        """See `ports.Executor`."""
        self._sandboxes.open_session(spec)

    def close_session(self, session: int) -> None:
        """See `ports.Executor`."""
        self._sandboxes.close_session(session)

    def pack_session(self, session: int) -> None:
        """See `ports.Executor`."""
        self._sandboxes.pack_session(session)

    def prepare_service(self, spec: ServiceSpec) -> None:
        """See `ports.Executor`."""
        self._services.prepare(spec)

    def start(self, order: StartAttempt, payload: memoryview) -> None:
        """See `ports.Executor`."""
        if order.action.kind is Kind.CALL:
            self._services.start(order, payload)
        else:
            self._sandboxes.start(order, payload)

    def follow(self, order: StartAttempt, payload: memoryview) -> bool:
        """See `ports.Executor`. A call's service knows by itself when its turn comes."""
        if order.action.kind is Kind.CALL:
            self._services.start(order, payload)
            return True
        return self._sandboxes.follow(order, payload)

    def take_back(self, lease: int) -> bool:
        """See `ports.Executor`."""
        if lease in self._services:
            return self._services.take_back(lease)
        return self._sandboxes.take_back(lease)

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        """See `ports.Executor`."""
        if lease in self._services:
            self._services.kill(lease, state, reason)
        else:
            self._sandboxes.kill(lease, state, reason)

    def resize(self, lease: int, cores: tuple[int, ...]) -> None:
        """See `ports.Executor`. A call's GPUs stay what they are."""
        self._sandboxes.resize(lease, cores)

    def close(self) -> None:
        """See `ports.Executor`. Services are waited for with `closed`."""
        self._services.close()
        self._sandboxes.close()

    async def closed(self) -> None:
        """Returns when nothing of its services is left."""
        await self._services.closed()
