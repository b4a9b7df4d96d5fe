"""The placer `paper`: a plain reading of ARL-Tangram's published greedy. Pure.

For each pool of units (the CPUs of a node, and all GPUs) it takes the longest prefix in order of
readiness that fits with the fewest units, and chooses the degrees by `prefix_program`. A size is
chosen at the start and kept. Services are parked when another one needs their GPUs, the least
recently used first.

An action that lacks memory or GPUs is overtaken only by actions that need none of these. The only
memory between cycles is the last seen revision of each node, which saves work. Source: ARL-Tangram,
Algorithms 1 and 2.
"""

from __future__ import annotations

from ....domain.ids import client_of
from ....domain.service import BLOCK_SIZES, service_of
from ....domain.states import LeaseState
from ...state.queue import CPU, GPU, ActionShape, fair_walk
from ...state.speed import ONE, run_ns, speed
from ...state.tenant_use import copy_of
from ..snapshot import NodeView, Snapshot
from .base import Placement, grant, largest, start_all_calls, start_unitless
from .copy_map import CopyMap, PlacedCopy
from .prefix_program import choose_degrees
from .session_openings import open_by_load

N_MAX, DEPTH = 64, 64  # candidates, and actions behind them that are estimated one by one

Waiter = tuple[int, ActionShape]


class Paper:
    """Chooses the size of each action at its start, by the greedy algorithm of ARL-Tangram."""

    def __init__(self) -> None:
        self.name = "paper"
        self.reserve, self.block_max = 0, BLOCK_SIZES[-1]
        self._seen: dict[int, tuple[int, int]] = {}

    def place(self, view: Snapshot) -> Placement:
        """Returns the placement of one cycle.

        O(nodes + on each node that has changed candidates x degrees x free units).
        """
        placement = Placement()
        open_by_load(view, placement)
        if placement.openings:
            return placement
        start_unitless(view, placement)
        for gone in [n for n in self._seen if n not in view.nodes]:
            del self._seen[gone]
        held_back: set[str] = set()
        for node in view.nodes.values():
            revision = (view.ledger.nodes[node.node].revision, view.ledger.revision)
            if self._seen.get(node.node) != revision:
                self._seen[node.node] = revision
                _start_on(view, placement, node, held_back)
        if view.ledger.ready.waits(GPU):
            _start_services(view, placement)
        start_all_calls(view, placement)
        return placement


def _waiting_on(view: Snapshot, placement: Placement, node: NodeView, held_back: set[str]
                ) -> list[Waiter]:
    """Returns the first actions that may start on a node and for which memory and GPUs suffice
    there.

    Args:
        held_back: the tenants of which no more is taken in this pass, since an action waits for
            CPUs of their limit; they are added here.
    """
    shards = [b for home in (node.node, 0) for b in view.ledger.ready.shards_at(CPU, "cpu", home)]
    turns = copy_of(view.turns(CPU))
    walk, found = fair_walk(shards, turns), list[Waiter]()
    started = {g.action for g in placement.grants}
    while len(found) < N_MAX + DEPTH and (head := walk.head()) is not None:
        action, shape = head
        least, room = _positive(shape)[0], view.room(action, shape)
        tenant = view.ledger.tenants.tenant_of(client_of(action))
        fits = view.fits(node, shape, 0)
        if fits and 0 < room < least and action not in started:
            held_back.add(tenant)
        if not fits or room < least or tenant in held_back:
            walk.skip_shape()
            continue
        if action not in started:
            found.append(head)
            if turns is not None:
                turns.charge(tenant, least)
        walk.next()
    return found


def _start_on(view: Snapshot, placement: Placement, node: NodeView, held_back: set[str]) -> None:
    waiting, candidates, used = _waiting_on(view, placement, node, held_back), list[Waiter](), 0
    for action, shape in waiting:
        need = 0 if shape.session else _positive(shape)[0]
        if len(candidates) >= N_MAX or used + need > node.free_cpus:
            break
        used += need
        candidates.append((action, shape))
    if not candidates:
        return
    options = [_options(view, a, s) for a, s in candidates]
    least = [_options(view, a, s)[0] for a, s in waiting]
    degrees = choose_degrees(options, node.free_cpus, least, _releases(view, node), view.now_ns)
    for (action, shape), chosen in zip(candidates, degrees, strict=False):
        units = largest(shape.degrees, min(chosen, view.room(action, shape)))
        if units > view.room(action, shape):  # only the limits of its tenant are in the way
            view.hold_back(action, shape)
            continue
        if not view.fits(node, shape, units):
            return
        grant(view, placement, action, shape, node, units)


