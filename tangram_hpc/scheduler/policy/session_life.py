"""Pure. Ends sessions that are idle for too long, and sessions of disconnected clients.

The functions here read the ledger; each end that they name is an event for the driver to journal
and to hand back. Invariant: as long as an action of a session waits or runs, neither idleness nor
its client's disconnection closes it, so that an action such as a reward computation never loses its
sandbox; and the client is not forgotten before. An action that waits and whose call only its client
has, because the broker was started again, does not keep its session. If the client said goodbye,
all of its sessions and actions end at once. A time-to-live is different: when it is over the
session closes, whatever runs in it.

A session that outlives its client, or that an attached client holds, does not end with its client;
the actions that this client had submitted to it are cancelled when the client's grace is over.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...domain import event as ev
from ...domain.action import Kind
from ...domain.ids import client_of
from ...domain.states import ENDED, SessionState
from ..state.idle import DisconnectedClient
from ..state.ledger import Ledger, SessionEntry

OPEN_SESSION = (SessionState.WAITING, SessionState.OPENING, SessionState.IDLE, SessionState.BUSY,
                SessionState.MOVING)
_WENT = "its client went away"


def expired(ledger: Ledger, now: int) -> list[ev.Event]:
    """Events for all sessions, clients, and actions outside sessions that must end now.

    A client is forgotten in the pass after the end of its last session. O(disconnected clients +
    sessions of those whose grace is over + events).
    """
    if not _may_expire(ledger):
        return []
    closing = {session: f"idle for {timeout_ns / 1e9:g} s"
               for session, timeout_ns in ledger.idle_deadlines.due(now)}
    for session, ttl_ns in ledger.ttl_deadlines.due(now):
        closing.setdefault(session, f"its time-to-live of {ttl_ns / 1e9:g} s is over")
    for number in ledger.ownerless:
        if _abandoned(ledger.sessions[number]):
            closing.setdefault(number, _WENT)
    events: list[ev.Event] = [ev.SessionClosing(now, number, why)
                              for number, why in closing.items()]
    for client, gone in ledger.disconnected.items():
        if now < gone.earliest:
            continue
        entry, open_left = ledger.clients[client], False
        for own in ending_of(ledger, client):
            due = _due(gone, own)
            open_left = True
            if 0 < due <= now and own.spec.id not in closing:
                events.append(ev.SessionClosing(now, own.spec.id, _WENT))
            elif not due and _grace_end(gone, own) <= now:
                events += [ev.ActionCancelled(now, action, _WENT)
                           for action in _never_to_start(ledger, own, client)]
        if gone.until <= now:
            ending = [*entry.ends_with_client, *_in_held_sessions(ledger, client)]
            events += [ev.ActionCancelled(now, action, _WENT) for action in ending]
            events += [ev.SessionDetached(now, session, client) for session in entry.attached]
            if not open_left and not ending and not entry.attached:
                events.append(ev.ClientExpired(now, client))
    return events


def stalled(ledger: Ledger, event: ev.BrokerStalled) -> None:
    """Extends the grace of clients, the wait for nodes that are away, and the idle time and the
    time-to-live of sessions, by the time in which the broker did not run, because nobody could
    reach it then. O(disconnected clients + nodes that are away + sessions).
    """
    for node in ledger.away:
        ledger.away[node] += event.moved_ns
    for client, gone in ledger.disconnected.items():
        if not gone.bye:
            moved_ns = max(0, min(event.moved_ns, event.at - gone.since))
            ledger.disconnected[client] = gone_since(
                ledger, client, gone.since + moved_ns, gone.until + moved_ns)
    ledger.idle_deadlines.stalled(event.moved_ns, event.at)
    ledger.ttl_deadlines.stalled(event.moved_ns, event.at)


def gone_since(ledger: Ledger, client: int, since: int, until: int, bye: bool = False
               ) -> DisconnectedClient:
    """Returns what the ledger notes of a client without a connection; see `DisconnectedClient`.
    The client opens no session meanwhile, so nothing of it ends before the shortest grace of its
    sessions is over.
    """
    graces = (ledger.sessions[n].spec.grace_ns for n in ledger.clients[client].sessions)
    ends = (since + own for own in graces if own >= 0 and not bye)
    return DisconnectedClient(since, until, bye, min(until, min(ends, default=until)))


def next_expiry(ledger: Ledger, looked_at: int) -> int:
    """Returns when the next session or client may expire, in epoch ns; 0 for never. The work is
    that of `expired`.

    Args:
        looked_at: when `expired` was last called, in epoch ns. A client that could not expire then
            counts with the earliest time at which it may.
    """
    if not _may_expire(ledger):
        return 0
    ends = [end for end in (ledger.idle_deadlines.next_end(), ledger.ttl_deadlines.next_end())
            if end]
    for client, gone in ledger.disconnected.items():
        if looked_at < gone.earliest:
            ends.append(gone.earliest)
            continue
        entry = ledger.clients[client]
        dues = []
        for session in ending_of(ledger, client):
            dues.append(_due(gone, session))
            if dues[-1] or any(True for _ in _never_to_start(ledger, session, client)):
                ends.append(_grace_end(gone, session))
        if (entry.ends_with_client or entry.attached or not dues
                or any(True for _ in _in_held_sessions(ledger, client))):
            ends.append(gone.until)
    return min(ends, default=0)


def ending_of(ledger: Ledger, client: int) -> Iterator[SessionEntry]:
    """Yields a client's sessions that are not closing and that end when the client is gone."""
    for session in ledger.clients[client].sessions:
        entry = ledger.sessions[session]
        if entry.state in OPEN_SESSION and entry.ends_with_client:
            yield entry


def _may_expire(ledger: Ledger) -> bool:
    """Returns whether any session could expire. In most scheduling cycles of a busy job none
    can."""
    return bool(ledger.disconnected or ledger.idle_deadlines.groups or ledger.ttl_deadlines.groups
                or ledger.ownerless)


def _abandoned(session: SessionEntry) -> bool:
    """Whether a session whose own client has expired is held by nobody and has no work left."""
    return session.state in OPEN_SESSION and session.ends_with_client and not session.serves


def _due(gone: DisconnectedClient, session: SessionEntry) -> int:
    """When a session of a disconnected client ends, epoch ns; 0 as long as it has work."""
    return 0 if not gone.bye and session.serves else _grace_end(gone, session)


def _grace_end(gone: DisconnectedClient, session: SessionEntry) -> int:
    """When the client's grace is over for a session, epoch ns."""
    own = session.spec.grace_ns
    return gone.until if gone.bye or own < 0 else gone.since + own


def _in_held_sessions(ledger: Ledger, client: int) -> Iterator[int]:
    """Yields the actions of a client in those of its sessions that only others hold open, and that
    have neither ended nor been cancelled. O(sessions), and O(actions) if it has such a session.
    """
    entry = ledger.clients[client]
    held = {number for number in entry.sessions
            if not (session := ledger.sessions[number]).ends_with_client
            and session.state in OPEN_SESSION and not session.spec.outlives}
    for number in entry.actions if held else ():
        one = ledger.actions[number]
        if (one.action.session in held and one.action.kind is not Kind.BACKGROUND
                and not one.action.once and one.state not in ENDED and one.forced_outcome is None):
            yield number


def _never_to_start(ledger: Ledger, session: SessionEntry, client: int) -> Iterator[int]:
    """Yields the actions of a client that wait in a session until the client submits them again."""
    for action in session.waiting:
        if ledger.actions[action].withheld and client_of(action) == client:
            yield action
