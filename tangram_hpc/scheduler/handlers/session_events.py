"""Pure. Handlers of events about sessions.

A session waits until it is placed, opens on its home node, is idle or busy there, and is closed. It
may move: its files are packed, its sandbox is removed, and it waits for another node. A fork begins
with a copy of its origin's files; while they are copied, no action starts in the origin.

Invariant: a session holds its memory, and the cores that it reserves, exactly while it is on a
node; `_vacate` is the only place that gives them back.
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
from ...domain.ids import client_of
from ...domain.outcome import Outcome
from ...domain.session import why_ended
from ...domain.states import ActionState, SessionState
from ..state.ledger import Ledger, SessionEntry
from ..state.queue import CPU
from ..state.scheduler_state import SchedulerState
from ..state.tenant_use import MEMORY
from ..state.transitions import SESSION_MOVES, move
from .attachment_events import end_sharing
from .background_events import displace_background
from .client_events import forget_if_gone
from .node_events import mark_drained
from .queueing import resume, update_idle, withdraw


def on_session_requested(state: SchedulerState, event: ev.SessionRequested) -> list[Decision]:
    """Adds a session that waits to be placed."""
    spec, ledger = event.spec, state.ledger
    ledger.sessions[spec.id] = SessionEntry(spec, event.at,
                                            snapshot_nodes=event.snapshot_nodes)
    if spec.origin:
        origin = ledger.sessions[spec.origin]
        origin.forks[spec.id] = False
        update_idle(ledger, origin, event.at)
    ledger.session_queue.add(spec.id)
    ledger.sessions_seen += 1
    owner = ledger.clients[client_of(spec.id)]
    owner.sessions[spec.id] = None
    owner.last_session = max(owner.last_session, spec.id)
    if spec.shared:
        ledger.shared[spec.name] = spec.id
    ledger.ttl_deadlines.start(spec.id, spec.ttl_ns, event.at)
    state.dirty = True
    return []


def on_session_placed(state: SchedulerState, event: ev.SessionPlaced) -> list[Decision]:
    """Sets a session's home node, and lets that node open the session."""
    ledger = state.ledger
    session, node = ledger.sessions[event.session], ledger.nodes[event.node]
    session.state = move(SESSION_MOVES, session.state, SessionState.OPENING, event)
    session.node, session.cores, session.placed_at = event.node, event.cores, event.at
    session.last_cores = event.cores
    ledger.session_queue.placed(event.session)
    node.sessions[event.session] = None
    node.cores.take(event.cores)
    node.free_mem_mib -= session.spec.mem_mib
    _count(ledger, session, 1)
    stops: list[Decision] = []
    if session.spec.origin:
        origin = ledger.sessions[session.spec.origin]
        withdraw(ledger, origin)  # no action starts in the origin while its files are copied
        origin.forks[event.session] = True
        stops = displace_background(state, origin)
    state.dirty = True
    return [*stops, OpenSession(event.node, session.spec)]


def on_session_ready(state: SchedulerState, event: ev.SessionReady) -> list[Decision]:
    """Marks a session as open; its actions may start."""
    ledger = state.ledger
    session = ledger.sessions.get(event.session)
    if session is None or session.state is not SessionState.OPENING:
        return []
    session.state = move(SESSION_MOVES, session.state, SessionState.IDLE, event)
    session.image = event.image
    if not session.opened_at:
        session.opened_at = event.at
        ledger.ttl_deadlines.start(event.session, session.spec.ttl_ns, event.at)
    resume(state, session)
    update_idle(ledger, session, event.at)
    _resume_origin(state, session, event.at)
    return [AnnounceSession(event.session, session.node)]


def on_session_renewed(state: SchedulerState, event: ev.SessionRenewed) -> list[Decision]:
    """Starts a session's idle time anew, because its client renewed the session."""
    session = state.ledger.sessions.get(event.session)
    if session is not None:
        update_idle(state.ledger, session, event.at)
    return []


def on_session_moving(state: SchedulerState, event: ev.SessionMoving) -> list[Decision]:
    """Lets the home node pack a session that moves to another node."""
    ledger = state.ledger
    session = ledger.sessions[event.session]
    withdraw(ledger, session)
    session.state = move(SESSION_MOVES, session.state, SessionState.MOVING, event)
    update_idle(ledger, session, event.at)
    return [PackSession(session.node, event.session)]


