"""Sums up, for each kind of resource, the demand of the queue and the units that are held. Pure.

These are the facts on which `elastic_allocs` decides. The expected work of an action is the
estimator's figure for one unit, which is the least that the action can take.

Work counts as movable only if a new node could do it. An action whose session has a home node can
start there only, and so can a call of a service that is fixed to one node: such work needs the
nodes that are held already, and is no reason to hold more. A turn that waits in a rollout pool
counts as a call of the service that would take it; a new node could start as many of them as that
service has room for.

The module reads the ledger and changes nothing. O(shape queues + leases + sessions not placed +
turns that wait in rollout pools).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...domain.action import Action
from ...domain.allocation import SatelliteShape
from ...domain.service import endpoint_of, service_of
from ..policy.tenant_limits import session_limit_reason
from ..routing.rollout_pools import RolloutPool
from ..state.estimator import work_of
from ..state.ledger import LeaseEntry, Ledger
from ..state.queue import CPU, GPU, QueueShard
from ..state.tenant_use import TenantTurns

DemandKey = tuple[str, str]  # kind (`cpu` or `gpu`), component (empty: any)


@dataclass(slots=True)
class QueueLoad:
    """The demand for one kind of resource in one component, and the units that are held.

    Attributes:
        work_ns: expected work of all actions that wait or run, in unit-ns.
        movable_ns: expected work of the actions that a new node could start, in unit-ns.
        waiting: how many actions a new node could start.
        units: units that these actions can use at most.
        bound: how many waiting actions no new node could start: they wait for the node of their
            session or service, for room in their pool, or for the limits of their tenant.
        sessions: how many sessions wait for a node.
        mem_mib: memory that these sessions need, in MiB.
        oldest_at: when the first of these sessions was requested, in epoch ns; 0 for none.
        held: units of the nodes that are up.
    """

    work_ns: int = 0
    movable_ns: int = 0
    waiting: int = 0
    units: int = 0
    bound: int = 0
    sessions: int = 0
    mem_mib: int = 0
    oldest_at: int = 0
    held: int = 0


def loads(ledger: Ledger, now: int) -> dict[DemandKey, QueueLoad]:
    """Returns the loads of all kinds of which units are held, or for which actions wait or run."""
    found: dict[DemandKey, QueueLoad] = {(CPU, ""): QueueLoad(), (GPU, ""): QueueLoad()}
    for pool in (CPU, GPU):
        turns = ledger.tenants.turns(pool, now)
        for shard in ledger.ready.shards(pool):
            _waits(ledger, found, pool, shard, turns)
    for rollouts in ledger.rollouts.values():
        _queued_turns(ledger, found[GPU, ""], rollouts)
    for lease in ledger.leases.values():
        _runs(ledger, found, lease, now)
    for number in ledger.session_queue:
        session = ledger.sessions[number]
        if session.spec.origin or session_limit_reason(ledger, session.spec, 0):
            continue  # a fork opens only on its origin's node; no node helps against a limit
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
    """Returns whether a satellite of this shape could do work of this kind and component."""
    kind, component = key
    return component in ("", shape.component) and (kind == CPU or shape.gpus > 0)


def units_of(shape: SatelliteShape, kind: str) -> int:
    """Returns how many units of a kind one satellite of this shape adds."""
    return shape.nodes * (shape.gpus if kind == GPU else shape.cpus)


def _waits(ledger: Ledger, found: dict[DemandKey, QueueLoad], pool: str, shard: QueueShard,
           turns: TenantTurns | None) -> None:
    tenant = shard.share.tenant
    for queue in shard.queues.values():
        action = ledger.actions[queue.actions.at[queue.actions.first()]].action
        load = found.setdefault((pool, action.component), QueueLoad())
        movable, least = len(queue), max(1, action.degrees[0])
        if shard.node or _one_node(ledger, service_of(action.key)):
            movable = 0
        elif turns is not None:  # what is beyond the limit of its tenant needs no further node
            movable = min(movable, max(0, turns.room(tenant)) // least)
            turns.charge(tenant, movable * least)
        load.bound += len(queue) - movable
        load.work_ns += (len(queue) - movable) * ledger.estimator.work(action)
        if movable:
            _movable(ledger, load, action, movable)


def _one_node(ledger: Ledger, service: str) -> bool:
    declared = ledger.services.get(service)
    return declared is not None and bool(declared.node)


def _queued_turns(ledger: Ledger, load: QueueLoad, pool: RolloutPool) -> None:
    """Counts turns that wait for room at a service, or for a service that can be called."""
    room = {s.name: s.running_max + s.queue_max - max(0, pool.load(s.name))
            for s in pool.spec.services}
    for number, takers in pool.queue():
        if not takers:
            continue  # the pool was declared again without a service for this context
        anywhere = [s for s in takers if not _one_node(ledger, s.name)]
        service = (anywhere or takers)[0]
        action = ledger.actions[number].action.routed_to(service.name, (service.degree,))
        if anywhere and room[service.name] > 0:
            room[service.name] -= 1
            _movable(ledger, load, action, 1)
            continue
        work = ledger.estimator.work(action)
        load.bound += 1
        load.work_ns += work
        load.movable_ns += work if anywhere else 0


def _movable(ledger: Ledger, load: QueueLoad, action: Action, count: int) -> None:
    if endpoint_of(action.key):
        return
    work = count * ledger.estimator.work(action)
    load.work_ns += work
    load.movable_ns += work
    load.waiting += count
    load.units += count * max(1, action.degrees[-1])


def _runs(ledger: Ledger, found: dict[DemandKey, QueueLoad], lease: LeaseEntry, now: int) -> None:
    entry = ledger.actions.get(lease.action)
    if entry is None or endpoint_of(lease.key):
        return
    action, kind = entry.action, GPU if service_of(lease.key) else CPU
    estimator = ledger.estimator
    done = work_of(lease.spans(now), estimator.serial(action))
    load = found.setdefault((kind, action.component), QueueLoad())
    load.work_ns += estimator.remaining(action, done)
