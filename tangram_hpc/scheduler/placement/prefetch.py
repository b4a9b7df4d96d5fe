"""Grants short leases behind others on the same CPU, which saves a round trip each. Pure.

Between the end of a short action and the start of the next one lies a message to the broker and
back. A prefetched lease is already on the worker and begins when the lease before it ends.

Prefetching overtakes no action. An action is prefetched only if it is the first of all actions that
wait for CPUs of its node (but for those of tenants that hold all that they may), if it needs one
CPU and nothing else, and if the leases before it on its unit are expected to end within
PREFETCH_NS. The lease holds nothing until then. A worker that cannot begin it soon gives it back. A
node whose worker takes no prefetched leases (`NodeSpec.ahead` is 0) never gets one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...domain import event as ev
from ...domain.action import Action, Kind
from ...domain.ids import client_of
from ...domain.states import NodeState
from ..policy.ending import Endings
from ..state.ledger import LeaseEntry, Ledger, NodeEntry
from ..state.queue import CPU, ActionShape, fair_walk
from ..state.tenant_use import TenantTurns

PREFETCH_NS = 10_000_000  # expected work that may be prefetched on one unit
OVERHEAD_NS = 20_000  # the least time for an action in addition to its own work
# While several clients send actions, the next action waits for all leases that are prefetched on
# its unit. On a busy machine each prefetched lease takes many times OVERHEAD_NS. So the bound is
# the number of leases that end within CONTENDED_NS at the pace measured on that node. A fixed bound
# is too high on a busy machine, or leaves units idle between two scheduling cycles: a bound of 32
# halved the throughput.
CONTENDED_NS, CONTENDED_MIN = 5_000_000, 8
PACE = 128  # leases over which `NodeEntry.short_lease_gap_ns` is averaged
RECENT_NS = 1_000_000_000  # a client that has sent nothing for this time does not count as sending


@dataclass(slots=True)
class _Tail:
    """The end of the lease queue of one unit.

    Attributes:
        cores: the unit.
        last: the last lease in the queue.
        have: how many leases are prefetched on the unit.
        most: how many may be prefetched there.
        tenant: the tenant of the last lease.
    """

    cores: tuple[int, ...]
    last: int
    have: int
    most: int
    tenant: str


def is_short(ledger: Ledger, action: Action) -> bool:
    """Returns whether an action needs one CPU and nothing else and is expected to end soon."""
    return (action.degrees == (1,) and action.key == "cpu" and not action.mem_mib
            and action.kind is not Kind.BACKGROUND
            and not action.gpus and 2 * ledger.estimator.work(action) <= PREFETCH_NS)


def prefetch(ledger: Ledger, now: int) -> list[ev.Event]:
    """Returns grants on the units of `ledger.short`, on which too little is prefetched.

    A unit leaves `ledger.short` once it has enough. O(clients + units in it + grants); where a
    tenant has a limit, O(units in it) for each grant.
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
                CONTENDED_MIN, CONTENDED_NS // max(OVERHEAD_NS, node.short_lease_gap_ns))
            _fill(ledger, now, node, units, share, depth, events, taken)
    return events


def _fill(ledger: Ledger, now: int, node: NodeEntry, units: list[tuple[int, int]], share: int,
          depth: int, events: list[ev.Event], taken: set[int]) -> None:
    ready = ledger.ready
    shards = [shard for home in (node.node, 0) for shard in ready.shards_at(CPU, "cpu", home)]
    turns = ledger.tenants.turns(CPU, now)
    walk, fine, endings = fair_walk(shards, turns), dict[ActionShape, int](), Endings(ledger, now)
    tails = {unit: _tail(ledger, ledger.leases[ledger.short[unit]], share) for unit in units}
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
        tenant = turns.tenant_of(client_of(action)) if turns is not None else ""
        unit = _unit_for(ledger, entry.action, node, tails, turns, tenant)
        if unit is None:
            if turns is not None and turns.free_to_start(tenant) >= max(1, shape.degrees[0]):
                return  # its turn has come, so a unit has to become free for it
            walk.skip_shape()
            continue
        tail = tails[unit]
        if tail.have >= min(most, tail.most):
            del tails[unit]
            continue
        if turns is not None:
            turns.charge(tenant, 1)
            tail.tenant = tenant
        taken.add(action)
        walk.next()
        lease_id = ledger.next_lease + len(events)
        events.append(ev.LeaseGranted(now, lease_id, action, node.node, entry.attempt + 1,
                                      tail.cores, after=tail.last))
        tail.last, tail.have = lease_id, tail.have + 1


def _tail(ledger: Ledger, lease: LeaseEntry, share: int) -> _Tail:
    have, last = len(lease.lease_queue) - 1, next(reversed(lease.lease_queue))
    return _Tail(lease.cores, last, have, have + share, ledger.leases[last].tenant)


def _unit_for(ledger: Ledger, action: Action, node: NodeEntry, tails: dict[tuple[int, int], _Tail],
              turns: TenantTurns | None, tenant: str) -> tuple[int, int] | None:
    """Returns the unit for an action: the unit where its session ran last, or else the first with
    room; None if its tenant may follow the last lease of no unit.

    On the session's last unit its init is still warm and bound to that core.
    """
    session = ledger.sessions.get(action.session)
    if session is not None and session.last_cores:
        last = node.node, session.last_cores[0]
        if last in tails and (turns is None or turns.may_follow(tails[last].tenant, tenant)):
            return last
    if turns is None:
        return next(iter(tails), None)
    return next((unit for unit, tail in tails.items()
                 if turns.may_follow(tail.tenant, tenant)), None)


def _most(ledger: Ledger, node: NodeEntry, action: Action, most: int) -> int:
    """Returns how many actions of this shape may be prefetched on one unit, at most `most`."""
    if not node.spec.serves(action.component) or not is_short(ledger, action):
        return 0
    work = ledger.estimator.work(action)
    return min(node.prefetch_max, most, PREFETCH_NS // max(OVERHEAD_NS, work))