def on_session_packed(state: SchedulerState, event: ev.SessionPacked) -> list[Decision]:
    """Puts a packed session, with its files and its actions, into the queue for a node."""
    ledger = state.ledger
    session = ledger.sessions[event.session]
    session.state = move(SESSION_MOVES, session.state, SessionState.WAITING, event)
    _vacate(ledger, session)
    session.spec = session.spec.moved(event.files)
    session.node, session.cores, session.requested_at = 0, (), event.at
    session.snapshot_nodes = ()  # the files of its move have all that it needs
    ledger.session_queue.add(event.session)
    state.dirty = True
    return []


def on_session_closing(state: SchedulerState, event: ev.SessionClosing) -> list[Decision]:
    """Lets the home node close a session. Actions that still run in the session will end as
    cancelled.
    """
    ledger = state.ledger
    session = ledger.sessions[event.session]
    if session.state is SessionState.WAITING:
        return []  # the event SessionClosed follows at once
    withdraw(ledger, session)
    session.closing = event.reason
    session.state = move(SESSION_MOVES, session.state, SessionState.CLOSING, event)
    update_idle(ledger, session, event.at)
    ledger.ttl_deadlines.stop(event.session, session.spec.ttl_ns)
    end = Outcome(ActionState.CANCELLED, reason=why_ended(event.session, event.reason))
    background = ledger.actions.get(session.background)
    held = (background.lease,) if background is not None and background.lease else ()
    for lease in (*session.leases, *held):
        entry = ledger.actions.get(ledger.leases[lease].action)
        if entry is not None:  # else the action has ended, and only its last processes are killed
            entry.forced_outcome = entry.forced_outcome or end
    return [CloseSession(session.node, event.session)]


def on_session_closed(state: SchedulerState, event: ev.SessionClosed) -> list[Decision]:
    """Removes a session that was closed."""
    ledger = state.ledger
    session = ledger.sessions.pop(event.session, None)
    if session is None:
        return []
    if session.state is SessionState.WAITING:
        ledger.session_queue.drop(event.session)
    else:
        _vacate(ledger, session)
    ledger.idle_deadlines.stop(event.session, session.spec.idle_ns)
    ledger.ttl_deadlines.stop(event.session, session.spec.ttl_ns)
    _resume_origin(state, session, event.at)
    reason, attached = event.reason or session.closing, tuple(session.attached)
    end_sharing(ledger, session, reason)
    owner = ledger.clients[client_of(event.session)]
    del owner.sessions[event.session]
    forget_if_gone(ledger, owner)
    state.dirty = True
    return [AnnounceSessionEnd(event.session, reason, event.infeasible, attached)]


def _vacate(ledger: Ledger, session: SessionEntry) -> None:
    node = ledger.nodes[session.node]
    del node.sessions[session.spec.id]
    node.cores.give(session.cores)
    node.free_mem_mib += session.spec.mem_mib
    _count(ledger, session, -1)
    mark_drained(node)
    node.revision += 1  # an action may have waited for the memory
    if ledger.tenants.limited:  # or, on any node, for its tenant to hold less
        ledger.revision += 1


def _count(ledger: Ledger, session: SessionEntry, sign: int) -> None:
    """Counts what a session holds for its tenant, with sign 1 or -1."""
    tenant = ledger.tenants.tenant_of(client_of(session.spec.id))
    mem_mib, cores = sign * session.spec.mem_mib, sign * len(session.cores)
    ledger.tenants.use(MEMORY).take(tenant, mem_mib)
    if cores:
        ledger.tenants.use(CPU).take(tenant, cores)


def _resume_origin(state: SchedulerState, fork: SessionEntry, now: int) -> None:
    """Lets the origin of a fork go on, once the fork is open or has ended."""
    origin = state.ledger.sessions.get(fork.spec.origin)
    if origin is None or origin.forks.pop(fork.spec.id, None) is None:
        return
    resume(state, origin)
    update_idle(state.ledger, origin, now)
