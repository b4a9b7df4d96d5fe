"""Pure. What the ledger keeps of sessions that are idle and of clients that are away.

When these end is decided in `scheduler/policy/session_life.py`; here is only the state that those
decisions read, and that the ledger's handlers change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class DisconnectedClient(NamedTuple):
    """A client that is away.

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
    """The idle deadlines of sessions, grouped by how long a session may be idle (its patience, in
    ns). Within a group the sessions are ordered by the start of their idleness, so that the next
    deadline costs O(different patiences)."""

    _rests: dict[int, dict[int, int]] = field(default_factory=dict)  # patience -> session -> since

    def start(self, session: int, patience_ns: int, now: int) -> None:
        """Starts a session's idleness now, or starts it again when the session was renewed."""
        if patience_ns:
            group = self._rests.setdefault(patience_ns, {})
            group.pop(session, None)
            group[session] = now

    def stop(self, session: int, patience_ns: int) -> None:
        """Ends a session's idleness."""
        group = self._rests.get(patience_ns)
        if group is not None and group.pop(session, None) is not None and not group:
            del self._rests[patience_ns]

    def holds(self, session: int, patience_ns: int) -> bool:
        """Whether a session is idle."""
        return session in self._rests.get(patience_ns, ())

    def stalled(self, moved_ns: int, now: int) -> None:
        """Moves the start of each session's idleness `moved_ns` later, but not later than `now`.
        The order within a group stays as it is. O(idle sessions)."""
        for group in self._rests.values():
            for session, since in group.items():
                group[session] = max(since, min(since + moved_ns, now))

    def next_end(self) -> int:
        """When the next session has been idle for too long; 0 for never."""
        return min((next(iter(group.values())) + patience_ns
                    for patience_ns, group in self._rests.items()), default=0)

    def due(self, now: int) -> Iterator[tuple[int, int]]:
        """Yields (session, patience) of each session that has been idle for too long."""
        for patience_ns, group in self._rests.items():
            for session, since in group.items():
                if since + patience_ns > now:
                    break
                yield session, patience_ns
