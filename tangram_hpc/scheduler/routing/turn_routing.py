"""Routes waiting turns, one event at a time. Pure.

Each routed turn changes the load that the next choice looks at. So `route_next` returns one event,
which is applied before `route_next` is called again. It reads the rollout pools and changes
nothing.
"""

from __future__ import annotations

from ...domain import event as ev
from ..state.ledger import Ledger


def route_next(ledger: Ledger, now: int) -> list[ev.Event]:
    """Returns an event that routes the next turn, or one that tries a closed service again.

    A closed service is tried when its time is over, or at once if turns wait and no service can be
    called. An empty list means that nothing can be routed.
    """
    for pool in ledger.rollouts.values():
        closed = pool.next_reopening()
        if closed is not None and (closed[0] <= now or pool.stranded):
            return [ev.RolloutServiceTried(now, pool.spec.name, closed[1])]
        found = pool.next()
        if found is not None:
            action, route = found
            to = pool.describe(route)
            return [ev.TurnRouted(now, action, to.service, to.wanted, to.bucket, to.how,
                                  to.move_ns)]
    return []


def next_retry(ledger: Ledger) -> int:
    """Returns when a closed service is to be tried again, in epoch ns; 0 for never."""
    return min((found[0] for pool in ledger.rollouts.values()
                if (found := pool.next_reopening()) is not None), default=0)
