"""Pure. Workers that come back to a broker which was started again: what goes on, and what ends.

The broker has its ledger from the journal, and the worker tells which leases and sandboxes it has.
Orders of the earlier broker may have been lost on their way. So each order that the ledger says the
worker should have is either repeated, which does no harm twice, or taken back. What happened on the
node meanwhile comes afterwards, as reports of the worker.

A node whose worker does not come back in time is lost, as any other node that fails.
"""

from __future__ import annotations

from collections.abc import Set

from ...domain import event as ev
from ...domain.decision import (
    CloseSession,
    Decision,
    KillLease,
    OpenSession,
    PackSession,
    ResizeLease,
)
from ...domain.outcome import Outcome
from ...domain.states import ActionState, LeaseState, SessionState
from ..state.ledger import LeaseEntry, Ledger, NodeEntry

_NOT_BACK = "its worker did not come back after the broker was started again"
_UNKNOWN = "the broker was started again and does not know this lease"
_END_LOST = "the broker was started again, and the node no longer knows how this ended"


def given_up(ledger: Ledger, now: int) -> list[ev.Event]:
    """The loss of each node for which the broker has waited long enough. O(nodes that are away)."""
    if not ledger.away:
        return []
    return [ev.NodeLost(now, node, _NOT_BACK) for node, until in ledger.away.items()
            if until <= now]


def next_given_up(ledger: Ledger) -> int:
    """When the wait for the next node is over (epoch ns); 0 for never."""
    return min(ledger.away.values(), default=0)


def awaited_node(ledger: Ledger, node: int, uid: str) -> int:
    """The node whose worker this is, if the broker waits for it; 0 if it does not.

    O(nodes that are away).

    Args:
        ledger: the scheduler's state.
        node: the number that the worker was given; 0 if it does not know it, because the broker
            ended before it could tell.
        uid: the worker's own name for itself; empty for none.
    """
    return next((number for number in ledger.away
                 if uid and ledger.nodes[number].uid == uid and node in (0, number)), 0)


def undone(ledger: Ledger, number: int, leases: Set[int], sessions: Set[int], now: int
           ) -> list[ev.Event]:
    """The events by which the ledger forgets what the worker of a node does not have.

    A lease that the worker does not hold, and whose end it does not tell, has never reached it: its
    action waits again. A session is lost if it was open and its sandbox is gone.

    Args:
        ledger: the scheduler's state.
        number: the node.
        leases: the leases that the worker holds, or whose end it tells.
        sessions: the sessions whose sandboxes it has, or whose end it tells.
        now: the broker's time, in epoch ns.
    """
    node = ledger.nodes[number]
    events: list[ev.Event] = []
    for entry in reversed(_leases_on(ledger, node)):
        if entry.lease not in leases:
            events.append(_end_of_unknown(ledger, entry, now))
    for session in node.sessions:
        state = ledger.sessions[session].state
        if session not in sessions and state is not SessionState.OPENING:
            events.append(ev.SessionClosed(
                now, session, "" if state is SessionState.CLOSING else
                f"node {node.spec.name}: its sandbox was gone when the broker was back"))
    return events


def _end_of_unknown(ledger: Ledger, lease: LeaseEntry, now: int) -> ev.Event:
    """The end of a lease that its worker does not know."""
    if lease.state is LeaseState.RELEASING:
        return ev.LeaseReleased(now, lease.lease)
    if lease.state is LeaseState.ACTIVE:  # only if the worker, too, has lost what it knew
        return ev.LeaseFinished(now, lease.lease,
                                Outcome(ActionState.NODE_FAIL, reason=_END_LOST), True)
    if lease.lease in ledger.background:  # its node asks for another one if it still wants one
        return ev.LeaseFinished(now, lease.lease, Outcome(ActionState.COMPLETED), True)
    return ev.LeaseReturned(now, lease.lease, True)


def repeated(ledger: Ledger, number: int, leases: Set[int], sessions: Set[int]
             ) -> list[Decision]:
    """The orders that the worker of a node may have missed; see `undone` for the arguments."""
    node = ledger.nodes[number]
    orders: list[Decision] = []
    for session in node.sessions:
        entry = ledger.sessions[session]
        if entry.state is SessionState.OPENING and session not in sessions:
            orders.append(OpenSession(number, entry.spec))
        elif entry.state is SessionState.CLOSING:
            orders.append(CloseSession(number, session))
        elif entry.state is SessionState.MOVING:
            orders.append(PackSession(number, session))
    orders += [CloseSession(number, session) for session in sessions
               if session not in node.sessions]
    for lease in _leases_on(ledger, node):
        action = ledger.actions.get(lease.action)
        if action is None or lease.state is LeaseState.RELEASING:
            continue
        if (end := action.forced_outcome) is not None:
            orders.append(KillLease(number, lease.lease, end.state, end.reason))
        elif lease.begun and lease.cores and not lease.reserved:
            orders.append(ResizeLease(number, lease.lease, lease.cores))
    orders += [KillLease(number, lease, ActionState.CANCELLED, _UNKNOWN)
               for lease in leases if not _is_on(ledger, lease, number)]
    return orders


def _leases_on(ledger: Ledger, node: NodeEntry) -> list[LeaseEntry]:
    """The leases of a node, those behind the first of each unit included, in order."""
    return [ledger.leases[each] for first in node.leases
            for each in ledger.leases[first].lease_queue]


def _is_on(ledger: Ledger, lease: int, node: int) -> bool:
    entry = ledger.leases.get(lease)
    return entry is not None and entry.node == node
