"""Pure. Handlers of events about nodes and about the ends of the allocations that they belong to.

Actions and sessions on a drained node go on, and no others start there. A node that is drained only
because its allocation ends (`NodeEntry.for_end`) lends again when Slurm reports a later end; one
that is drained for any other reason does not. What ends with a lost node is listed in
`consequences`.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.decision import Decision
from ...domain.states import AllocState, NodeState
from ..policy.ending import lends_until, next_end
from ..state.core_sets import CoreSet
from ..state.gpu_blocks import GpuSet
from ..state.ledger import LOST_MAX, Ledger, NodeEntry
from ..state.scheduler_state import SchedulerState
from ..state.transitions import NODE_MOVES, move
from .allocation_events import node_came, node_left
from .rollout_events import update_services
from .service_events import prepare


def on_node_joined(state: SchedulerState, event: ev.NodeJoined) -> list[Decision]:
    """Adds a node with all of its units free, and lets it prepare the declared services."""
    spec, ledger = event.spec, state.ledger
    said, told = ledger.told_ends.get(spec.allocation, (0, 0))
    if said and said == spec.ends_at_ns and not spec.end_by_user:
        spec = spec.ending_at(told)  # a worker that comes back reports the old end
    until = lends_until(spec.ends_at_ns, event.at, ledger.margin_ns)
    ledger.nodes[event.node] = NodeEntry(
        event.node, spec, CoreSet(spec.cores, spec.neighbours), GpuSet(spec.gpus),
        spec.mem_mib, spec.ahead, joined_at=event.at, lends_until=until, drain_at=until,
        said_end=event.spec.ends_at_ns, uid=event.uid)
    ledger.next_node = max(ledger.next_node, event.node + 1)
    ledger.next_end = next_end(ledger)
    node_came(ledger, event)
    update_services(ledger)
    state.dirty = True
    return prepare(ledger, event.node)


def on_node_rejoined(state: SchedulerState, event: ev.NodeRejoined) -> list[Decision]:
    """Lends a node again whose worker came back, unless it is to be drained."""
    ledger = state.ledger
    node = ledger.nodes[event.node]
    node.state = move(NODE_MOVES, node.state, NodeState.UP, event)
    del ledger.away[event.node]
    if node.draining:
        node.state = move(NODE_MOVES, node.state, NodeState.DRAINING, event)
        mark_drained(node)
    node.revision += 1
    ledger.revision += 1
    ledger.next_end = next_end(ledger)
    update_services(ledger)
    state.dirty = True
    return prepare(ledger, event.node)


def on_node_draining(state: SchedulerState, event: ev.NodeDraining) -> list[Decision]:
    """Stops lending units of a node."""
    ledger = state.ledger
    node = ledger.nodes[event.node]
    if node.state is NodeState.UP or (node.state is NodeState.AWAY and not node.draining):
        if node.state is NodeState.UP:  # else it is drained when its worker comes back
            node.state = move(NODE_MOVES, node.state, NodeState.DRAINING, event)
        node.draining, node.for_end = event.reason, event.for_end
        ledger.draining[event.node] = None
        ledger.next_end = next_end(ledger)
        mark_drained(node)
        update_services(ledger)
        state.dirty = True  # `static:K` divides the GPUs of the other nodes anew
    elif node.for_end and not event.for_end:  # this drain is not undone
        node.draining, node.for_end = event.reason, False
    return []


def on_allocation_end_asked(state: SchedulerState, event: ev.AllocationEndAsked) -> list[Decision]:
    """Lets the drain of an allocation's nodes wait for Slurm's answer, for a bounded time."""
    ledger = state.ledger
    for node in _nodes_of(ledger, event.allocation):
        node.drain_at = max(node.lends_until, event.until)
    ledger.next_end = next_end(ledger)
    return []


def on_allocation_end_told(state: SchedulerState, event: ev.AllocationEndTold) -> list[Decision]:
    """Sets the end that Slurm reports. Nodes that were drained for an earlier end lend again; their
    sessions, actions and moves go on. O(nodes).
    """
    ledger = state.ledger
    for node in _nodes_of(ledger, event.allocation):
        ledger.told_ends[event.allocation] = (node.said_end, event.ends_at_ns)
        node.spec = node.spec.ending_at(event.ends_at_ns)
        node.lends_until = lends_until(event.ends_at_ns, node.joined_at, ledger.margin_ns)
        node.drain_at = node.lends_until
        node.revision += 1
        if node.for_end and node.lends_until > event.at:
            if node.state is not NodeState.AWAY:
                node.state = move(NODE_MOVES, node.state, NodeState.UP, event)
            node.draining, node.for_end = "", False
            del ledger.draining[node.node]
    ledger.revision += 1
    ledger.next_end = next_end(ledger)
    update_services(ledger)
    state.dirty = True
    return []


def on_node_lost(state: SchedulerState, event: ev.NodeLost) -> list[Decision]:
    """Marks a node as down. Its leases and sessions end by events of their own, which come before
    the next node is lost and another one may be forgotten.
    """
    ledger = state.ledger
    node = ledger.nodes[event.node]
    node.state = move(NODE_MOVES, node.state, NodeState.DOWN, event)
    node.for_end = False
    node_left(ledger, event)
    ledger.draining.pop(event.node, None)
    ledger.away.pop(event.node, None)
    ledger.lost[event.node] = None
    if len(ledger.lost) > LOST_MAX:
        oldest = next(iter(ledger.lost))
        del ledger.lost[oldest], ledger.nodes[oldest]
    ledger.next_end = next_end(ledger)
    update_services(ledger, node)
    state.dirty = True  # as for a drain
    return []


def on_nodes_complete(state: SchedulerState, event: ev.NodesComplete) -> list[Decision]:
    """All expected nodes have joined: from now on an infeasible action is recognised."""
    state.ledger.complete = True
    update_services(state.ledger)
    return []


def mark_drained(node: NodeEntry) -> None:
    """Marks a draining node as DRAINED once it has no lease and no session any more."""
    if node.state is NodeState.DRAINING and not node.leases and not node.sessions:
        node.state = move(NODE_MOVES, node.state, NodeState.DRAINED, node.spec)


def _nodes_of(ledger: Ledger, allocation: str) -> list[NodeEntry]:
    """The nodes of an allocation that are still held and whose end Slurm decides. An allocation
    that is being given back has none: its nodes are drained for more than its end. O(nodes)."""
    entry = ledger.allocs.entries.get(ledger.allocs.by_job.get(allocation, 0))
    if not allocation or (entry is not None and entry.state is AllocState.ENDING):
        return []
    return [n for n in ledger.held_nodes()
            if n.spec.allocation == allocation and not n.spec.end_by_user]
