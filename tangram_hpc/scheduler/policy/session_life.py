"""Pure. When what is open ends by itself: idle sessions, and what clients that are away left open.

Law: reads the ledger; each end is an event for the driver to journal and hand back. A sandbox never
dies under its reward: as long as an action of it waits or runs, neither idleness nor its client's
loss closes it, and the client is not forgotten before. Only a client that said goodbye ends all.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...domain import event as ev
from ...domain.states import SessionState
from ..state.idle import DisconnectedClient
from ..state.ledger import Ledger, SessionEntry

OPEN_SESSION = (SessionState.WAITING, SessionState.OPENING, SessionState.IDLE, SessionState.BUSY,
                SessionState.MOVING)
_WENT = "its client went away"


def expired(ledger: Ledger, now: int) -> list[ev.Event]:
    """What ends now by itself. A client is forgotten in the pass after its last session's end.
    O(sessions of clients that are away + what ends)."""
    events: list[ev.Event] = [
        ev.SessionClosing(now, session, f"idle for {patience_ns / 1e9:g} s")
        for session, patience_ns in ledger.idle_deadlines.due(now)]
    closing = {event.session for event in events if isinstance(event, ev.SessionClosing)}
    for client, away in ledger.disconnected.items():
        entry, open_left = ledger.clients[client], False
        for session in open_of(ledger, client):
            due = _due(away, session)
            open_left = True
            if 0 < due <= now and session.spec.id not in closing:
                events.append(ev.SessionClosing(now, session.spec.id, _WENT))
        if away.until <= now:
            events += [ev.ActionCancelled(now, action, _WENT) for action in entry.sessionless]
            if not open_left and not entry.sessionless:
                events.append(ev.ClientExpired(now, client))
    return events


def stalled(ledger: Ledger, event: ev.BrokerStalled) -> None:
    """The broker did not run for a while: what a client could not say to it in that time ends
    neither the client's grace nor a session's rest. O(clients that are away + sessions that rest).
    """
    for client, away in ledger.disconnected.items():
        if not away.bye:
            moved_ns = max(0, min(event.moved_ns, event.at - away.since))
            ledger.disconnected[client] = DisconnectedClient(
                away.since + moved_ns, away.until + moved_ns, away.bye)
    ledger.idle_deadlines.stalled(event.moved_ns, event.at)


def next_expiry(ledger: Ledger) -> int:
    """When something ends by itself (epoch ns), if nothing happens before; 0 for never."""
    ends = [end] if (end := ledger.idle_deadlines.next_end()) else []
    for client, away in ledger.disconnected.items():
        dues = [_due(away, session) for session in open_of(ledger, client)]
        ends += [due for due in dues if due]
        if ledger.clients[client].sessionless or not dues:
            ends.append(away.until)
    return min(ends, default=0)


def open_of(ledger: Ledger, client: int) -> Iterator[SessionEntry]:
    """A client's sessions that are not closing."""
    for session in ledger.clients[client].sessions:
        entry = ledger.sessions[session]
        if entry.state in OPEN_SESSION:
            yield entry


def _due(away: DisconnectedClient, session: SessionEntry) -> int:
    """When a session of a client that is away ends; 0 as long as it works."""
    if not away.bye and session.works:
        return 0
    own = session.spec.grace_ns
    return away.until if away.bye or own < 0 else away.since + own
