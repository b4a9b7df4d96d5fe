"""Pure. What the queue needs of each kind of resource, and what is held: the facts on which
`elastic_allocs` decides.

Law: reads the ledger and changes nothing. An action whose session has a home can start there only,
and so can a call of a service that stands on one node only: that is work for what is held, and no
reason to hold more. A turn in the line of a rollout pool is a call of the service that would take
it; a new node could start as many of them as that service still has room for. Expected work is the
estimator's, on one unit; that is the least that it takes. O(lines of the queue + leases + sessions
not placed + turns in the lines of rollout pools).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...domain.action import Action
from ...domain.allocation import SatelliteShape
from ...domain.service import endpoint_of, service_of
from ..routing.rollout_pools import RolloutPool
from ..state.estimator import work_of
from ..state.ledger import LeaseEntry, Ledger
from ..state.queue import CPU, GPU, QueueShard

DemandKey = tuple[str, str]  # kind (`cpu` or `gpu`), component (empty: any)


@dataclass(slots=True)
class QueueLoad:
    """Of one kind. Work in unit-ns; `waiting` actions that a new node could start, on `units` at
    most; `bound` ones that none could; `mem_mib` of `sessions` that wait for a node."""

    work_ns: int = 0  # of all that waits or runs
    movable_ns: int = 0  # of what a new node could start
    waiting: int = 0
    units: int = 0
    bound: int = 0  # for the node of their session or service, or for room in their pool
    sessions: int = 0
    mem_mib: int = 0
    oldest_at: int = 0  # when the first of those sessions was asked for
    held: int = 0  # units of nodes that are up


def loads(ledger: Ledger, now: int) -> dict[DemandKey, QueueLoad]:
    """All kinds for which somebody waits or something runs, or that are held."""
    found: dict[DemandKey, QueueLoad] = {(CPU, ""): QueueLoad(), (GPU, ""): QueueLoad()}
    for pool in (CPU, GPU):
        for shard in ledger.ready.shards(pool):
            _waits(ledger, found, pool, shard)
    for rollouts in ledger.rollouts.values():
        _in_line(ledger, found[GPU, ""], rollouts)
    for lease in ledger.leases.values():
        _runs(ledger, found, lease, now)
    for number in ledger.session_queue:
        session = ledger.sessions[number]
        if session.spec.origin:
            continue  # it opens beside its origin or nowhere
        load = found.setdefault((CPU, session.spec.component), QueueLoad())
        load.oldest_at = min(load.oldest_at or session.requested_at, session.requested_at)
        load.sessions += 1
        load.mem_mib += session.spec.mem_mib
        for action in session.waiting:
            _movable(ledger, load, ledger.actions[action].action, 1)
    for (kind, component), load in found.items():
        load.held = sum(len(n.gpus.units if kind == GPU else n.cores.units)
                        for n in ledger.up_nodes() if n.spec.serves(component))
    return found


def satellite_serves(shape: SatelliteShape, key: DemandKey) -> bool:
    """Whether a satellite of this shape could do what is needed."""
    kind, component = key
    return component in ("", shape.component) and (kind == CPU or shape.gpus > 0)


def units_of(shape: SatelliteShape, kind: str) -> int:
    """What one satellite of this shape adds."""
    return shape.nodes * (shape.gpus if kind == GPU else shape.cpus)


def _waits(ledger: Ledger, found: dict[DemandKey, QueueLoad], pool: str, shard: QueueShard) -> None:
    for queue in shard.queues.values():
        action = ledger.actions[queue.actions.at[queue.actions.first()]].action
        load = found.setdefault((pool, action.component), QueueLoad())
        if shard.node or _one_node(ledger, service_of(action.key)):
            load.bound += len(queue)
            load.work_ns += len(queue) * ledger.estimator.estimate(action)[1]
        else:
            _movable(ledger, load, action, len(queue))


def _one_node(ledger: Ledger, service: str) -> bool:
    declared = ledger.services.get(service)
    return declared is not None and bool(declared.node)


def _in_line(ledger: Ledger, load: QueueLoad, pool: RolloutPool) -> None:
    """Turns that wait for room at a service, or for one to stand."""
    room = {s.name: s.running_max + s.queue_max - max(0, pool.load(s.name))
            for s in pool.spec.services}
    for number, takers in pool.line():
        if not takers:
            continue  # it was declared anew and takes none of that context
        anywhere = [s for s in takers if not _one_node(ledger, s.name)]
        service = (anywhere or takers)[0]
        action = ledger.actions[number].action.dealt(service.name, (service.degree,))
        if anywhere and room[service.name] > 0:
            room[service.name] -= 1
            _movable(ledger, load, action, 1)
            continue
        work = ledger.estimator.estimate(action)[1]
        load.bound += 1
        load.work_ns += work
        load.movable_ns += work if anywhere else 0


def _movable(ledger: Ledger, load: QueueLoad, action: Action, count: int) -> None:
    if endpoint_of(action.key):
        return
    work = count * ledger.estimator.estimate(action)[1]
    load.work_ns += work
    load.movable_ns += work
    load.waiting += count
    load.units += count * max(1, action.degrees[-1])


def _runs(ledger: Ledger, found: dict[DemandKey, QueueLoad], lease: LeaseEntry, now: int) -> None:
    entry = ledger.actions.get(lease.action)
    if entry is None or endpoint_of(lease.key):
        return
    action, kind = entry.action, GPU if service_of(lease.key) else CPU
    beliefs = ledger.estimator
    done = work_of(lease.spans(now), beliefs.serial(action))
    load = found.setdefault((kind, action.component), QueueLoad())
    load.work_ns += beliefs.remaining(action, done)
