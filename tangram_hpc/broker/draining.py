"""The part of the broker that ends slowly: first nothing more is lent, then nothing runs any more.

Law: what runs is never ended here; who waits for it is told how long he may.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core.scheduler import Scheduler
from ..domain import event as ev
from ..domain.states import NodeState
from ..ports import Timer

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

    def end(self, reason: str, patience_s: float) -> None:
        """As `stop`; a broker that was drained waits for what still runs, but no longer than so."""
        if not self.draining or not self.scheduler.ledger.leases or patience_s <= 0:
            self.stop(reason)
        elif not self.ended:
            self._timer.after(_POLL_S, lambda: self.end(reason, patience_s - _POLL_S))
