"""Pure. The part of the scheduler that applies facts about sessions.

Law: as the scheduler's: facts in, orders out, and only `handle` calls them. An action competes for
units (`_push`) once nothing of its own session is before it.
"""

from __future__ import annotations

from ..domain import event as ev
from ..domain.decision import (
    AnnounceSession,
    AnnounceSessionEnd,
    CloseSession,
    Decision,
    OpenSession,
)
from ..domain.ids import client_of, show
from ..domain.states import ActionState, SessionState
from .admission import OPEN_SESSION
from .ledger import ActionEntry, ClientEntry, Ledger, SessionEntry
from .transitions import SESSION_MOVES, move


class SessionFacts:
    """Handlers of the facts of sessions."""

    ledger: Ledger
    dirty: bool

    def _session_requested(self, event: ev.SessionRequested) -> list[Decision]:
        spec = event.spec
        self.ledger.sessions[spec.id] = SessionEntry(spec, event.at)
        self.ledger.opening[spec.id] = None
        self.ledger.sessions_seen += 1
        self.ledger.clients[client_of(spec.id)].sessions[spec.id] = None
        self.dirty = True
        return []

    def _session_placed(self, event: ev.SessionPlaced) -> list[Decision]:
        session, node = self.ledger.sessions[event.session], self.ledger.nodes[event.node]
        session.state = move(SESSION_MOVES, session.state, SessionState.OPENING, event)
        session.node, session.cores, session.placed_at = event.node, event.cores, event.at
        del self.ledger.opening[event.session]
        node.sessions[event.session] = None
        node.cores.take(event.cores)
        node.free_mem_mib -= session.spec.mem_mib
        self.dirty = True
        return [OpenSession(event.node, session.spec)]

    def _session_ready(self, event: ev.SessionReady) -> list[Decision]:
        session = self.ledger.sessions.get(event.session)
        if session is None or session.state is not SessionState.OPENING:
            return []
        session.state = move(SESSION_MOVES, session.state, SessionState.IDLE, event)
        for action in session.waiting if session.parallel else ():
            self._push(self.ledger.actions[action], session)
        self._promote(session)
        return [AnnounceSession(event.session, session.node)]

    def _session_closing(self, event: ev.SessionClosing) -> list[Decision]:
        session = self.ledger.sessions[event.session]
        if session.state is SessionState.WAITING:
            return []  # SessionClosed follows at once
        for action in session.waiting if session.parallel else list(session.waiting)[:1]:
            if action in self.ledger.ready:
                self.ledger.ready.remove(action)
        session.state = move(SESSION_MOVES, session.state, SessionState.CLOSING, event)
        for lease in session.leases:
            entry = self.ledger.actions[self.ledger.leases[lease].action]
            entry.doomed = entry.doomed or ActionState.CANCELLED
        return [CloseSession(session.node, event.session)]

    def _session_closed(self, event: ev.SessionClosed) -> list[Decision]:
        session = self.ledger.sessions.pop(event.session, None)
        if session is None:
            return []
        if session.state is SessionState.WAITING:
            del self.ledger.opening[event.session]
        else:
            node = self.ledger.nodes[session.node]
            del node.sessions[event.session]
            node.cores.give(session.cores)
            node.free_mem_mib += session.spec.mem_mib
        owner = self.ledger.clients[client_of(event.session)]
        del owner.sessions[event.session]
        self._drop_if_gone(owner)
        self.dirty = True
        return [AnnounceSessionEnd(event.session, event.reason)]

    def _end_of_session(self, fact: ev.SessionClosing) -> list[ev.Event]:
        session = self.ledger.sessions.get(fact.session)
        if session is None or session.state not in OPEN_SESSION:
            return []
        events = [fact, *self._end_waiting(fact.session, fact.at, fact.reason)]
        if session.state is SessionState.WAITING:
            events.append(ev.SessionClosed(fact.at, fact.session, fact.reason))
        return events

    def _end_waiting(self, session_id: int, now: int, reason: str) -> list[ev.Event]:
        session = self.ledger.sessions.get(session_id)
        if session is None:
            return []
        why = f"session {show(session_id)} ended" + (f": {reason}" if reason else "")
        return [ev.ActionCancelled(now, action, why) for action in session.waiting]

    def _promote(self, session: SessionEntry) -> None:
        """Lets the first waiting action of an idle session compete for units."""
        if session.waiting and session.state is SessionState.IDLE and not session.parallel:
            head = next(iter(session.waiting))
            if head not in self.ledger.ready:
                self._push(self.ledger.actions[head], session)

    def _push(self, entry: ActionEntry, session: SessionEntry | None) -> None:
        entry.turn = entry.turn or self.ledger.ready.draw()
        node = session.node if session is not None else 0
        own = session.spec.id if session is not None and session.cores else 0
        self.ledger.ready.push(entry.action, node, own, entry.turn)
        if node:
            self.ledger.nodes[node].news += 1
        else:
            self.ledger.news += 1
        self.dirty = True

    def _drop_if_gone(self, owner: ClientEntry) -> None:
        if not owner.uid and not owner.actions and not owner.sessions:
            self.ledger.clients.pop(owner.client, None)
