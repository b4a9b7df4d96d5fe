"""Pure. Short leases given ahead: who follows on a unit without its worker having to ask.

Law: a lease ahead takes the place of nobody: its action is the first in turn of all that wait for
CPUs on that node, it needs one CPU and nothing else, and what is before it on its unit is expected
to be over within PREFETCH_NS. It holds nothing until the one before it is gone; a worker that
cannot begin it soon gives it back. Nodes whose worker takes no leases ahead never get one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...domain import event as ev
from ...domain.action import Action
from ...domain.states import NodeState
from ..policy.ending import Endings
from ..state.ledger import LeaseEntry, Ledger, NodeEntry
from ..state.queue import CPU, ActionShape, fair_walk

PREFETCH_NS = 10_000_000  # of expected work on one unit
LEAST_NS = 20_000  # what any action costs besides its own work
# While several clients send actions, whoever comes next waits for all that is given ahead on its
# unit, and on a busy machine each of those takes many times LEAST_NS. So no more is given than ends
# in SHARED_NS at the pace at which leases ahead really ended on that node. (A fixed bound is either
# too high there, or leaves units idle between two turns of the broker: 32 halved the throughput.)
SHARED_NS, SHARED_MIN = 10_000_000, 16
PACE = 128  # leases over which that pace is averaged
RECENT_NS = 1_000_000_000  # a client that sent nothing for so long is not one of them


@dataclass(slots=True)
class _Tail:
    """The end of a chain: its last lease, and how many are and may be ahead."""

    cores: tuple[int, ...]
    last: int
    have: int
    enough: int


def is_short(ledger: Ledger, action: Action) -> bool:
    """Whether it needs one CPU and nothing else, and is believed to end soon."""
    return (action.degrees == (1,) and action.key == "cpu" and not action.mem_mib
            and not action.gpus and 2 * ledger.estimator.estimate(action)[1] <= PREFETCH_NS)


def prefetch(ledger: Ledger, now: int) -> list[ev.Event]:
    """Grants behind the leases of `ledger.short`: units on which too little is given ahead.

    Units that got enough leave it. O(clients + units in it + grants).
    """
    events: list[ev.Event] = []
    if not ledger.ready.waits(CPU):
        return events
    share = 1 + len(ledger.ready) // max(1, len(ledger.short))
    by_node: dict[int, list[tuple[int, int]]] = {}
    for unit in ledger.short:
        by_node.setdefault(unit[0], []).append(unit)
    taken: set[int] = set()
    shared = sum(now - each.active_at < RECENT_NS for each in ledger.clients.values()) > 1
    for number, units in by_node.items():
        node = ledger.nodes[number]
        if node.state is NodeState.UP:
            depth = node.prefetch_max if not shared else max(
                SHARED_MIN, SHARED_NS // max(LEAST_NS, node.short_lease_gap_ns))
            _fill(ledger, now, node, units, share, depth, events, taken)
    return events


def _fill(ledger: Ledger, now: int, node: NodeEntry, units: list[tuple[int, int]], share: int,
          depth: int, events: list[ev.Event], taken: set[int]) -> None:
    ready = ledger.ready
    shards = [shard for home in (node.node, 0) for shard in ready.shards_at(CPU, "cpu", home)]
    walk, fine, endings = fair_walk(shards), dict[ActionShape, int](), Endings(ledger, now)
    tails = {unit: _tail(ledger.leases[ledger.short[unit]], share) for unit in units}
    while tails and (head := walk.head()) is not None:
        action, shape = head
        if action in taken:
            walk.next()
            continue
        entry = ledger.actions[action]
        most = fine.get(shape)
        if most is None:
            most = _most(ledger, node, entry.action, depth)
            most = fine[shape] = most if endings.fits(node, shape) else 0
        unit = _unit_for(ledger, entry.action, node, tails)
        tail = tails[unit]
        if tail.have >= min(most, tail.enough):
            del tails[unit]
            continue
        taken.add(action)
        walk.next()
        lease_id = ledger.next_lease + len(events)
        events.append(ev.LeaseGranted(now, lease_id, action, node.node, entry.attempt + 1,
                                      tail.cores, after=tail.last))
        tail.last, tail.have = lease_id, tail.have + 1


def _tail(lease: LeaseEntry, share: int) -> _Tail:
    have = len(lease.lease_queue) - 1
    return _Tail(lease.cores, next(reversed(lease.lease_queue)), have, have + share)


def _unit_for(ledger: Ledger, action: Action, node: NodeEntry, tails: dict[tuple[int, int], _Tail]
              ) -> tuple[int, int]:
    """Where its session ran last, if there is room: its init is still warm there, and bound to it;
    else the first that has room."""
    session = ledger.sessions.get(action.session)
    if session is not None and session.last_cores:
        last = node.node, session.last_cores[0]
        if last in tails:
            return last
    return next(iter(tails))


def _most(ledger: Ledger, node: NodeEntry, action: Action, most: int) -> int:
    """How many of this shape may be ahead on one unit, of `most` of any shape."""
    if not node.spec.serves(action.component) or not is_short(ledger, action):
        return 0
    work_ns = ledger.estimator.estimate(action)[1]
    return min(node.prefetch_max, most, PREFETCH_NS // max(LEAST_NS, work_ns))
