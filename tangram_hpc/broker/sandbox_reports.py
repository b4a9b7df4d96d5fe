"""Pure. Decides what follows from a worker's report about a session's sandbox.

A report counts only if it comes from the node that is the session's home now. After a migration the
earlier home may still report about a sandbox that is not needed any more; such a report is ignored.
So is a report about a sandbox of an earlier broker that was closed because nobody knew its session.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..domain import event as ev
from ..domain.states import SessionState
from ..protocol import message as ms
from ..scheduler.policy.background import wanted
from ..scheduler.state.ledger import Ledger

SandboxReport = ms.SandboxUp | ms.SandboxDown | ms.SandboxPacked | ms.BackgroundWants


def event_of_report(ledger: Ledger, node: int, report: SandboxReport, now: int
                    ) -> ev.Event | None:
    """Returns the event to record, or None if the report is to be ignored.

    Args:
        node: number of the node whose worker reports.
        now: the broker's time in epoch ns.
    """
    session = ledger.sessions.get(report.session)
    if session is None or session.node != node:
        return None
    if isinstance(report, ms.BackgroundWants):
        return wanted(ledger, session, now)
    if isinstance(report, ms.SandboxUp):
        return ev.SessionReady(now, report.session, report.image)
    if isinstance(report, ms.SandboxDown):
        return ev.SessionClosed(now, report.session, report.reason, report.infeasible)
    if session.state is SessionState.MOVING:
        return ev.SessionPacked(now, report.session, report.files)
    # The session was closed while its files were packed.
    return ev.SessionClosed(now, report.session, "")


class DisownedSandboxes:
    """The sandboxes that this broker has ordered to be closed because it did not know their
    sessions, which happens when the machine of the broker before it has failed.

    A client may request such a session again, and it may come to the same node. There the earlier
    sandbox ends first, so all reports about the session until then are about that sandbox.
    """

    def __init__(self) -> None:
        self._closing: set[tuple[int, int]] = set()  # node and session

    def add(self, node: int, sessions: Iterable[int]) -> None:
        """Notes sessions whose sandboxes on a node are unknown and were ordered to be closed."""
        self._closing.update((node, session) for session in sessions)

    def concerns(self, node: int, report: SandboxReport) -> bool:
        """Returns whether a report is about such a sandbox, and forgets the sandbox at its end."""
        about = node, report.session
        if about not in self._closing:
            return False
        if isinstance(report, (ms.SandboxDown, ms.SandboxPacked)):
            self._closing.remove(about)
        return True
