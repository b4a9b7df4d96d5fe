"""Pure. When idle sessions end, and which clients are disconnected.

This module holds only the state, which the handlers change. `scheduler/policy/session_life.py`
reads the state and decides when sessions and clients end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class DisconnectedClient(NamedTuple):
    """A client without a connection.

    Attributes:
        since: when its connection was lost, in ns since the epoch.
        until: when its sessions that have no grace of their own end, in ns since the epoch.
        bye: whether it said goodbye; then all of its sessions end.
    """

    since: int
    until: int
    bye: bool


@dataclass(slots=True)
class IdleDeadlines:
    """The deadlines of idle sessions.

    Sessions are grouped by timeout: how long a session may be idle, in ns. Within a group they are
    ordered by the start of their idleness, so that finding the next deadline costs O(different
    timeouts).
    """

    _groups: dict[int, dict[int, int]] = field(default_factory=dict)  # timeout -> session -> since

    def start(self, session: int, timeout_ns: int, now: int) -> None:
        """Starts a session's idleness now, or starts it again when the session was renewed. A
        session with timeout 0 may be idle for ever and has no deadline.
        """
        if timeout_ns:
            group = self._groups.setdefault(timeout_ns, {})
            group.pop(session, None)
            group[session] = now

    def stop(self, session: int, timeout_ns: int) -> None:
        """Ends a session's idleness."""
        group = self._groups.get(timeout_ns)
        if group is not None and group.pop(session, None) is not None and not group:
            del self._groups[timeout_ns]

    def holds(self, session: int, timeout_ns: int) -> bool:
        """Whether a session is idle."""
        return session in self._groups.get(timeout_ns, ())

    def stalled(self, moved_ns: int, now: int) -> None:
        """Moves the start of each session's idleness `moved_ns` later, but not later than `now`.
        The order within a group stays as it is. O(idle sessions)."""
        for group in self._groups.values():
            for session, since in group.items():
                group[session] = max(since, min(since + moved_ns, now))

    def next_end(self) -> int:
        """When the next session has been idle for too long; 0 for never."""
        return min((next(iter(group.values())) + timeout_ns
                    for timeout_ns, group in self._groups.items()), default=0)

    def due(self, now: int) -> Iterator[tuple[int, int]]:
        """Yields (session, timeout) of each session that has been idle for too long."""
        for timeout_ns, group in self._groups.items():
            for session, since in group.items():
                if since + timeout_ns > now:
                    break
                yield session, timeout_ns
