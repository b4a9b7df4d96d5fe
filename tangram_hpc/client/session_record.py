"""What a client remembers of one of its sessions, from the request until its end is known.

The connection keeps one record for each session and asks for the session again after a reconnect;
`Session` is the user's view of the same record. The record knows neither of the two.

The connection's thread changes a record; any thread may read it. Nothing here sends a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

from ..domain.session import SessionSpec, why_ended
from ..errors import InfeasibleRequest, SessionLost, TangramError
from ..interrupts import CallersLock, PlainFuture, check_wait
from ..protocol import message as ms
from .forked import end_copy
from .future import check_python_runs

_T = TypeVar("_T")


class SessionFuture(PlainFuture[_T]):
    """A `concurrent.futures.Future` of what happens to a session; it can be awaited.

    Whoever gives up waiting, such as `asyncio.wait_for`, cancels the awaited future. This one stays
    as it is then, because others may wait for it and the session is still requested.
    """

    def cancel(self) -> bool:
        """Returns False: a session is ended by `Session.close`."""
        return False

    def result(self, timeout: float | None = None) -> _T:
        """As in the base class, but it raises `ClientClosed` rather than wait while Python ends."""
        if not self.done():
            check_python_runs()
        return super().result(timeout)

    def __await__(self) -> Generator[None, None, _T]:
        check_wait(self, self._lock, None)
        return asyncio.wrap_future(self).__await__()


class SessionRecord:
    """The state of one session.

    Attributes:
        spec: what was requested, with the session's id.
        env: environment variables for all commands of the session.
        trajectory: the trajectory whose tools run in the session; empty for none.
        node: the node that the session is on; empty before its admission, another one after a move.
        wait_s: seconds between request and admission; 0.0 before the admission.
        why_ended: one line that says why the session ended; empty while it has not.
        image_digest: the digest of its image; empty before its admission, and for none.
        opened: ends when the broker admits the session; raises if it never will.
        closed: ends with the reason when the session has ended and its memory is free.
        owned: whether this client opened the session; otherwise it is attached to it.
        token: the token that this client holds: the close token if `may_close`, else the attach
            token; empty for a session that is not shared.
        may_close: whether this client may close the session.
        hold: whether this client holds the session open beyond its own client's end.
        attachments: how many `Session` objects of this process are attached to it.
    """

    __slots__ = ("attachments", "closed", "env", "hold", "image_digest", "may_close", "node",
                 "opened", "owned", "spec", "token", "trajectory", "wait_s", "why_ended")

    def __init__(self, lock: CallersLock, spec: SessionSpec, env: dict[str, str], trajectory: str,
                 token: str = "", owned: bool = True, may_close: bool = True) -> None:
        self.spec, self.env, self.trajectory = spec, env, trajectory
        self.token, self.owned, self.may_close = token, owned, may_close
        self.hold, self.attachments = False, 0
        self.node, self.why_ended, self.wait_s, self.image_digest = "", "", 0.0, ""
        self.opened: SessionFuture[None] = SessionFuture(lock)
        self.closed: SessionFuture[str] = SessionFuture(lock)

    def on_up(self, message: ms.SessionUp) -> None:
        """Records that the session was admitted, or that it moved to another node."""
        self.node, self.image_digest = message.node, message.image
        if not self.opened.done():
            self.wait_s = message.wait_ns / 1e9
            self.opened.set_result(None)

    def on_down(self, reason: str, infeasible: bool = False, error: TangramError | None = None
                ) -> None:
        """Records that the session has ended.

        Args:
            reason: the broker's reason, in one line.
            infeasible: whether the session can never be admitted, so that `opened` raises
                InfeasibleRequest instead of SessionLost.
            error: the error that a pending `opened` raises if the client failed, not the session.
        """
        self.why_ended = why_ended(self.spec.id, reason)
        if not self.opened.done():
            own = InfeasibleRequest(reason) if infeasible else SessionLost(self.why_ended)
            self.opened.set_exception(error or own)
        if not self.closed.done():
            self.closed.set_result(reason)

    def disown(self, error: TangramError) -> None:
        """Ends both futures in the child of a fork; the session is the parent's."""
        end_copy(self.opened, error)
        end_copy(self.closed, error)
