"""Pure. When a copy of a service may be taken from calls that still wait for it.

Bringing a service to a block of GPUs costs a restore, during which the block computes nothing. If
the call that has waited longest could always take the next free block, then under load every block
would be restored for a single call and taken again at once: all calls would wait ever longer, and
nearly all GPU time would go to restores. Two limits prevent that.

* A *term* begins when a copy is brought to its block. Until it ends, the copy is not taken from its
  waiting calls. It lasts for at least TERM_LEAST restores after the restore itself, and further
  until every call that waited at its beginning was given to a copy, for TERM_MOST restores at most.
  So at most one part in 1 + TERM_LEAST of a block's time goes to restores that take a copy from its
  waiting calls.
* *Patience*: only a call whose service stands on no block that the call can use may take such a
  copy, and only after it has waited for `patience_ns`. That time grows with what serving one call
  of each waiting kind in turn would cost in restores, so services that are more than the GPUs do
  not spend their time on replacing each other.

Both limits are finite and a block that is chosen for a starved call is kept free for it, so every
call is served in the end.
"""

from __future__ import annotations

from collections.abc import Collection

from ...domain.service import service_of
from ..state.ledger import Ledger
from ..state.queue import ActionShape
from ..state.speed import run_ns
from .placers.waiting import OVERDUE_NS

TERM_LEAST, TERM_MOST = 3, 8  # in restores
TERM_UNIT_NS = 2_000_000_000  # TERM_MOST counts a shorter restore as this long
PATIENCE = 8  # in what one restore for each waiting kind costs, spread over all GPUs


def term_end_ns(since_ns: int, restore_ns: int, oldest_ns: int) -> int:
    """The end of the term of a copy.

    Args:
        since_ns: when the copy was brought to its block, epoch ns.
        restore_ns: what bringing its service to a block costs.
        oldest_ns: when the first call that waits for the copy was submitted, epoch ns.
    """
    begun = since_ns + restore_ns
    if oldest_ns <= since_ns:
        return begun + TERM_MOST * max(restore_ns, TERM_UNIT_NS)
    return begun + TERM_LEAST * restore_ns


def crowd(wants: Collection[ActionShape]) -> int:
    """The GPUs that one call of each of these kinds would take together."""
    return sum(degrees[0] for _, degrees in {(want.key, want.degrees) for want in wants})


def patience_ns(ledger: Ledger, want: ActionShape, crowd_gpus: int, gpus: int) -> int:
    """How long a call waits before it may take a copy from other calls, in ns.

    A call that needs several GPUs at once also costs the time in which its block is emptied, about
    one run. O(1).

    Args:
        ledger: what is known of the service and of its calls.
        want: the shape of the call.
        crowd_gpus: `crowd` of all kinds that wait.
        gpus: how many GPUs there are.
    """
    service, least = service_of(want.key), want.degrees[0]
    cost = ledger.services[service].restore_ns
    if least > 1:
        calls = ledger.demand.kinds[service, want.degrees]
        cost += run_ns(calls.work_ns, calls.serial, least)
    return max(OVERDUE_NS, PATIENCE * cost * crowd_gpus // max(1, gpus))
