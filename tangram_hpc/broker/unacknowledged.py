"""Results whose clients have not acknowledged them: workers keep them for the next broker.

The broker keeps the payloads of such results in memory (`client_outbox`), and they would be lost if
the broker died. So the worker on which an action ended keeps its result too, until the broker
confirms that nobody needs it any more. A broker that is started again knows from its journal how
each action ended, and gets the payload again when the worker comes back.

Confirmations are not urgent. They travel with the next orders to a worker, or after a while.

A result whose node is lost before its worker came back, or that its worker no longer has, cannot be
had again. A client that lacks it submits its action again when it connects; it is then told that
the node failed, although the action had ended, and accounting says the same (`ActionCancelled`). A
client that has the result, and whose acknowledgement was lost or on its way, keeps it: it does not
submit the action again, and the Ping that follows what it submits again acknowledges it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..domain.decision import ReplyToClient
from ..domain.event import ActionCancelled
from ..domain.ids import client_of
from ..domain.states import ActionState
from ..protocol import message as ms
from ..protocol.frame import Buffer
from ..scheduler.state.ledger import Ledger
from .client_outbox import ClientOutbox
from .peers import Peers

RESULT_LOST = "it had ended, but its result was lost with its node"


def result_of(ledger: Ledger, reply: ReplyToClient, n: int) -> ms.ActionResult:
    """Returns the message that tells a client how an action ended; `n` is 1 if a payload follows.
    The name of a node that was lost long ago is not known any more.
    """
    node = ledger.nodes.get(reply.node)
    return ms.ActionResult(reply.action, reply.outcome, node.spec.name if node is not None else "",
                           reply.cores, reply.attempt, reply.queue_ns, reply.held_ns, n,
                           reply.grants, reply.route)


def loss_of_result(now: int, action: int) -> ActionCancelled:
    """Returns the event that the result of an action that has ended was lost with its node."""
    return ActionCancelled(now, action, RESULT_LOST, ActionState.NODE_FAIL)


class UnacknowledgedResults:
    """What workers keep for the next broker, and what this broker awaits of them.

    Args:
        ledger: the scheduler's state.
        peers: the connections, which carry the confirmations.
        outbox: keeps results for clients.
    """

    def __init__(self, ledger: Ledger, peers: Peers, outbox: ClientOutbox) -> None:
        self._ledger, self._peers, self._outbox = ledger, peers, outbox
        self._awaited: dict[int, tuple[int, int]] = {}  # by lease: its action and its node
        self._wanted: set[int] = set()  # ended actions that their clients have submitted again
        self._lost: set[int] = set()  # actions whose results are lost and were not asked for

    # ---- after another start of the broker -----------------------------------------------------

    def resume(self, spooled: Callable[[str], Buffer | None]) -> list[ms.ActionResult]:
        """Takes over the results that clients had not acknowledged, and returns those of nodes
        that have no payload. O(actions that have ended).

        Args:
            spooled: the payload that is kept for an idempotency key; None if there is none.
        """
        bare = []
        for entry in self._ledger.actions.values():
            reply = entry.reply
            if reply is None:
                continue
            payload = spooled(entry.action.once) if entry.action.once else None
            if payload is not None:
                self._keep(reply, payload)
            elif not reply.node or not reply.outcome.returned:
                result = self._keep(reply, None)
                bare += [result] if reply.node else []
            elif reply.node in self._ledger.away:
                self._awaited[entry.ended_lease] = entry.action.id, reply.node
            else:
                self._lost.add(entry.action.id)
        return bare

    def again(self, node: int, lease: int, payload: Buffer | None) -> ms.ActionResult | None:
        """Takes a result that a worker sends for a lease that is over. Returns it if this broker
        awaits it; otherwise nobody needs it.
        """
        action, where = self._awaited.get(lease, (0, 0))
        entry = self._ledger.actions.get(action) if where == node else None
        if where == node:
            del self._awaited[lease]
        if entry is None or entry.reply is None:
            self._peers.confirm(node, lease)
            return None
        return self._keep(entry.reply, payload)

    def not_held(self, node: int, held: Collection[int] = ()) -> list[int]:
        """Ends the wait for those results of a node that are not of the leases in `held`, and
        returns the actions whose clients lack them. O(results that are awaited).

        A worker that comes back names the leases that it holds. It may have had a confirmation of
        a broker whose disk then lost the acknowledgement of the client.
        """
        return [action for lease, (_, where) in list(self._awaited.items())
                if where == node and lease not in held for action in self.end_wait(node, lease)]

    def end_wait(self, node: int, lease: int) -> list[int]:
        """Ends the wait for the result of a lease, because nothing of the lease is left on its
        node. Returns its action if the client lacks the result."""
        action, where = self._awaited.get(lease, (0, 0))
        if where != node:
            return []
        del self._awaited[lease]
        if action in self._wanted:
            return [action]
        if action in self._ledger.actions:
            self._lost.add(action)
        return []

    def asked_again(self, action: int) -> bool:
        """Notes that a client has submitted an action again that has ended, because it lacks the
        result. Returns whether that is lost.
        """
        self._wanted.add(action)
        return action in self._lost

    def lost_but_held(self, client: int) -> tuple[int, ...]:
        """Returns the actions of a client whose results are lost here, and which the client has.

        It may be called when a Ping of the client arrives: on a new connection the client first
        submits again all actions whose results it lacks. O(lost results).
        """
        return tuple(action for action in self._lost
                     if client_of(action) == client and action not in self._wanted)

    def _keep(self, reply: ReplyToClient, payload: Buffer | None) -> ms.ActionResult:
        result = result_of(self._ledger, reply, 0 if payload is None else 1)
        self._outbox.keep(result, payload)
        self._peers.send_to_client(client_of(reply.action), result, payload)
        return result

    # ---- confirmations -------------------------------------------------------------------------

    def ended(self, node: int, lease: int, action: int) -> None:
        """Confirms the result of a lease at once, unless a client has yet to acknowledge it: its
        action waits again, or nobody waits for it.
        """
        entry = self._ledger.actions.get(action)
        if entry is None or entry.ended_lease != lease:
            self._peers.confirm(node, lease)

    def acknowledged(self, actions: Collection[int]) -> None:
        """Confirms the results of actions whose client has them, or will never fetch them."""
        if self._wanted or self._lost:
            self._wanted.difference_update(actions)
            self._lost.difference_update(actions)
        for action in actions:
            entry = self._ledger.actions.get(action)
            if (entry is not None and entry.ended_lease and entry.reply is not None
                    and entry.reply.node):
                self._peers.confirm(entry.reply.node, entry.ended_lease)
