"""Grants of endpoints: the source from which `Endpoint` gets a slot and a token for each attempt.

A request for a grant is an action like any other: the connection keeps it until its result has
arrived, and repeats it after a reconnect. A grant is used as soon as this process's own rate limit
allows.
"""

from __future__ import annotations

import time
from typing import NoReturn

from ...domain.action import Action, Kind
from ...interrupts import CallersLock
from ...protocol import message as ms
from ..connection import Connection
from ..forked import watch_forks
from ..future import Future
from ..request import sendable, tool_of
from ..results import Pending
from .client_rate_limit import ClientRateLimit
from .grant_request import GrantRequest


class GrantSource:
    """Asks the broker for grants, for all endpoints of one client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = CallersLock()
        self._limits: dict[str, ClientRateLimit] = {}  # endpoint -> its rate limit in this process
        watch_forks(self)

    def __reduce__(self) -> NoReturn:
        self._connection.__reduce__()

    def disown(self) -> None:
        """Replaces the lock in the child of a fork: a thread of the parent may have held it."""
        self._lock = CallersLock()

    def request(self, endpoint: str, name: str, trajectory: str | int = "") -> GrantRequest:
        """Submits a request for one grant; returns at once.

        Args:
            endpoint: the endpoint's name.
            name: the action's class in accounting; empty for the endpoint's name.
            trajectory: the trajectory whose tool the call is; empty for none.

        Raises:
            TangramError: an argument is wrong, or the client was closed.
        """
        action = sendable(Action(
            self._connection.new_id(), name or endpoint, Kind.GRANT, key=f"endpoint:{endpoint}",
            trajectory=tool_of(trajectory)))
        lock = self._connection._lock
        future = Future(action.id, self._connection.cancel, lock=lock)
        grant_request = GrantRequest(future, self._connection.send,
                                     lambda grant: self._delay_s(endpoint, grant), lock)
        self._connection.submit_grant(
            Pending(action, b"", future, False, time.monotonic_ns(), grant_request=grant_request))
        return grant_request

    def _delay_s(self, endpoint: str, grant: ms.Granted) -> float | None:
        """Seconds until the call may start; None if the grant came too late to be used."""
        with self._lock:
            now = time.monotonic_ns()
            limit = self._limits.setdefault(endpoint, ClientRateLimit())
            start = limit.start_at(now, grant.rate_micro, grant.burst_micro)
        return None if start < 0 else (start - now) / 1e9