def _positive(shape: ActionShape) -> tuple[int, ...]:
    return shape.degrees if shape.degrees[0] else shape.degrees[1:]


def _options(view: Snapshot, action: int, shape: ActionShape) -> list[tuple[int, int]]:
    """Returns the degrees of an action, with the expected run time on each in ns."""
    serial, work = view.ledger.estimator.estimate(view.ledger.actions[action].action)
    return [(d, run_ns(work, serial, d)) for d in _positive(shape)]


def _releases(view: Snapshot, node: NodeView) -> list[tuple[int, int]]:
    """Returns when actions that run on CPUs here should end, and how many CPUs they hold."""
    ledger, now, found = view.ledger, view.now_ns, []
    for lease_id in ledger.nodes[node.node].leases:
        lease = ledger.leases[lease_id]
        if lease.key != "cpu" or not lease.units or lease.reserved:
            continue
        if lease.state is LeaseState.RELEASING:
            found.append((now, lease.units))
            continue
        action = ledger.actions[lease.action].action
        v = speed(ledger.estimator.serial(action), lease.units)
        left = ledger.estimator.remaining(action, (now - lease.granted_at) * v >> ONE)
        found.append((now + (left << ONE) // v, lease.units))
    return found


# ---- services --------------------------------------------------------------------------------


def _start_services(view: Snapshot, placement: Placement) -> None:
    """Starts calls in rounds, until a round does not start all its candidates."""
    copies, started = CopyMap(view, placement), set[int]()
    turns = copy_of(view.turns(GPU))
    walk, order = view.ledger.ready.walk(GPU, turns), list[Waiter]()
    limit = N_MAX + DEPTH + sum(n.free_gpus for n in copies.nodes)
    while len(order) < limit and (head := walk.head()) is not None:
        action, shape = head
        if turns is not None:
            tenant = turns.tenant_of(client_of(action))
            if turns.room(tenant) < shape.degrees[0]:
                walk.skip_shape()
                continue
            turns.charge(tenant, shape.degrees[0])
        order.append(head)
        walk.next()
    while True:
        waiting = [w for w in order if w[0] not in started][:N_MAX + DEPTH]
        free, candidates = sum(n.free_gpus for n in copies.nodes), list[Waiter]()
        for action, shape in waiting:
            free -= shape.degrees[0]
            if len(candidates) >= N_MAX or free < 0:
                break
            candidates.append((action, shape))
        if not candidates or not _round(copies, candidates, waiting, started):
            return


def _round(copies: CopyMap, candidates: list[Waiter], waiting: list[Waiter],
           started: set[int]) -> bool:
    """Starts the calls that one round chooses; returns whether all candidates started."""
    view, now = copies.view, copies.view.now_ns
    everything = [c for some in copies.of.values() for c in some]
    idle = {(c.service, c.size) for c in everything if copies.is_idle(c)}
    options = []
    for action, shape in candidates:
        service = service_of(shape.key)
        restore = view.ledger.services[service].restore_ns
        options.append([(d, t + (0 if (service, d) in idle else restore))
                        for d, t in _options(view, action, shape)])
    least = [_options(view, a, s)[0] for a, s in waiting]
    releases = [(copies.free_at(c, now), c.size) for c in everything if not copies.is_idle(c)]
    free = sum(n.free_gpus for n in copies.nodes)
    degrees = choose_degrees(options, free, least, releases, now)
    for (action, shape), size in zip(candidates, degrees, strict=False):
        if not _start_call(copies, action, shape, min(size, view.room(action, shape))):
            return False
        started.add(action)
    return len(degrees) == len(candidates)


def _start_call(copies: CopyMap, action: int, shape: ActionShape, size: int) -> bool:
    """Starts a call on an idle copy; else on the block used longest ago, perhaps on a smaller
    degree.
    """
    for degree in reversed([d for d in shape.degrees if d <= size]):
        idle = [c for c in copies.usable(shape) if c.size == degree and copies.is_idle(c)]
        if idle:
            copies.begin(min(idle, key=_place), action, shape)
            return True
        blocks = copies.blocks(shape, degree)
        if blocks:
            node, gpus, _ = min(blocks, key=lambda b: (
                sum(c.used_at for c in b[2]), b[0].node, b[1]))
            copies.open(node, gpus, action, shape)
            return True
    return False


def _place(copy: PlacedCopy) -> tuple[int, tuple[int, ...]]:
    return copy.node.node, copy.gpus
