"""Pure. Handlers of events about clients that attach to shared sessions of other clients.

An attachment lets a client use a session. It ends when the client detaches or is gone, or when the
session ends. A client that is disconnected for less than its grace keeps its attachments.

Invariant: `SessionEntry.attached` and `ClientEntry.attached` say the same, and name no session that
has closed and no client that has expired.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.decision import Decision
from ...domain.session import why_ended
from ..state.ledger import Attachment, ClientEntry, Ledger, SessionEntry
from ..state.scheduler_state import SchedulerState

ENDED_MAX = 4096  # tokens of ended sessions that are remembered, to tell their holders the reason


def on_session_attached(state: SchedulerState, event: ev.SessionAttached) -> list[Decision]:
    """Lets a client use a shared session, or changes what it may do there."""
    ledger = state.ledger
    session = ledger.sessions[event.session]
    session.attached[event.client] = Attachment(event.may_close, event.hold)
    ledger.clients[event.client].attached[event.session] = None
    return []


def on_session_detached(state: SchedulerState, event: ev.SessionDetached) -> list[Decision]:
    """Ends an attachment. Whether that also ends the session is decided at the next plan."""
    ledger = state.ledger
    session = ledger.sessions.get(event.session)
    if session is not None and session.attached.pop(event.client, None) is not None:
        del ledger.clients[event.client].attached[event.session]
    return []


def leave_sessions(ledger: Ledger, expired: ClientEntry) -> None:
    """Ends the attachments of an expired client, and notes which of its sessions others hold."""
    for number in expired.attached:
        del ledger.sessions[number].attached[expired.client]
    expired.attached.clear()
    for number in expired.sessions:
        if not ledger.sessions[number].spec.outlives:
            ledger.ownerless[number] = None


def end_sharing(ledger: Ledger, session: SessionEntry, reason: str) -> None:
    """Ends all attachments of a session that has closed, and remembers why it ended."""
    number, spec = session.spec.id, session.spec
    for client in session.attached:
        del ledger.clients[client].attached[number]
    ledger.ownerless.pop(number, None)
    if not spec.shared:
        return
    del ledger.shared[spec.name]
    why = why_ended(number, reason)
    for token_hash in (spec.attach_hash, spec.close_hash):
        ledger.ended_shares[token_hash] = why
    while len(ledger.ended_shares) > ENDED_MAX:
        del ledger.ended_shares[next(iter(ledger.ended_shares))]
