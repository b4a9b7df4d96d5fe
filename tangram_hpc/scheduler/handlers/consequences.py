"""Pure. Names the events that an event entails: a node's loss ends its leases and sessions.

Every end of an action, lease or session is an event of its own in the journal, so that accounting
is a plain fold. The functions here read the state and change nothing; the driver handles the events
that they return, in that order. The returned events include the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...domain import event as ev
from ...domain.action import Kind
from ...domain.ids import client_of, show
from ...domain.outcome import Outcome
from ...domain.session import why_ended
from ...domain.states import ENDED, ActionState, AllocState, LeaseState, NodeState, SessionState
from ..policy.admission import misfit, misfit_of_session
from ..policy.session_life import OPEN_SESSION
from ..state.ledger import ActionEntry, Ledger, SessionEntry
from ..state.scheduler_state import SchedulerState

_RESTARTED = "the broker was started again"


def _of_broker_started(state: SchedulerState, event: ev.BrokerStarted) -> list[ev.Event]:
    """Names the end of all that an earlier broker of the job left open; nothing for the first
    broker, and for one that waits for the workers and clients of the earlier one.

    Its nodes are lost, its sessions with them, its clients expire, and their actions end. Only
    actions with an idempotency key, outside sessions, wait again under their old order tags; the
    attempt that was interrupted is not counted. O(entries that were open).
    """
    ledger, at = state.ledger, event.at
    events: list[ev.Event] = [event]
    if not ledger.starts or event.await_until:
        return events
    for entry in ledger.actions.values():
        if entry.state not in ENDED and not _goes_on(entry):
            cancelled = ev.ActionCancelled(at, entry.action.id, _RESTARTED, ActionState.NODE_FAIL)
            events += _of_action_cancelled(state, cancelled)
    for node in ledger.nodes.values():
        if node.state is not NodeState.DOWN:
            events += _loss(ledger, ev.NodeLost(at, node.node, _RESTARTED), restart=True)
    for session in ledger.session_queue:
        events += _end_of_session(ledger, ev.SessionClosed(at, session, _RESTARTED))
    events += [ev.ClientExpired(at, client) for client in ledger.by_uid.values()]
    return events


def _goes_on(entry: ActionEntry) -> bool:
    action = entry.action
    return bool(action.once) and not action.session and action.kind is not Kind.GRANT \
        and entry.forced_outcome is None


def _of_node_joined(state: SchedulerState, event: ev.NodeJoined) -> list[ev.Event]:
    """Adds that Slurm has granted the allocation of a node that joins."""
    allocs, name = state.ledger.allocs, event.spec.allocation
    number = allocs.by_job.get(name)
    if not name:
        return [event]
    if number is None:
        ours = name in (allocs.own, f"{allocs.own}+0")
        return [ev.AllocationHeld(event.at, allocs.next_alloc, 0, job=name, own=ours), event]
    if allocs.entries[number].state in (AllocState.ASKED, AllocState.PENDING):
        return [ev.AllocationHeld(event.at, number, 0), event]
    return [event]


def _of_node_lost(state: SchedulerState, event: ev.NodeLost) -> list[ev.Event]:
    return _loss(state.ledger, event, restart=False)


def _loss(ledger: Ledger, event: ev.NodeLost, restart: bool) -> list[ev.Event]:
    """The end of all leases and sessions of a lost node. After a `restart` of the broker, actions
    with an idempotency key are sent back instead of failed.

    A prefetched lease fails as the one in front of it does: its action may have begun, or even
    ended, before its node could say so, and must not run more often than it allows.
    """
    node = ledger.nodes[event.node]
    outcome = Outcome(ActionState.NODE_FAIL, reason=f"node {node.spec.name}: {event.reason}")
    events: list[ev.Event] = [event]
    # the last of a queue first, as the next one moves up when the first of it is gone
    for lease in (each for first in node.leases
                  for each in [*list(ledger.leases[first].lease_queue)[:0:-1], first]):
        entry = ledger.leases[lease]
        if entry.state is LeaseState.RELEASING:
            events.append(ev.LeaseReleased(event.at, lease))
            continue
        back = restart and not entry.session and bool(ledger.actions[entry.action].action.once)
        events.append(ev.LeaseFinished(
            event.at, lease, Outcome(ActionState.PREEMPTED, reason=outcome.reason)
            if back else outcome, True))
    for session in node.sessions:
        events += _end_of_session(ledger, ev.SessionClosed(event.at, session, outcome.reason))
    return events


def _of_nodes_complete(state: SchedulerState, event: ev.NodesComplete) -> list[ev.Event]:
    """Adds the ends of all sessions and actions that are infeasible, now that all nodes are known.
    """
    ledger, placer = state.ledger, state.placer
    events: list[ev.Event] = [event]
    for session in ledger.session_queue:
        if why := misfit_of_session(ledger, placer, ledger.sessions[session].spec):
            events += _end_of_session(ledger, ev.SessionClosed(event.at, session, why, True))
    for entry in ledger.actions.values():
        if entry.state is ActionState.PENDING:
            why = misfit(ledger, placer, entry.action, ledger.held_nodes())
            if why:
                events.append(ev.ActionCancelled(event.at, entry.action.id, why,
                                                 ActionState.FAILED))
    return events


def _of_session_closing(state: SchedulerState, event: ev.SessionClosing) -> list[ev.Event]:
    ledger = state.ledger
    session = ledger.sessions.get(event.session)
    if session is None or session.state not in OPEN_SESSION:
        return []
    if session.state is SessionState.WAITING:
        closed = ev.SessionClosed(event.at, event.session, event.reason)
        return [event, *_end_of_session(ledger, closed)]
    return [event, *_end_of_waiting(ledger, session, event.at, event.reason,
                                    ActionState.CANCELLED),
            *_end_of_forks(ledger, session, event.at)]


def _of_session_closed(state: SchedulerState, event: ev.SessionClosed) -> list[ev.Event]:
    return _end_of_session(state.ledger, event)


def _end_of_session(ledger: Ledger, event: ev.SessionClosed) -> list[ev.Event]:
    """Adds the ends of the actions that wait in a session that ends, and of its forks not yet
    begun.
    """
    session = ledger.sessions.get(event.session)
    if session is None:
        return [event]
    return [*_end_of_waiting(ledger, session, event.at, event.reason, ActionState.FAILED), event,
            *_end_of_forks(ledger, session, event.at)]


def _end_of_waiting(ledger: Ledger, session: SessionEntry, now: int, reason: str,
                    background_as: ActionState) -> list[ev.Event]:
    why = why_ended(session.spec.id, reason or session.closing)
    events: list[ev.Event] = [ev.ActionCancelled(now, action, why) for action in session.waiting]
    background = ledger.actions.get(session.background)
    if background is not None and not background.lease:
        events.append(ev.ActionCancelled(now, session.background, why, background_as))
    return events


def _end_of_forks(ledger: Ledger, session: SessionEntry, now: int) -> list[ev.Event]:
    why = f"origin: session {show(session.spec.id)} ended before its fork could begin"
    events: list[ev.Event] = []
    for fork, copied in session.forks.items():
        if not copied:
            events += _end_of_session(ledger, ev.SessionClosed(now, fork, why))
    return events


def _of_session_detached(state: SchedulerState, event: ev.SessionDetached) -> list[ev.Event]:
    """The end of what the client had submitted to the session, and then of its attachment. Actions
    with an idempotency key go on, because they outlive their client."""
    ledger = state.ledger
    session = ledger.sessions.get(event.session)
    if session is None or event.client not in session.attached:
        return []
    mine = [*session.waiting.of(event.client), *(ledger.leases[lease].action
                                                 for lease in session.leases)]
    why = f"its client detached from session {show(event.session)}"
    events: list[ev.Event] = []
    for number in mine:
        entry = ledger.actions.get(number)
        if client_of(number) == event.client and entry is not None and not entry.action.once \
                and entry.state not in ENDED and entry.forced_outcome is None:
            events.append(ev.ActionCancelled(event.at, number, why))
    return [*events, event]


def _of_action_cancelled(state: SchedulerState, event: ev.ActionCancelled) -> list[ev.Event]:
    """A cancelled grant of an endpoint ends at once: no worker has an attempt to kill."""
    ledger = state.ledger
    entry = ledger.actions.get(event.action)
    lease = ledger.leases.get(entry.lease) if entry is not None else None
    if lease is None or lease.node:
        return [event]
    outcome = Outcome(event.state, reason=event.reason)
    return [event, ev.LeaseFinished(event.at, lease.lease, outcome, True)]


def _of_lease_returned(state: SchedulerState, event: ev.LeaseReturned) -> list[ev.Event]:
    """The end of an action whose session has ended while the order for it was on its way: it cannot
    wait again.
    """
    ledger = state.ledger
    lease = ledger.leases.get(event.lease)
    if lease is None or not lease.session or lease.session in ledger.sessions \
            or lease.state is LeaseState.RELEASING \
            or ledger.actions[lease.action].forced_outcome is not None:
        return [event]
    why = f"session {show(lease.session)} ended before it could start"
    return [ev.ActionCancelled(event.at, lease.action, why), event]


# The events of an action that runs normally entail nothing else and are not in the table.
CONSEQUENCES: dict[type[ev.Event], Callable[[SchedulerState, Any], list[ev.Event]]] = {
    ev.BrokerStarted: _of_broker_started,
    ev.NodeJoined: _of_node_joined,
    ev.NodeLost: _of_node_lost,
    ev.NodesComplete: _of_nodes_complete,
    ev.SessionClosing: _of_session_closing,
    ev.SessionClosed: _of_session_closed,
    ev.SessionDetached: _of_session_detached,
    ev.ActionCancelled: _of_action_cancelled,
    ev.LeaseReturned: _of_lease_returned,
}
