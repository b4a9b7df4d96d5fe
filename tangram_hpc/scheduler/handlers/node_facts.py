"""Pure. The part of the scheduler that applies facts about nodes.

Law: as the scheduler's: facts in, orders out, and only `handle` calls them. A node that is drained
keeps what runs on it and gets nothing more; one that is lost takes its leases and sessions along.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.decision import Decision
from ...domain.outcome import Outcome
from ...domain.states import ActionState, AllocState, LeaseState, NodeState
from ..placement.placers.base import Placer
from ..policy.admission import misfit, misfit_of_session
from ..policy.ending import lends_until, next_end
from ..state.core_sets import CoreSet
from ..state.gpu_blocks import GpuSet
from ..state.ledger import Ledger, NodeEntry
from ..state.transitions import NODE_MOVES, move
from .alloc_facts import AllocFacts
from .rollout_facts import RolloutFacts
from .service_facts import prepare
from .session_facts import SessionFacts


class NodeFacts(SessionFacts, AllocFacts, RolloutFacts):
    """Handlers of the facts of nodes."""

    placer: Placer

    def _node_joined(self, event: ev.NodeJoined) -> list[Decision]:
        spec, ledger = event.spec, self.ledger
        said, told = ledger.told_ends.get(spec.allocation, (0, 0))
        if said and said == spec.ends_at_ns and not spec.end_by_user:
            spec = spec.ending_at(told)  # a worker that comes back says the old end
        until = lends_until(spec.ends_at_ns, event.at, ledger.margin_ns)
        ledger.nodes[event.node] = NodeEntry(
            event.node, spec, CoreSet(spec.cores, spec.neighbours), GpuSet(spec.gpus),
            spec.mem_mib, spec.ahead, joined_at=event.at, lends_until=until, drain_at=until,
            said_end=event.spec.ends_at_ns)
        ledger.next_node = max(ledger.next_node, event.node + 1)
        ledger.next_end = next_end(ledger)
        self._alloc_joined(event)
        self._look_at_services()
        self.dirty = True
        return prepare(ledger, event)

    def _node_draining(self, event: ev.NodeDraining) -> list[Decision]:
        node = self.ledger.nodes[event.node]
        if node.state is NodeState.UP:
            node.state = move(NODE_MOVES, node.state, NodeState.DRAINING, event)
            node.draining, node.for_end = event.reason, event.for_end
            self.ledger.draining[event.node] = None
            self.ledger.next_end = next_end(self.ledger)
            self._drained(node)
            self._look_at_services()
        elif node.for_end and not event.for_end:  # a second reason, which a later end does not undo
            node.draining, node.for_end = event.reason, False
        return []

    def _end_asked(self, event: ev.AllocationEndAsked) -> list[Decision]:
        ledger = self.ledger
        for node in _nodes_of(ledger, event.allocation):
            node.drain_at = max(node.lends_until, event.until)
        ledger.next_end = next_end(ledger)
        return []

    def _end_told(self, event: ev.AllocationEndTold) -> list[Decision]:
        """What was drained for its end lends again where the end is later; sessions, actions and
        moves that are still under way go on. O(nodes)."""
        ledger = self.ledger
        for node in _nodes_of(ledger, event.allocation):
            ledger.told_ends[event.allocation] = (node.said_end, event.ends_at_ns)
            node.spec = node.spec.ending_at(event.ends_at_ns)
            node.lends_until = lends_until(event.ends_at_ns, node.joined_at, ledger.margin_ns)
            node.drain_at = node.lends_until
            node.news += 1
            if node.for_end and node.lends_until > event.at:
                node.state = move(NODE_MOVES, node.state, NodeState.UP, event)
                node.draining, node.for_end = "", False
                del ledger.draining[node.node]
        ledger.news += 1
        ledger.next_end = next_end(ledger)
        self._look_at_services()
        self.dirty = True
        return []

    def _drained(self, node: NodeEntry) -> None:
        """A lease or session of this node is gone; it may have been the last."""
        if node.state is NodeState.DRAINING and not node.leases and not node.sessions:
            node.state = move(NODE_MOVES, node.state, NodeState.DRAINED, node.spec)

    def _node_lost(self, event: ev.NodeLost) -> list[Decision]:
        node = self.ledger.nodes[event.node]
        node.state = move(NODE_MOVES, node.state, NodeState.DOWN, event)
        node.for_end = False
        self._alloc_left(event)
        self.ledger.draining.pop(event.node, None)
        self.ledger.next_end = next_end(self.ledger)
        self._look_at_services(node)
        return []

    def _loss_of_node(self, fact: ev.NodeLost, again: bool = False) -> list[ev.Event]:
        """`again`: what has a name of its own (`Action.once`) is sent back, not failed."""
        ledger, node = self.ledger, self.ledger.nodes[fact.node]
        outcome = Outcome(ActionState.NODE_FAIL, reason=f"node {node.spec.name}: {fact.reason}")
        events: list[ev.Event] = [fact]
        for lease in node.leases:
            entry = ledger.leases[lease]
            for later in list(entry.chain)[:0:-1]:
                events.append(ev.LeaseFinished(fact.at, later, outcome, True)
                              if ledger.leases[later].session
                              else ev.LeaseReturned(fact.at, later))
            if entry.state is LeaseState.RELEASING:
                events.append(ev.LeaseReleased(fact.at, lease))
                continue
            back = again and not entry.session and bool(ledger.actions[entry.action].action.once)
            events.append(ev.LeaseFinished(
                fact.at, lease, Outcome(ActionState.PREEMPTED, reason=outcome.reason)
                if back else outcome, True))
        for session in node.sessions:
            events += self._closed(ev.SessionClosed(fact.at, session, outcome.reason))
        return events

    def _nodes_complete(self, event: ev.NodesComplete) -> list[Decision]:
        self.ledger.complete = True
        self._look_at_services()
        return []

    def _never_feasible(self, now: int) -> list[ev.Event]:
        ledger, events = self.ledger, list[ev.Event]()
        for session in ledger.opening:
            spec = ledger.sessions[session].spec
            if why := misfit_of_session(ledger, self.placer, spec):
                events += self._closed(ev.SessionClosed(now, session, why, True))
        for entry in ledger.actions.values():
            if entry.state is ActionState.PENDING:
                why = misfit(ledger, self.placer, entry.action, ledger.held_nodes())
                if why:
                    events.append(ev.ActionCancelled(now, entry.action.id, why,
                                                     ActionState.FAILED))
        return events


def _nodes_of(ledger: Ledger, allocation: str) -> list[NodeEntry]:
    """The nodes of an allocation that are still held and whose end is Slurm's to say. One that is
    being given back is left out: it is drained for more than its end. O(nodes)."""
    entry = ledger.allocs.entries.get(ledger.allocs.by_job.get(allocation, 0))
    if not allocation or (entry is not None and entry.state is AllocState.ENDING):
        return []
    return [n for n in ledger.held_nodes()
            if n.spec.allocation == allocation and not n.spec.end_by_user]
