"""Pure. Handlers of events about the broker itself: its starts and its stalls.

A broker that starts again continues an earlier one's journal. If the workers and clients of the
earlier broker may still be there, it waits for them: nodes are AWAY, clients are disconnected, and
actions whose payload the broker does not have are withheld. Otherwise they end by events of their
own, which `consequences` names. Estimates of run times and the quotas of endpoints stay.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.action import Kind
from ...domain.decision import Decision
from ...domain.states import ENDED, NodeState
from ..policy.session_life import gone_since, stalled
from ..state.ledger import Ledger
from ..state.scheduler_state import SchedulerState
from ..state.transitions import NODE_MOVES, move

_WITHOUT_PAYLOAD = (Kind.GRANT, Kind.BACKGROUND)
_GAP = 1 << 20


def on_broker_started(state: SchedulerState, event: ev.BrokerStarted) -> list[Decision]:
    """Counts a start of the broker and takes over its job and settings."""
    ledger = state.ledger
    ledger.starts += 1
    ledger.block_max = event.block_max
    ledger.complete = False  # the nodes of the job have yet to join
    ledger.told_ends.clear()  # a requeued job ends at another time
    ledger.allocs.own = event.job
    _clock_set(ledger, event.at)
    if event.await_until:
        _wait_for_all(ledger, event)
    state.dirty = True
    return []


def _clock_set(ledger: Ledger, now: int) -> None:
    """Goes on at `now`, which may be earlier than the last event, since the wall clock of a broker
    that was started again may have been set back. Nothing counts as begun in the future: a call
    that waits would not be overdue before the earlier time is reached again.
    O(endpoints + tenants + kinds of calls + GPUs + actions).
    """
    for endpoint in ledger.endpoints.values():
        endpoint.clock_set(now)
    ledger.tenants.clock_set(now)
    ledger.demand.clock_set(now)
    for node in ledger.held_nodes():
        node.gpus.clock_set(now)
    for entry in ledger.actions.values():
        if entry.state not in ENDED:
            entry.submitted_at = min(entry.submitted_at, now)


def _wait_for_all(ledger: Ledger, event: ev.BrokerStarted) -> None:
    """Waits for all nodes and clients that the earlier broker had. O(nodes + clients + actions)."""
    for node in ledger.held_nodes():
        if node.state is not NodeState.AWAY:
            node.state = move(NODE_MOVES, node.state, NodeState.AWAY, event)
        ledger.away[node.node] = event.await_until
    for client in ledger.by_uid.values():
        gone = ledger.disconnected.get(client)
        if gone is None or not gone.bye:
            ledger.disconnected[client] = gone_since(ledger, client, event.at, event.await_until)
    for number, entry in ledger.actions.items():
        if entry.state not in ENDED and entry.action.kind not in _WITHOUT_PAYLOAD \
                and not entry.action.once:
            entry.withheld = True
            if number in ledger.ready:
                ledger.ready.remove(number)
    # Orders that the journal lacks may have reached workers if the machine of the earlier broker
    # failed. Their leases must not get the numbers of new ones.
    ledger.next_lease += _GAP
    ledger.next_node += _GAP


def on_broker_stalled(state: SchedulerState, event: ev.BrokerStalled) -> list[Decision]:
    """Extends grace and idle times by the time in which the broker did not run."""
    stalled(state.ledger, event)
    return []
