"""What a worker tells a broker that came back about the sessions on its node.

The broker's journal knows which sessions are open, but reports that were on their way when the
broker died are lost. So the worker remembers which sandboxes it has or builds, which of them are
ready, and the last reports of ended sandboxes.

Invariants: a session is either open here or among the ends, never both. A session that moved away
and comes back to this node is only open. A session has one sandbox here: one that is requested
again while its sandbox is being closed waits until that is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..domain.session import SessionSpec
from ..protocol.message import SandboxDown, SandboxPacked, SandboxUp

ENDS_MAX = 256  # reports of ended sandboxes that are kept


@dataclass
class ReopenedSession:
    """A session that is requested again while its earlier sandbox is being closed.

    Attributes:
        spec: what it is to be.
        closed: whether it was ordered to be closed meanwhile. That, too, must be reported.
    """

    spec: SessionSpec
    closed: bool = False


class KeptSessions:
    """The sessions of one worker, as far as a broker that came back must hear of them."""

    def __init__(self) -> None:
        # The open sessions. The value is the report that the sandbox is ready; None before.
        self._open: dict[int, SandboxUp | None] = {}
        self._ends: dict[int, SandboxDown | SandboxPacked] = {}  # by session, the oldest first
        # the sessions whose sandbox is being closed, and what is to follow
        self._closing: dict[int, ReopenedSession | None] = {}

    def opening(self, spec: SessionSpec) -> bool:
        """Notes that the sandbox of a session is to be built; a repeated order changes nothing.

        Returns:
            Whether to build it now. If not, `reopened` tells when.
        """
        if spec.id in self._closing:
            self._closing[spec.id] = ReopenedSession(spec)
            return False
        self._ends.pop(spec.id, None)
        self._open.setdefault(spec.id, None)
        return True

    def closing(self, session: int) -> None:
        """Notes that the sandbox of a session is being closed."""
        if (again := self._closing.get(session)) is not None:
            again.closed = True
        elif session in self._open:
            self._closing[session] = None

    def reopened(self, session: int) -> ReopenedSession | None:
        """Returns what is to be opened, now that the sandbox of the session is gone."""
        return self._closing.pop(session, None)

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
        """Yields the report of each sandbox that is ready and stays, then those of the ended
        sandboxes in the order in which they ended.
        """
        yield from (report for session, report in self._open.items()
                    if report is not None and session not in self._closing)
        yield from self._ends.values()
