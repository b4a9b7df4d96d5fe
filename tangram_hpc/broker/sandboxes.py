"""The part of the broker that hears of sandboxes: they stand, they are gone, or they were packed.

Law: a word about a session counts only from the node that is its home now; what an earlier home
still has to say is about a sandbox that nobody needs any more.
"""

from __future__ import annotations

from collections.abc import Callable

from ..domain import event as ev
from ..domain.states import SessionState
from ..protocol import message as ms
from ..scheduler.scheduler import Scheduler


class Sandboxes:
    """See `Broker`."""

    scheduler: Scheduler
    _now: Callable[[], int]
    _happen: Callable[..., None]

    def _of_sandbox(self, node: int,
                    word: ms.SandboxUp | ms.SandboxDown | ms.SandboxPacked) -> None:
        """A worker says what became of a session's sandbox."""
        session, now = self.scheduler.ledger.sessions.get(word.session), self._now()
        if session is None or session.node != node:
            return
        if isinstance(word, ms.SandboxUp):
            self._happen(ev.SessionReady(now, word.session))
        elif isinstance(word, ms.SandboxDown):
            self._happen(ev.SessionClosed(now, word.session, word.reason))
        elif session.state is SessionState.MOVING:
            self._happen(ev.SessionPacked(now, word.session, word.files))
        else:  # it was to be closed meanwhile
            self._happen(ev.SessionClosed(now, word.session, ""))
