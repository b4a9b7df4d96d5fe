"""Pure. Short leases given ahead: who follows on a unit without its worker having to ask.

Law: a lease ahead takes the place of nobody: its action is the first in turn of all that wait for
CPUs on that node, it needs one CPU and nothing else, and what is before it on its unit is expected
to be over within AHEAD_NS. It holds nothing until the one before it is gone; a worker that cannot
begin it soon gives it back. Nodes whose worker takes no leases ahead never get one.
"""

from __future__ import annotations

from ..domain import event as ev
from ..domain.action import Action
from ..domain.states import NodeState
from .ending import Endings
from .ledger import Ledger, NodeEntry
from .queue import CPU, Shape, Walk

AHEAD_NS = 10_000_000  # of expected work on one unit
LEAST_NS = 20_000  # what any action costs besides its own work


def is_short(ledger: Ledger, action: Action) -> bool:
    """Whether it needs one CPU and nothing else, and is believed to end soon."""
    return (action.degrees == (1,) and action.key == "cpu" and not action.mem_mib
            and not action.gpus and 2 * ledger.estimator.believed(action)[1] <= AHEAD_NS)


def ahead(ledger: Ledger, now: int) -> list[ev.Event]:
    """Grants behind the leases of `ledger.short`: units on which too little is given ahead.

    Units that got enough leave it. O(units in it + grants).
    """
    events: list[ev.Event] = []
    if not ledger.ready.waits(CPU):
        return events
    share = 1 + len(ledger.ready) // max(1, len(ledger.short))
    by_node: dict[int, list[tuple[int, int]]] = {}
    for unit in ledger.short:
        by_node.setdefault(unit[0], []).append(unit)
    taken: set[int] = set()
    for number, units in by_node.items():
        if ledger.nodes[number].state is NodeState.UP:
            _fill(ledger, now, ledger.nodes[number], units, share, events, taken)
    return events


def _fill(ledger: Ledger, now: int, node: NodeEntry, units: list[tuple[int, int]], share: int,
          events: list[ev.Event], taken: set[int]) -> None:
    bays = [bay for home in (node.node, 0)
            if (bay := ledger.ready.bay(CPU, "cpu", home)) is not None]
    walk, fine, endings = Walk(bays), dict[Shape, int](), Endings(ledger, now)
    for unit in units:
        lease = ledger.leases[ledger.short[unit]]
        last, have = next(reversed(lease.chain)), len(lease.chain) - 1
        enough = have + share
        while have < enough and (head := walk.head()) is not None:
            action, shape = head
            if action in taken:
                walk.next()
                continue
            most = fine.get(shape)
            if most is None:
                most = _most(ledger, node, ledger.actions[action].action)
                most = fine[shape] = most if endings.fits(node, shape) else 0
            if have >= most:
                break
            taken.add(action)
            walk.next()
            lease_id = ledger.next_lease + len(events)
            attempt = ledger.actions[action].attempt + 1
            events.append(ev.LeaseGranted(now, lease_id, action, node.node, attempt, lease.cores,
                                          after=last))
            last, have = lease_id, have + 1


def _most(ledger: Ledger, node: NodeEntry, action: Action) -> int:
    """How many of this shape may be ahead on one unit."""
    if action.component not in ("", node.spec.component) or not is_short(ledger, action):
        return 0
    return min(node.ahead, AHEAD_NS // max(LEAST_NS, ledger.estimator.believed(action)[1]))
