"""Grants calls behind a busy copy of their service, so that its worker can run many as one. Pure.

A copy has at most two batches: the one that runs and the one that follows it. Several copies of a
service get calls in proportion to their speeds. Prefetched calls hold nothing of their own.

Prefetching overtakes no call: an idle copy takes the next call of its own kind anyway (see the
placers). While a call of a service without a copy has waited longer than its starvation limit
(`minimum_residency`), no calls are prefetched on copies whose minimum residency is over. So a block
comes free for the starved service. The same holds for the copies on a block that the placer has
booked for another call.
"""

from __future__ import annotations

from collections.abc import Collection

from ...domain import event as ev
from ...domain.ids import client_of
from ...domain.service import service_of
from ...domain.states import NodeState
from ..policy.ending import Endings
from ..state.ledger import LeaseEntry, Ledger, NodeEntry
from ..state.queue import GPU, QueueShard, fair_walk
from ..state.speed import speed
from .minimum_residency import gpu_demand, residency_end_ns, starvation_limit_ns
from .placers.waiting import OVERDUE_NS


def batches(ledger: Ledger, now: int, drained: Collection[tuple[int, int]] = ()
            ) -> list[ev.Event]:
    """Returns grants behind the first lease of each busy copy whose service runs calls in batches.

    O(busy copies + queue shards + grants x log).

    Args:
        ledger: knows the leases and the calls that wait.
        now: the present time, epoch ns.
        drained: the GPUs, as (node, GPU), whose copies take no further calls.
    """
    events: list[ev.Event] = []
    if not ledger.batching or not ledger.ready.waits(GPU):
        return events
    taken: set[int] = set()
    starved = _starved(ledger, now)
    copies: dict[str, list[LeaseEntry]] = {}
    for number in ledger.batching.values():
        lease = ledger.leases[number]
        if any((lease.node, gpu) in drained for gpu in lease.gpus):
            continue
        copies.setdefault(lease.key, []).append(lease)
    for key, busy in copies.items():
        shards = list(ledger.ready.shards_at(GPU, key, 0))
        if not shards:
            continue
        oldest = min(_oldest(ledger, shard) for shard in shards)
        waiting = sum(len(queue) for shard in shards for queue in shard.queues.values())
        by_speed = _by_speed(ledger, key, [
            lease for lease in busy if ledger.nodes[lease.node].state is NodeState.UP
            and not (starved and _residency_end(ledger, lease, oldest) <= now)])
        left = sum(fast for fast, _ in by_speed)
        for fast, lease in by_speed:
            share = -(-waiting * fast // left)  # in proportion to the copies' speeds
            waiting -= _fill(ledger, now, lease, shards, share, events, taken)
            left -= fast
    return events


def _by_speed(ledger: Ledger, key: str, busy: list[LeaseEntry]) -> list[tuple[int, LeaseEntry]]:
    """Returns these leases with the speeds of their copies, the fastest first."""
    demand, service = ledger.demand, service_of(key)
    kinds = demand.of_service.get(service)
    serial = demand.kinds[service, kinds[0][1]].serial if kinds else 1000
    return sorted(((speed(serial, len(lease.gpus)), lease) for lease in busy), key=lambda x: -x[0])


def _oldest(ledger: Ledger, shard: QueueShard) -> int:
    """Returns when the first call in a queue shard was submitted, in epoch ns."""
    first = shard.heads.at[shard.heads.first()]
    return ledger.actions[first.actions.at[first.actions.first()]].submitted_at


def _starved(ledger: Ledger, now: int) -> bool:
    """Returns whether a call of a service without a copy has waited for its starvation limit."""
    late = [shard for shard in ledger.ready.shards(GPU)
            if service_of(shard.key) and now - _oldest(ledger, shard) >= OVERDUE_NS]
    if not late:
        return False
    nodes = ledger.up_nodes()
    standing = {there.service for n in nodes for there in n.gpus.resident.values()}
    late = [shard for shard in late if service_of(shard.key) not in standing]
    if not late:
        return False
    gpus = sum(len(n.gpus.units) for n in nodes)
    waiting = gpu_demand([shape for shard in ledger.ready.shards(GPU) for shape in shard.queues])
    return any(now - _oldest(ledger, shard) >= starvation_limit_ns(ledger, shape, waiting, gpus)
               for shard in late for shape in shard.queues)


def _residency_end(ledger: Ledger, lease: LeaseEntry, oldest: int) -> int:
    """Returns when the minimum residency of a lease's copy ends (see `residency_end_ns`)."""
    there = ledger.nodes[lease.node].gpus.resident[lease.gpus[0]]
    return residency_end_ns(there.since, ledger.services[there.service].restore_ns, oldest)


def _fill(ledger: Ledger, now: int, lease: LeaseEntry, shards: list[QueueShard], share: int,
          events: list[ev.Event], taken: set[int]) -> int:
    """Adds grants behind a lease, for `share` calls at most; returns how many."""
    node, before = ledger.nodes[lease.node], len(events)
    room = min(share, 2 * ledger.services[service_of(lease.key)].batch - len(lease.lease_queue))
    turns, endings = ledger.tenants.turns(GPU, now), Endings(ledger, now)
    last, walk = next(reversed(lease.lease_queue)), fair_walk(shards, turns)
    tenant = ledger.leases[last].tenant
    while room > 0 and (head := walk.head()) is not None:
        action, shape = head
        if action in taken:
            walk.next()
            continue
        if (len(lease.gpus) not in shape.degrees or not node.spec.serves(shape.component)
                or not endings.fits(node, shape)):
            walk.skip_shape()
            continue
        caller = turns.tenant_of(client_of(action)) if turns is not None else tenant
        if turns is not None and not turns.may_follow(tenant, caller):
            if turns.free_to_start(caller) >= len(lease.gpus):
                break  # its turn has come, so the block has to become free for it
            walk.skip_shape()
            continue
        walk.next()
        if turns is not None:
            tenant = caller
            turns.charge(tenant, len(lease.gpus))
        taken.add(action)
        number = ledger.next_lease + len(events)
        attempt = ledger.actions[action].attempt + 1
        events.append(ev.LeaseGranted(now, number, action, lease.node, attempt, (), lease.gpus,
                                      after=last))
        last, room = number, room - 1
    return len(events) - before


def note(ledger: Ledger, lease: LeaseEntry, node: NodeEntry) -> None:
    """Records that a lease holds its block, if other calls may be queued behind it there."""
    service = service_of(lease.key)
    if service and node.prefetch_max and ledger.services[service].batch > 1:
        ledger.batching[lease.node, lease.gpus[0]] = lease.lease


def forget(ledger: Ledger, lease: LeaseEntry) -> None:
    """Records that a lease of GPUs does not hold its block any more."""
    ledger.batching.pop((lease.node, lease.gpus[0]), None)
