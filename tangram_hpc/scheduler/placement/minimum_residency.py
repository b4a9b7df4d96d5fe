"""Decides when a service copy may be parked although calls still wait for it. Pure.

Bringing a service to a block of GPUs costs a restore, during which the block computes nothing. If
the call that has waited longest could always take the next free block, then under load every block
would be restored for a single call and taken again at once: all calls would wait ever longer, and
nearly all GPU time would go to restores. Two limits prevent that (decision 0045).

- The *minimum residency* begins when a copy is brought to its block. Until it ends, the copy is not
  taken from its waiting calls. It lasts for at least RESIDENCY_MIN restores after the restore
  itself, and further until every call that waited at its beginning was given to a copy, for at most
  RESIDENCY_MAX restores. So at most one part in 1 + RESIDENCY_MIN of a block's time goes to
  restores that take a copy from its waiting calls.
- The *starvation limit*: a copy with waiting calls is taken only for a call whose service has no
  copy on a block that the call can use, and only after that call has waited for
  `starvation_limit_ns`. The limit grows with the time of the restores that serving one call of each
  waiting kind in turn would need. So services that together need more GPUs than there are do not
  spend their time on replacing each other.

Where several tenants use the GPUs, a tenant that holds less than its part may take copies of those
that hold more before either limit (`placers.gpu_parts`).

Both limits are finite, and a block that is chosen for a starved call is kept free for it, so every
call is served in the end.
"""

from __future__ import annotations

from collections.abc import Collection

from ...domain.service import service_of
from ..state.ledger import Ledger
from ..state.queue import ActionShape
from ..state.speed import run_ns
from .placers.waiting import OVERDUE_NS

RESIDENCY_MIN, RESIDENCY_MAX = 3, 8  # in times of a restore
RESIDENCY_UNIT_NS = 2_000_000_000  # a shorter restore counts as this long for RESIDENCY_MAX
STARVATION_FACTOR = 8  # times the cost of one restore per waiting kind, spread over all GPUs


def residency_end_ns(since_ns: int, restore_ns: int, oldest_ns: int) -> int:
    """Returns the end of the minimum residency of a copy, in epoch ns.

    Args:
        since_ns: when the copy was brought to its block, in epoch ns.
        restore_ns: the time that bringing its service to a block takes, in ns.
        oldest_ns: when the oldest call that waits for the copy was submitted, in epoch ns.
    """
    begun = since_ns + restore_ns
    if oldest_ns <= since_ns:
        return begun + RESIDENCY_MAX * max(restore_ns, RESIDENCY_UNIT_NS)
    return begun + RESIDENCY_MIN * restore_ns


def gpu_demand(wants: Collection[ActionShape]) -> int:
    """Returns the GPUs that one call of each kind would take, each on its smallest degree."""
    return sum(degrees[0] for _, degrees in {(want.key, want.degrees) for want in wants})


def starvation_limit_ns(ledger: Ledger, want: ActionShape, demand_gpus: int, gpus: int) -> int:
    """Returns how long a call waits before it may take a copy from other calls, in ns. O(1).

    A call that needs several GPUs at once also costs the time in which its block is emptied, which
    is about one run.

    Args:
        ledger: knows the service and its calls.
        want: the shape of the call.
        demand_gpus: `gpu_demand` of all kinds that wait.
        gpus: the number of GPUs of all nodes.
    """
    service, least = service_of(want.key), want.degrees[0]
    cost = ledger.services[service].restore_ns
    if least > 1:
        calls = ledger.demand.kinds[service, want.degrees]
        cost += run_ns(calls.work_ns, calls.serial, least)
    return max(OVERDUE_NS, STARVATION_FACTOR * cost * demand_gpus // max(1, gpus))
