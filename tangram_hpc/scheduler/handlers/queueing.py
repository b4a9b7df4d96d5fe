"""Pure. Puts actions into the ready queue, where they compete for units, and takes them out.

An action without a session competes at once. An action of a session competes when the session can
take it: in a parallel session always, else only the one whose turn it is (`SessionTurns`), and only
while nothing runs. A turn of a trajectory competes once it has been routed to a service; before
that it waits in its rollout pool.

Invariants: these functions are called by handlers only. An action draws its order tag once and
keeps it when it leaves the queue and comes back, unless it is queued as a new action.
"""

from __future__ import annotations

from ...domain.action import Action, Kind
from ...domain.ids import client_of
from ...domain.states import ActionState, SessionState
from ..state.ledger import ActionEntry, Ledger, SessionEntry
from ..state.scheduler_state import SchedulerState
from .background_events import note_background


def enqueue(state: SchedulerState, entry: ActionEntry) -> None:
    """Puts a PENDING action into the queue in which actions like it wait."""
    action, ledger = entry.action, state.ledger
    if action.turn is not None:
        return want_route(ledger, entry)
    if not action.session:
        return push(state, entry, None)
    if action.kind is Kind.BACKGROUND:
        session = note_background(ledger, entry)
        update_idle(ledger, session, entry.submitted_at)
        return promote(state, session)
    session = ledger.sessions[action.session]
    first = not session.waiting.head and not session.leases
    session.waiting.add(action.id)
    update_idle(ledger, session, entry.submitted_at)
    if first or session.parallel:  # drawn now: time before the session opens counts
        entry.order_tag = ledger.ready.draw(action)
    if session.parallel and session.takes:
        push(state, entry, session)
    promote(state, session)


def dequeue(state: SchedulerState, action: Action, now: int) -> None:
    """Takes a PENDING action out of all queues. Others may start now that waited behind it."""
    ledger = state.ledger
    session = ledger.sessions.get(action.session)
    if action.id in ledger.ready:
        ledger.ready.remove(action.id)
        look_at(state, session.node if session is not None else 0)
    if session is not None and action.id in session.waiting:
        session.waiting.drop(action.id)
        promote(state, session)
        update_idle(ledger, session, now)


def push(state: SchedulerState, entry: ActionEntry, session: SessionEntry | None) -> None:
    """Puts an action into the ready queue; `session` is its session if it has one. An action that
    is withheld comes there later, by `put_forward`.
    """
    ledger = state.ledger
    if entry.withheld:
        return
    entry.order_tag = entry.order_tag or ledger.ready.draw(entry.action)
    node = session.node if session is not None else 0
    own = session.spec.id if session is not None and session.cores else 0
    ledger.ready.push(entry.action, node, own, entry.order_tag, ledger.estimator.estimate,
                      entry.counted)
    look_at(state, node)


def look_at(state: SchedulerState, node: int) -> None:
    """Lets the placer look again at a node, or with 0 at all nodes that any action may start on."""
    if node:
        state.ledger.nodes[node].revision += 1
    else:
        state.ledger.revision += 1
    state.dirty = True


def push_again(state: SchedulerState, entry: ActionEntry) -> None:
    """Queues an action without a session whose lease was returned unused. A turn waits for the same
    service, unless its pool has withdrawn the choice of that service."""
    turn = entry.action.turn
    if turn is not None and not state.ledger.rollouts[turn.pool].placed(entry.action.id):
        return want_route(state.ledger, entry)
    return push(state, entry, None)


def put_forward(state: SchedulerState, entry: ActionEntry) -> None:
    """Lets a PENDING action compete that was withheld until now."""
    action = entry.action
    if action.session:
        return resume(state, state.ledger.sessions[action.session])
    turn = action.turn
    if turn is None or state.ledger.rollouts[turn.pool].placed(action.id):
        push(state, entry, None)


def want_route(ledger: Ledger, entry: ActionEntry) -> None:
    """Hands a turn to its rollout pool, which routes it for the first time or again."""
    turn = entry.action.turn
    assert turn is not None
    entry.action, entry.route = entry.action.unrouted(), None
    ledger.rollouts[turn.pool].wanted(entry.action.id, client_of(entry.action.id), turn,
                                      entry.submitted_at)


def promote(state: SchedulerState, session: SessionEntry) -> None:
    """Lets the first waiting action of an idle session compete for units, and its background
    action.
    """
    idle = session.state is SessionState.IDLE and session.takes
    if session.background and idle and session.background not in state.ledger.ready:
        entry = state.ledger.actions[session.background]
        if entry.state is ActionState.PENDING:
            push(state, entry, session)
    head = session.waiting.head
    if head and idle and not session.parallel and head not in state.ledger.ready:
        push(state, state.ledger.actions[head], session)


def resume(state: SchedulerState, session: SessionEntry) -> None:
    """Lets the actions of a session that may start now compete for units."""
    ledger = state.ledger
    if session.parallel and session.takes:
        for action in session.waiting:
            if action not in ledger.ready:
                push(state, ledger.actions[action], session)
    promote(state, session)


def withdraw(ledger: Ledger, session: SessionEntry) -> None:
    """Takes all actions of a session out of the ready queue; they go on waiting in the session."""
    for action in session.waiting if session.parallel else (session.waiting.head,):
        if action in ledger.ready:
            ledger.ready.remove(action)
    if session.background in ledger.ready:
        ledger.ready.remove(session.background)


def update_idle(ledger: Ledger, session: SessionEntry, now: int) -> None:
    """Starts the idle time of a session that has nothing to do at `now`, or ends it."""
    spec = session.spec
    if not spec.idle_ns:
        return
    if session.state is SessionState.IDLE and not session.works:
        ledger.idle_deadlines.start(spec.id, spec.idle_ns, now)
    else:
        ledger.idle_deadlines.stop(spec.id, spec.idle_ns)
