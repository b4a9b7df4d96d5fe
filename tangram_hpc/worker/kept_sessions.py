"""What a worker tells a broker that came back about the sessions on its node.

The broker's journal knows which sessions are open, but reports that were on their way when the
broker died are lost. So the worker remembers which sandboxes it has or builds, which of them are
ready, and the last reports of ended sandboxes.

Invariant: a session is either open here or among the ends, never both. A session that moved away
and comes back to this node is only open.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..protocol.message import SandboxDown, SandboxPacked, SandboxUp

ENDS_MAX = 256  # reports of ended sandboxes that are kept


class KeptSessions:
    """The sessions of one worker, as far as a broker that came back must hear of them."""

    def __init__(self) -> None:
        # The open sessions. The value is the report that the sandbox is ready; None before.
        self._open: dict[int, SandboxUp | None] = {}
        self._ends: dict[int, SandboxDown | SandboxPacked] = {}  # by session, the oldest first

    def opening(self, session: int) -> None:
        """Notes that the sandbox of a session is to be built; a repeated order changes nothing."""
        self._ends.pop(session, None)
        self._open.setdefault(session, None)

    def up(self, report: SandboxUp) -> None:
        """Notes that the sandbox of a session is ready."""
        self._open[report.session] = report

    def ended(self, report: SandboxDown | SandboxPacked) -> None:
        """Notes that the sandbox of a session is gone."""
        self._open.pop(report.session, None)
        self._ends.pop(report.session, None)  # so that it becomes the newest
        self._ends[report.session] = report
        if len(self._ends) > ENDS_MAX:
            del self._ends[next(iter(self._ends))]

    def numbers(self) -> tuple[int, ...]:
        """Returns all sessions of which `reports` may tell: the open ones and the ended ones."""
        return (*self._open, *self._ends)

    def reports(self) -> Iterator[SandboxUp | SandboxDown | SandboxPacked]:
        """Yields the report of each sandbox that is ready, then those of the ended sandboxes in
        the order in which they ended.
        """
        yield from (report for report in self._open.values() if report is not None)
        yield from self._ends.values()
