"""Pure. What events do to the background action of a session (`policy/background`).

The action stands beside the session's other actions: it is not among those that wait in the session
or run there, so none of them waits for it, and a session that only has a background action is IDLE.

While another action of the session runs, background processes run on that action's CPUs. So the
background action gives up its CPUs when the other one is granted its own. One that still waits
leaves the ready queue meanwhile, and keeps its place in the order: otherwise a client that polls
its session often would never let it come first.
"""

from __future__ import annotations

from ...domain.action import Kind
from ...domain.decision import Decision, KillLease
from ...domain.ids import BROKER_COUNTER, COUNTER_BITS, client_of
from ...domain.outcome import Outcome
from ...domain.states import ActionState, SessionState
from ..state.ledger import ActionEntry, LeaseEntry, Ledger, SessionEntry
from ..state.scheduler_state import SchedulerState

_OWN = "an action of its session runs, and its processes run beside that"


def note_background(ledger: Ledger, entry: ActionEntry) -> SessionEntry:
    """Notes that a session has this background action, and returns the session."""
    action = entry.action
    owner, session = ledger.clients[client_of(action.id)], ledger.sessions[action.session]
    number = (action.id & (1 << COUNTER_BITS) - 1) - BROKER_COUNTER
    owner.background_actions = max(owner.background_actions, number + 1)
    session.background = action.id
    return session


def forget_background(ledger: Ledger, entry: ActionEntry, state: ActionState, held_ns: int
                      ) -> None:
    """Notes that the background action of a session has ended, after it held CPUs for so long."""
    session = ledger.sessions.get(entry.action.session)
    if session is not None:
        session.background = 0
        session.background_ran_ns = (
            session.background_ran_ns + held_ns if state is ActionState.PREEMPTED else 0)


def lend_background(ledger: Ledger, lease: LeaseEntry) -> None:
    """Notes that a background action holds CPUs."""
    ledger.background[lease.lease] = None


def displace_background(state: SchedulerState, session: SessionEntry, kind: Kind = Kind.EXEC
                        ) -> list[Decision]:
    """Takes the CPUs from the background processes of a session, or takes its background action out
    of the ready queue, because an action of this kind begins in the session. Files are read and
    written beside whatever runs there, so such an action takes no CPUs from it.
    """
    ledger = state.ledger
    entry = ledger.actions.get(session.background)
    if entry is None:
        return []
    if entry.action.id in ledger.ready:
        ledger.ready.remove(entry.action.id)
    if not entry.lease or entry.forced_outcome is not None or kind is Kind.FILE:
        return []
    entry.forced_outcome = Outcome(ActionState.PREEMPTED, reason=_OWN)
    lease = ledger.leases[entry.lease]
    return [KillLease(lease.node, lease.lease, ActionState.PREEMPTED, _OWN)]


def defer_cancellation(state: SchedulerState, entry: ActionEntry, outcome: Outcome) -> bool:
    """Whether the end of a waiting background action has to wait until its grant.

    If its client cancels it, its processes are to be killed, and only a lease reaches them.
    """
    session = state.ledger.sessions.get(entry.action.session)
    if outcome.state is not ActionState.CANCELLED or session is None or session.state not in (
            SessionState.IDLE, SessionState.BUSY):
        return False
    entry.forced_outcome = entry.forced_outcome or outcome
    return True


def forced_end(entry: ActionEntry, lease: LeaseEntry) -> list[Decision]:
    """The order to end an action that was cancelled before its grant."""
    why = entry.forced_outcome
    return [] if why is None else [KillLease(lease.node, lease.lease, why.state, why.reason)]
