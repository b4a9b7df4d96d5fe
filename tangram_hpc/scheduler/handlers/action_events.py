"""Pure. Handlers of events about actions, and how an action ends.

Invariant: `end_action` is the only place where an action gets an end state. An action that ended
stays in the ledger until its client has acknowledged the result, or has expired.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.action import Kind
from ...domain.decision import Decision, KillLease, ReplyToClient
from ...domain.ids import client_of
from ...domain.outcome import Outcome
from ...domain.service import service_of
from ...domain.states import ENDED, ActionState
from ..state.ledger import ActionEntry, ClientEntry, SessionEntry
from ..state.scheduler_state import SchedulerState
from ..state.transitions import ACTION_MOVES, move
from .background_events import defer_cancellation, forget_background
from .client_events import forget_action
from .queueing import dequeue, enqueue, put_forward, update_idle
from .rollout_events import note_end


def on_action_submitted(state: SchedulerState, event: ev.ActionSubmitted) -> list[Decision]:
    """Adds an action and puts it into its queue."""
    action, ledger = event.action, state.ledger
    assert action.id not in ledger.actions, f"{action} was submitted twice"
    entry = ledger.actions[action.id] = ActionEntry(action, event.at)
    owner = ledger.clients[client_of(action.id)]
    owner.actions[action.id] = None
    owner.open_actions += 1
    owner.active_at = event.at
    if action.once:
        ledger.once[action.once] = action.id
    elif action.kind is not Kind.BACKGROUND and (  # a background action ends only with its session
            not action.session or not _ends_with_session(ledger.sessions[action.session], owner)):
        owner.ends_with_client[action.id] = None
    if service := service_of(action.key):
        declared = ledger.services.get(service)
        ledger.demand.came(action, event.at, declared.restore_ns if declared else 0,
                           ledger.estimator)
    enqueue(state, entry)
    return []


def _ends_with_session(session: SessionEntry, submitter: ClientEntry) -> bool:
    """Whether the loss of this client ends the session, and an action in it only with that."""
    return client_of(session.spec.id) == submitter.client and not session.spec.outlives


def on_action_resubmitted(state: SchedulerState, event: ev.ActionResubmitted) -> list[Decision]:
    """Lets a withheld action start, because the broker has received its payload again."""
    entry = state.ledger.actions.get(event.action)
    if entry is not None and entry.withheld:
        entry.withheld = False
        if entry.state is ActionState.PENDING:
            put_forward(state, entry)
    return []


def on_action_cancelled(state: SchedulerState, event: ev.ActionCancelled) -> list[Decision]:
    """Ends an action that waits, or kills the attempt of one that runs. If the result of an action
    that has ended was lost, its client is told so.
    """
    ledger = state.ledger
    entry = ledger.actions.get(event.action)
    if entry is None or entry.state in ENDED:
        if entry is None or entry.reply is None or event.state is not ActionState.NODE_FAIL:
            return []
        entry.reply = entry.reply.ended_as(entry.reply.outcome.lost(event.reason))
        return [entry.reply]
    if entry.state is ActionState.PENDING:
        if entry.action.kind is Kind.BACKGROUND and defer_cancellation(
                state, entry, Outcome(event.state, reason=event.reason)):
            return []
        dequeue(state, entry.action, event.at)
        outcome = Outcome(event.state, reason=event.reason)
        queue_ns = event.at - entry.submitted_at
        return end_action(state, entry, event.at, ReplyToClient(
            event.action, outcome, 0, (), entry.attempt, queue_ns, 0))
    entry.forced_outcome = Outcome(event.state, reason=event.reason)
    ledger.clients[client_of(event.action)].ends_with_client.pop(event.action, None)
    lease = ledger.leases[entry.lease]
    return [KillLease(lease.node, lease.lease, event.state, event.reason)]


def on_action_acknowledged(state: SchedulerState, event: ev.ActionAcknowledged) -> list[Decision]:
    """Forgets actions whose results their client has received."""
    ledger = state.ledger
    for action in event.actions:
        entry = ledger.actions.get(action)
        if entry is not None and entry.state in ENDED:
            forget_action(ledger, action)
    return []


def end_action(state: SchedulerState, entry: ActionEntry, at: int,
               reply: ReplyToClient) -> list[Decision]:
    """Ends an action with the outcome of `reply`, and returns the reply to its client."""
    ledger, outcome = state.ledger, reply.outcome
    entry.state = move(ACTION_MOVES, entry.state, outcome.state, entry)
    if entry.route is not None:
        reply = reply.by(entry.route)
    entry.reply = reply
    entry.outcome, entry.ended_lease, entry.lease = outcome, entry.lease, 0
    entry.withheld = False
    if entry.action.once:
        ledger.once.pop(entry.action.once, None)
    if entry.action.turn is not None or entry.action.trajectory:
        note_end(ledger, entry, outcome, at)
    owner = ledger.clients[client_of(entry.action.id)]
    owner.open_actions -= 1
    owner.ends_with_client.pop(entry.action.id, None)
    if entry.action.kind is Kind.BACKGROUND:  # no client waits for it
        forget_background(ledger, entry, outcome.state, reply.held_ns)
        session = ledger.sessions.get(entry.action.session)
        if session is not None:
            update_idle(ledger, session, at)
        forget_action(ledger, entry.action.id)
        return []
    if not owner.uid:
        forget_action(ledger, entry.action.id)
    return [reply]
