"""Pure. A broker that begins again with an earlier one's journal: what of its state goes on.

Law: nobody of the earlier broker's time is there any more: its nodes are lost, its sessions with
them, its clients gone, and what they had submitted ends. Only actions that have a name of their own
(`Action.once`), outside sessions, wait again, at their old turn; such an attempt costs none. What
was learned of run times and of endpoints stays.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.action import Kind
from ...domain.decision import Decision
from ...domain.states import ENDED, ActionState, NodeState
from ..state.ledger import ActionEntry
from .node_facts import NodeFacts
from .quota_facts import QuotaFacts

_WHY = "the broker was started again"


class Restart(NodeFacts, QuotaFacts):
    """Handlers of the broker's own starts."""

    def _broker_started(self, event: ev.BrokerStarted) -> list[Decision]:
        self.ledger.starts += 1
        self.ledger.block_max = event.block_max
        self.ledger.complete = False  # its nodes have yet to join
        self.ledger.told_ends.clear()  # a requeued job ends at another time
        self.dirty = True
        return super()._broker_started(event)

    def _restarted(self, fact: ev.BrokerStarted) -> list[ev.Event]:
        """A start and what it entails; of a job's first broker nothing. O(what was open)."""
        ledger, at = self.ledger, fact.at
        events: list[ev.Event] = [fact]
        if not ledger.starts:
            return events
        for entry in ledger.actions.values():
            if entry.state not in ENDED and not _goes_on(entry):
                cancelled = ev.ActionCancelled(at, entry.action.id, _WHY, ActionState.NODE_FAIL)
                events += self._end_of_grant(cancelled)
        for node in ledger.nodes.values():
            if node.state is not NodeState.DOWN:
                events += self._loss_of_node(ev.NodeLost(at, node.node, _WHY), again=True)
        for session in ledger.opening:
            events += self._closed(ev.SessionClosed(at, session, _WHY))
        events += [ev.ClientExpired(at, client) for client in ledger.by_uid.values()]
        return events


def _goes_on(entry: ActionEntry) -> bool:
    action = entry.action
    return bool(action.once) and not action.session and action.kind is not Kind.GRANT \
        and entry.doomed is None
