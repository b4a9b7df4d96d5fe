"""Pure. When sessions end by themselves: idle ones, and those of disconnected clients.

The functions here read the ledger; each end that they name is an event for the driver to journal
and to hand back. Invariant: as long as an action of a session waits or runs, neither idleness nor
its client's disconnection closes it, so that an action such as a reward computation never loses its
sandbox; and the client is not forgotten before. Only a client that said goodbye ends all at once.
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
    """The ends that are due now: of sessions, of actions outside sessions, and of clients.

    A client is forgotten in the pass after the end of its last session. O(sessions of disconnected
    clients + what ends).
    """
    events: list[ev.Event] = [
        ev.SessionClosing(now, session, f"idle for {timeout_ns / 1e9:g} s")
        for session, timeout_ns in ledger.idle_deadlines.due(now)]
    closing = {event.session for event in events if isinstance(event, ev.SessionClosing)}
    for client, gone in ledger.disconnected.items():
        entry, open_left = ledger.clients[client], False
        for session in open_of(ledger, client):
            due = _due(gone, session)
            open_left = True
            if 0 < due <= now and session.spec.id not in closing:
                events.append(ev.SessionClosing(now, session.spec.id, _WENT))
        if gone.until <= now:
            events += [ev.ActionCancelled(now, action, _WENT) for action in entry.sessionless]
            if not open_left and not entry.sessionless:
                events.append(ev.ClientExpired(now, client))
    return events


def stalled(ledger: Ledger, event: ev.BrokerStalled) -> None:
    """Extends the grace of clients and the idle time of sessions by how long the broker did not
    run, since no client could reach it in that time. O(disconnected clients + idle sessions).
    """
    for client, gone in ledger.disconnected.items():
        if not gone.bye:
            moved_ns = max(0, min(event.moved_ns, event.at - gone.since))
            ledger.disconnected[client] = DisconnectedClient(
                gone.since + moved_ns, gone.until + moved_ns, gone.bye)
    ledger.idle_deadlines.stalled(event.moved_ns, event.at)


def next_expiry(ledger: Ledger) -> int:
    """Returns when the next session or client expires, in epoch ns; 0 for never."""
    ends = [end] if (end := ledger.idle_deadlines.next_end()) else []
    for client, gone in ledger.disconnected.items():
        dues = [_due(gone, session) for session in open_of(ledger, client)]
        ends += [due for due in dues if due]
        if ledger.clients[client].sessionless or not dues:
            ends.append(gone.until)
    return min(ends, default=0)


def open_of(ledger: Ledger, client: int) -> Iterator[SessionEntry]:
    """Yields a client's sessions that are not closing."""
    for session in ledger.clients[client].sessions:
        entry = ledger.sessions[session]
        if entry.state in OPEN_SESSION:
            yield entry


def _due(gone: DisconnectedClient, session: SessionEntry) -> int:
    """When a session of a disconnected client ends, epoch ns; 0 as long as it has work."""
    if not gone.bye and session.serves:
        return 0
    own = session.spec.grace_ns
    return gone.until if gone.bye or own < 0 else gone.since + own
