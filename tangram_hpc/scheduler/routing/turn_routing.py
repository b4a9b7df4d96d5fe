"""Pure. Which turn is routed next, as events; reads the rollout pools and changes nothing.

`plan` calls `route_next`, one event at a time, since each one changes the load that the next choice
looks at.
"""

from __future__ import annotations

from ...domain import event as ev
from ..state.ledger import Ledger


def route_next(ledger: Ledger, now: int) -> list[ev.Event]:
    """The next turn that can be routed, or the next closed service that is to be tried again, as an
    event. Where turns wait and no service is open, a closed one is tried at once."""
    for pool in ledger.rollouts.values():
        closed = pool.next_reopening()
        if closed is not None and (closed[0] <= now or pool.stranded):
            return [ev.RolloutServiceTried(now, pool.spec.name, closed[1])]
        found = pool.next()
        if found is not None:
            action, route = found
            to = pool.routed(route)
            return [ev.TurnRouted(now, action, to.service, to.wanted, to.bucket, to.how,
                                  to.move_ns)]
    return []


def next_retry(ledger: Ledger) -> int:
    """When a closed service is to be tried again (epoch ns); 0 for never."""
    return min((found[0] for pool in ledger.rollouts.values()
                if (found := pool.next_reopening()) is not None), default=0)
