"""Pure. Who may use a session, who may close it, and who may attach to it.

The client that opened a session may do everything with it. Another client may use it while it is
attached. It attaches with the session's name and a token; see `domain.session_token` for the two
tokens of a session and what each allows.

Invariant: whoever does not know a token learns nothing. The answer to a wrong token is that to a
name that does not exist, and it costs the same computation: one hash and two comparisons whose time
does not depend on the token.
"""

from __future__ import annotations

from typing import NamedTuple

from ...domain.ids import client_of, show
from ...domain.rollouts import NAME_MAX
from ...domain.session import SessionSpec
from ...domain.session_token import hash_of, same
from ..state.ledger import Ledger, SessionEntry
from .session_life import OPEN_SESSION

_NOBODY = hash_of("")  # compared where no session has the name; no token has this hash
_WRONG = ("attach: this job has no shared session with this name and token; take both from "
          "`session.handle()` of the session, in the same job")


class AttachDecision(NamedTuple):
    """Whether a client may attach.

    Attributes:
        session: the session; None if the client may not attach.
        may_close: whether its token lets it close the session and hold it.
        why: why it may not, in one line; empty if it may.
        ended: whether the reason is that the session has ended.
    """

    session: SessionEntry | None
    may_close: bool = False
    why: str = ""
    ended: bool = False


def may_use(client: int, session: SessionEntry) -> bool:
    """Returns whether this client may submit to a session, fork it and renew it."""
    return client_of(session.spec.id) == client or client in session.attached


def may_close(client: int, session: SessionEntry) -> bool:
    """Returns whether this client may close a session."""
    held = session.attached.get(client)
    return client_of(session.spec.id) == client or (held is not None and held.may_close)


def attach_decision(ledger: Ledger, name: str, token: str, hold: bool) -> AttachDecision:
    """Decides whether the holder of this token may attach to the session with this name.

    Args:
        ledger: the scheduler's state.
        name: the name of the session, as the client gave it.
        token: the token, as the client gave it.
        hold: whether the client wants to hold the session open beyond its own client's end.
    """
    given = hash_of(token)
    session = ledger.sessions.get(ledger.shared.get(name, 0))
    spec = session.spec if session is not None else None
    attaches = same(given, spec.attach_hash if spec is not None else _NOBODY)
    closes = same(given, spec.close_hash if spec is not None else _NOBODY)
    ended = ledger.ended_shares.get(given, "")
    if session is None or not (attaches or closes):
        return AttachDecision(None, why=f"attach: {ended}" if ended else _WRONG, ended=bool(ended))
    if session.state not in OPEN_SESSION:
        why = f"attach: session {show(session.spec.id)} ended: {session.closing or 'it was closed'}"
        return AttachDecision(None, why=why, ended=True)
    if hold and not closes:
        return AttachDecision(None, why="hold: this handle gives no right over the session's life; "
                                        "take session.handle(may_close=True)")
    return AttachDecision(session, closes)


def refusal_of_sharing(ledger: Ledger, spec: SessionSpec) -> str:
    """Why a session cannot be shared, or live, as this specification says; empty if it can."""
    if spec.ttl_ns < 0:
        return "ttl_s: it must not be negative"
    if bool(spec.attach_hash) != bool(spec.close_hash):
        return "shared: a shared session has two tokens"
    if spec.outlives and not spec.shared:
        return "outlives: nobody else could reach the session; open it with shared=True too"
    # a session is not idle while its background processes run
    if spec.outlives and not (spec.ttl_ns or (spec.idle_ns and spec.background != "run")):
        return ("outlives: nothing would ever end the session; give ttl_s or idle_s with it, and "
                'ttl_s with background="run"')
    if not spec.shared:
        return ""
    if not 0 < len(spec.name.encode("utf-8", "surrogatepass")) <= NAME_MAX:
        return f"name: a shared session has one of 1 to {NAME_MAX} bytes"
    if spec.name in ledger.shared:
        return (f"name: {spec.name!r} is taken by session {show(ledger.shared[spec.name])} of this "
                "job; choose another name, or leave it out")
    return ""
