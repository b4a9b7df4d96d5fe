"""Pure. The part of the scheduler that applies facts about sessions.

Law: as the scheduler's: facts in, orders out, and only `handle` calls them. An action competes for
units (`_push`) once nothing of its own session is before it.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.decision import (
    AnnounceSession,
    AnnounceSessionEnd,
    CloseSession,
    Decision,
    OpenSession,
    PackSession,
)
from ...domain.ids import client_of, show
from ...domain.outcome import Outcome
from ...domain.session import why_ended
from ...domain.states import ActionState, SessionState
from ..policy.session_life import OPEN_SESSION
from ..state.ledger import ActionEntry, ClientEntry, Ledger, NodeEntry, SessionEntry
from ..state.transitions import SESSION_MOVES, move


class SessionFacts:
    """Handlers of the facts of sessions."""

    ledger: Ledger
    dirty: bool

    def _session_requested(self, event: ev.SessionRequested) -> list[Decision]:
        spec = event.spec
        self.ledger.sessions[spec.id] = SessionEntry(spec, event.at)
        if spec.origin:
            origin = self.ledger.sessions[spec.origin]
            origin.forks[spec.id] = False
            self._rest(origin, event.at)
        self.ledger.opening.add(spec.id)
        self.ledger.sessions_seen += 1
        owner = self.ledger.clients[client_of(spec.id)]
        owner.sessions[spec.id] = None
        owner.last_session = max(owner.last_session, spec.id)
        self.dirty = True
        return []

    def _session_placed(self, event: ev.SessionPlaced) -> list[Decision]:
        session, node = self.ledger.sessions[event.session], self.ledger.nodes[event.node]
        session.state = move(SESSION_MOVES, session.state, SessionState.OPENING, event)
        session.node, session.cores, session.placed_at = event.node, event.cores, event.at
        session.near = event.cores
        self.ledger.opening.placed(event.session)
        node.sessions[event.session] = None
        node.cores.take(event.cores)
        node.free_mem_mib -= session.spec.mem_mib
        if session.spec.origin:
            origin = self.ledger.sessions[session.spec.origin]
            self._withdraw(origin)  # nothing starts in it while its files are copied
            origin.forks[event.session] = True
        self.dirty = True
        return [OpenSession(event.node, session.spec)]

    def _session_ready(self, event: ev.SessionReady) -> list[Decision]:
        session = self.ledger.sessions.get(event.session)
        if session is None or session.state is not SessionState.OPENING:
            return []
        session.state = move(SESSION_MOVES, session.state, SessionState.IDLE, event)
        self._resume(session)
        self._rest(session, event.at)
        self._forked(session, event.at)
        return [AnnounceSession(event.session, session.node)]

    def _session_renewed(self, event: ev.SessionRenewed) -> list[Decision]:
        session = self.ledger.sessions.get(event.session)
        if session is not None:
            self._rest(session, event.at)
        return []

    def _session_moving(self, event: ev.SessionMoving) -> list[Decision]:
        session = self.ledger.sessions[event.session]
        self._withdraw(session)
        session.state = move(SESSION_MOVES, session.state, SessionState.MOVING, event)
        self._rest(session, event.at)
        return [PackSession(session.node, event.session)]

    def _session_packed(self, event: ev.SessionPacked) -> list[Decision]:
        """It waits as if it had just been asked for, but with its files and its actions."""
        session = self.ledger.sessions[event.session]
        session.state = move(SESSION_MOVES, session.state, SessionState.WAITING, event)
        self._vacate(session)
        session.spec = session.spec.moved(event.files)
        session.node, session.cores, session.requested_at = 0, (), event.at
        self.ledger.opening.add(event.session)
        self.dirty = True
        return []

    def _vacate(self, session: SessionEntry) -> None:
        """Its node has its amounts back."""
        node = self.ledger.nodes[session.node]
        del node.sessions[session.spec.id]
        node.cores.give(session.cores)
        node.free_mem_mib += session.spec.mem_mib
        self._drained(node)

    def _session_closing(self, event: ev.SessionClosing) -> list[Decision]:
        session = self.ledger.sessions[event.session]
        if session.state is SessionState.WAITING:
            return []  # SessionClosed follows at once
        self._withdraw(session)
        session.closing = event.reason
        session.state = move(SESSION_MOVES, session.state, SessionState.CLOSING, event)
        self._rest(session, event.at)
        end = Outcome(ActionState.CANCELLED, reason=why_ended(event.session, event.reason))
        for lease in session.leases:
            entry = self.ledger.actions.get(self.ledger.leases[lease].action)
            if entry is not None:  # else it has ended, and only what it left is being killed
                entry.doomed = entry.doomed or end
        return [CloseSession(session.node, event.session)]

    def _session_closed(self, event: ev.SessionClosed) -> list[Decision]:
        session = self.ledger.sessions.pop(event.session, None)
        if session is None:
            return []
        if session.state is SessionState.WAITING:
            self.ledger.opening.drop(event.session)
        else:
            self._vacate(session)
        self.ledger.idle.stop(event.session, session.spec.idle_ns)
        self._forked(session, event.at)
        owner = self.ledger.clients[client_of(event.session)]
        del owner.sessions[event.session]
        self._drop_if_gone(owner)
        self.dirty = True
        return [AnnounceSessionEnd(event.session, event.reason or session.closing, event.never)]

    def _end_of_session(self, fact: ev.SessionClosing) -> list[ev.Event]:
        session = self.ledger.sessions.get(fact.session)
        if session is None or session.state not in OPEN_SESSION:
            return []
        if session.state is SessionState.WAITING:
            return [fact, *self._closed(ev.SessionClosed(fact.at, fact.session, fact.reason))]
        return [fact, *self._end_waiting(fact.session, fact.at, fact.reason),
                *self._end_forks(session, fact.at)]

    def _closed(self, fact: ev.SessionClosed) -> list[ev.Event]:
        """A session's end and what it entails: who waits in it, or to begin with its files."""
        session = self.ledger.sessions.get(fact.session)
        if session is None:
            return [fact]
        return [*self._end_waiting(fact.session, fact.at, fact.reason), fact,
                *self._end_forks(session, fact.at)]

    def _end_forks(self, session: SessionEntry, now: int) -> list[ev.Event]:
        why = f"origin: session {show(session.spec.id)} ended before its fork could begin"
        events: list[ev.Event] = []
        for fork, copied in session.forks.items():
            if not copied:
                events += self._closed(ev.SessionClosed(now, fork, why))
        return events

    def _forked(self, fork: SessionEntry, now: int) -> None:
        """A fork is open or ended: its origin goes on."""
        origin = self.ledger.sessions.get(fork.spec.origin)
        if origin is None or origin.forks.pop(fork.spec.id, None) is None:
            return
        self._resume(origin)
        self._rest(origin, now)

    def _rest(self, session: SessionEntry, now: int) -> None:
        """The idle clock of a session starts again now, or stands still while it works."""
        spec = session.spec
        if session.state is SessionState.IDLE and not session.works:
            self.ledger.idle.rest(spec.id, spec.idle_ns, now)
        else:
            self.ledger.idle.stop(spec.id, spec.idle_ns)

    def _withdraw(self, session: SessionEntry) -> None:
        """None of its actions competes for units any more."""
        for action in session.waiting if session.parallel else list(session.waiting)[:1]:
            if action in self.ledger.ready:
                self.ledger.ready.remove(action)

    def _resume(self, session: SessionEntry) -> None:
        """Lets those of its actions compete for units that may."""
        if session.parallel and session.takes:
            for action in session.waiting:
                if action not in self.ledger.ready:
                    self._push(self.ledger.actions[action], session)
        self._promote(session)

    def _end_waiting(self, session_id: int, now: int, reason: str) -> list[ev.Event]:
        session = self.ledger.sessions.get(session_id)
        if session is None:
            return []
        why = why_ended(session_id, reason or session.closing)
        return [ev.ActionCancelled(now, action, why) for action in session.waiting]

    def _promote(self, session: SessionEntry) -> None:
        """Lets the first waiting action of an idle session compete for units."""
        idle = session.state is SessionState.IDLE and session.takes
        if session.waiting and idle and not session.parallel:
            head = next(iter(session.waiting))
            if head not in self.ledger.ready:
                self._push(self.ledger.actions[head], session)

    def _drained(self, node: NodeEntry) -> None:
        raise NotImplementedError  # NodeFacts

    def _push(self, entry: ActionEntry, session: SessionEntry | None) -> None:
        entry.turn = entry.turn or self.ledger.ready.draw(entry.action)
        node = session.node if session is not None else 0
        own = session.spec.id if session is not None and session.cores else 0
        self.ledger.ready.push(entry.action, node, own, entry.turn, self.ledger.estimator.believed,
                               entry.counted)
        if node:
            self.ledger.nodes[node].news += 1
        else:
            self.ledger.news += 1
        self.dirty = True

    def _drop_if_gone(self, owner: ClientEntry) -> None:
        if not owner.uid and not owner.actions and not owner.sessions:
            self.ledger.clients.pop(owner.client, None)
