"""Pure. Calls given to a busy copy of their service ahead of their turn, so that its worker can run
many as one.

Law: a call ahead takes the place of nobody: an idle copy takes the next call of its own kind anyway
(see the placers). While a call of a service that stands nowhere has waited longer than its patience
(`copy_terms`), copies whose term is over are given nothing ahead, so that a block comes free for
that service. A copy has at most two batches, the one that runs and the one that follows. Calls
ahead hold nothing of their own.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.service import service_of
from ...domain.states import NodeState
from ..policy.ending import Endings
from ..state.ledger import LeaseEntry, Ledger, NodeEntry
from ..state.queue import GPU, QueueShard, fair_walk
from .copy_terms import OVERDUE_NS, crowd, patience_ns, term_end_ns


def batches(ledger: Ledger, now: int) -> list[ev.Event]:
    """Grants behind the first lease of each busy copy whose service runs calls as one.

    O(busy copies + bays + grants x log).
    """
    events: list[ev.Event] = []
    if not ledger.batching or not ledger.ready.waits(GPU):
        return events
    taken: set[int] = set()
    starved = _starved(ledger, now)
    copies: dict[str, list[LeaseEntry]] = {}
    for number in ledger.batching.values():
        lease = ledger.leases[number]
        copies.setdefault(lease.key, []).append(lease)
    for key, busy in copies.items():
        shards = list(ledger.ready.shards_at(GPU, key, 0))
        if not shards:
            continue
        oldest = min(_oldest(ledger, shard) for shard in shards)
        waiting = sum(len(queue) for shard in shards for queue in shard.queues.values())
        share = -(-waiting // len(busy))  # dealt out evenly
        for lease in busy:
            if ledger.nodes[lease.node].state is not NodeState.UP:
                continue
            if starved and _term_end(ledger, lease, oldest) <= now:
                continue
            _fill(ledger, now, lease, shards, share, events, taken)
    return events


def _oldest(ledger: Ledger, shard: QueueShard) -> int:
    """When the first call that waits in a bay was submitted."""
    first = shard.heads.at[shard.heads.first()]
    return ledger.actions[first.actions.at[first.actions.first()]].submitted_at


def _starved(ledger: Ledger, now: int) -> bool:
    """Whether a call of a service that stands nowhere has waited longer than its patience."""
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
    waiting = crowd([shape for shard in ledger.ready.shards(GPU) for shape in shard.queues])
    return any(now - _oldest(ledger, shard) >= patience_ns(ledger, shape, waiting, gpus)
               for shard in late for shape in shard.queues)


def _term_end(ledger: Ledger, lease: LeaseEntry, oldest: int) -> int:
    """When the term of the copy that a lease runs on ends; `oldest` as in `term_end_ns`."""
    there = ledger.nodes[lease.node].gpus.resident[lease.gpus[0]]
    return term_end_ns(there.since, ledger.services[there.service].restore_ns, oldest)


def _fill(ledger: Ledger, now: int, lease: LeaseEntry, shards: list[QueueShard], share: int,
          events: list[ev.Event], taken: set[int]) -> None:
    node = ledger.nodes[lease.node]
    room = min(share, 2 * ledger.services[service_of(lease.key)].batch - len(lease.lease_queue))
    last, walk, endings = next(reversed(lease.lease_queue)), fair_walk(shards), Endings(ledger, now)
    while room > 0 and (head := walk.head()) is not None:
        action, shape = head
        if (len(lease.gpus) not in shape.degrees or not node.spec.serves(shape.component)
                or not endings.fits(node, shape)):
            walk.skip_shape()
            continue
        walk.next()
        if action in taken:
            continue
        taken.add(action)
        number = ledger.next_lease + len(events)
        attempt = ledger.actions[action].attempt + 1
        events.append(ev.LeaseGranted(now, number, action, lease.node, attempt, (), lease.gpus,
                                      after=last))
        last, room = number, room - 1


def note(ledger: Ledger, lease: LeaseEntry, node: NodeEntry) -> None:
    """A lease holds its block from now on: whether others may follow it there."""
    service = service_of(lease.key)
    if service and node.prefetch_max and ledger.services[service].batch > 1:
        ledger.batching[lease.node, lease.gpus[0]] = lease.lease


def forget(ledger: Ledger, lease: LeaseEntry) -> None:
    """A lease holds its block no more."""
    if lease.gpus:
        ledger.batching.pop((lease.node, lease.gpus[0]), None)
