"""Pure. When idle sessions and sessions with a time-to-live end; which clients are disconnected.

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
        earliest: nothing of it ends before, in ns since the epoch.
    """

    since: int
    until: int
    bye: bool
    earliest: int


@dataclass(slots=True)
class SessionTimeouts:
    """The deadlines of sessions whose time runs: their idle time, or their time-to-live.

    Sessions are grouped by timeout: how long a session may be idle, or may live, in ns. Within a
    group they are ordered by when their time began, so that finding the next deadline costs
    O(different timeouts).

    Attributes:
        groups: when each session's time began, by timeout and session. It is empty if no session's
            time runs. Only the methods here change it.
    """

    groups: dict[int, dict[int, int]] = field(default_factory=dict)

    def start(self, session: int, timeout_ns: int, now: int) -> None:
        """Starts a session's time now, or starts it again. A session with timeout 0 has no
        deadline and is not kept here.
        """
        if timeout_ns:
            group = self.groups.setdefault(timeout_ns, {})
            group.pop(session, None)
            group[session] = now

    def stop(self, session: int, timeout_ns: int) -> None:
        """Forgets a session: its time does not run any more."""
        group = self.groups.get(timeout_ns)
        if group is not None and group.pop(session, None) is not None and not group:
            del self.groups[timeout_ns]

    def holds(self, session: int, timeout_ns: int) -> bool:
        """Whether a session's time runs."""
        return session in self.groups.get(timeout_ns, ())

    def stalled(self, moved_ns: int, now: int) -> None:
        """Moves the start of each session's time `moved_ns` later, but not later than `now`. The
        order within a group stays as it is. O(sessions)."""
        for group in self.groups.values():
            for session, since in group.items():
                group[session] = max(since, min(since + moved_ns, now))

    def next_end(self) -> int:
        """When the time of the next session is over, in ns since the epoch; 0 for never."""
        return min((next(iter(group.values())) + timeout_ns
                    for timeout_ns, group in self.groups.items()), default=0)

    def due(self, now: int) -> Iterator[tuple[int, int]]:
        """Yields (session, timeout) of each session whose time is over."""
        for timeout_ns, group in self.groups.items():
            for session, since in group.items():
                if since + timeout_ns > now:
                    break
                yield session, timeout_ns
