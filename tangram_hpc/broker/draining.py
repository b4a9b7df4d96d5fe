"""The part of the broker that ends slowly: first nothing more is lent, then nothing runs any more.

Law: what runs is never ended here; who waits for it is told how long he may. A broker whose place
another one has taken ends at once, without a word to anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..domain import event as ev
from ..domain.states import NodeState
from ..ports import Journal, Timer
from ..scheduler.scheduler import Scheduler

_POLL_S = 0.1


class Draining:
    """See `Broker`."""

    scheduler: Scheduler
    draining = ""  # why nothing more is lent of any node
    ended: bool
    _timer: Timer
    _now: Callable[[], int]
    _happen: Callable[..., None]
    _touch: Callable[[], None]
    stop: Callable[[str], None]
    _journal: Journal
    _on_end: Callable[[], None]
    _workers: dict[int, Any]  # the driver's conversations, each with its link
    _clients: dict[int, Any]

    def drain(self, reason: str) -> None:
        """Lends no more of any node, whoever joins, and asks for none; what runs goes on to its
        end."""
        self.draining = reason
        policy = self.scheduler.ledger.allocs.policy
        if policy.max_nodes:
            self._happen(ev.AllocationsAllowed(self._now(), policy.closed()))
        for node in self.scheduler.ledger.held_nodes():
            self._drain_node(node.node, reason)
        self._touch()

    def _drain_node(self, number: int, reason: str) -> None:
        """Lends no more of a node, also when its allocation's end, for which it may be drained
        already, turns out to be later."""
        node = self.scheduler.ledger.nodes[number]
        if node.state is NodeState.UP or node.for_end:
            self._happen(ev.NodeDraining(self._now(), number, reason))

    def superseded(self) -> bool:
        """Whether another broker has taken this one's place. Then this one ends here: it commits
        nothing and answers nobody; who was connected looks for the other one. Satellites that wait
        in Slurm's queue are the other one's now."""
        if not self._journal.superseded():
            return False
        if not self.ended:
            self.ended = True
            for talk in [*self._workers.values(), *self._clients.values()]:
                talk.link.close()
            self._on_end()
        return True

    def end(self, reason: str, patience_s: float) -> None:
        """As `stop`; a broker that was drained waits for what still runs, but no longer than so."""
        if not self.draining or not self.scheduler.ledger.leases or patience_s <= 0:
            self.stop(reason)
        elif not self.ended:
            self._timer.after(_POLL_S, lambda: self.end(reason, patience_s - _POLL_S))
