"""The placer `static:K`, a baseline with fixed shares as pods have them. Pure.

A session waits until K CPUs of a node are free, in order of request, and holds them until it ends.
Its actions run on these K, one after another, each on the largest degree of at most K. Actions
without a session share what is left.

GPUs are assigned once: one to each service in order of declaration, and each further GPU to the
service with the most expected calls for each GPU that it has. A call runs on one GPU of its
service, in order of readiness. A call that cannot run on one GPU is refused at its submission
(`block_max`).
"""

from __future__ import annotations

from ....domain.service import ServiceSpec, service_of
from ...state.queue import CPU, GPU, NOTHING, QueueShard, fair_walk
from ..snapshot import Snapshot
from .base import Finder, Placement, grant, largest, start_all_calls
from .session_openings import open_by_load

NodeGpu = tuple[int, int]  # node, GPU


class Static:
    """Holds K CPUs for each session while it is open, and fixed GPUs for each service."""

    def __init__(self, reserve: int) -> None:
        self.name = f"static:{reserve}"
        self.reserve, self.block_max = reserve, 1

    def place(self, view: Snapshot) -> Placement:
        """Grants from each list as long as actions may start. O(grants x nodes + shapes)."""
        placement = Placement()
        open_by_load(view, placement, self.reserve)
        self._cpus(view, placement, NOTHING)
        self._cpus(view, placement, CPU)
        if view.ledger.ready.waits(GPU):
            self._services(view, placement)
        start_all_calls(view, placement)
        return placement

    def _cpus(self, view: Snapshot, placement: Placement, pool: str) -> None:
        walk, finder, blocked = view.ledger.ready.walk(pool, view.turns(pool)), Finder(view), False
        while (head := walk.head()) is not None:
            action, shape = head
            room = view.room(action, shape)
            units = largest(shape.degrees, min(self.reserve, room))
            if not room or units > room:
                walk.skip_shape()
                continue
            # The action needs CPUs that no session reserves.
            wants = units > 0 and not shape.session
            node = finder.node(shape, units) if not (blocked and wants) else None
            if node is None:
                blocked = blocked or wants
                walk.skip_shape()
                continue
            grant(view, placement, action, shape, node, units)
            walk.next()

    def _services(self, view: Snapshot, placement: Placement) -> None:
        gpus = [(n.node, gpu) for n in view.nodes.values() for gpu in n.gpus.units]
        assigned = assign_gpus(list(view.ledger.services.values()), gpus)
        waiting: dict[str, list[QueueShard]] = {}
        for shard in view.ledger.ready.shards(GPU):
            waiting.setdefault(service_of(shard.key), []).append(shard)
        for service, shards in waiting.items():
            free = [(n, gpu) for n, gpu in assigned.get(service, ())
                    if view.nodes[n].gpus.is_free(gpu)]
            walk = fair_walk(shards, view.turns(GPU))
            while free and (head := walk.head()) is not None:
                action, shape = head
                if not view.room(action, shape):
                    walk.skip_shape()
                    continue
                if 1 not in shape.degrees:  # such calls come only from a journal of another placer
                    walk.skip_shape()
                    continue
                able = {n.node for n in view.candidates(shape) if view.fits(n, shape, 0)}
                chosen = next((g for g in free if g[0] in able), None)
                if chosen is None:
                    walk.skip_shape()
                    continue
                free.remove(chosen)
                grant(view, placement, action, shape, view.nodes[chosen[0]], 1, (chosen[1],))
                walk.next()


def assign_gpus(services: list[ServiceSpec], gpus: list[NodeGpu]) -> dict[str, list[NodeGpu]]:
    """Returns the GPUs of each service; with too few GPUs the services declared last get none."""
    assigned: dict[str, list[NodeGpu]] = {s.name: [] for s in services}
    for number, gpu in enumerate(gpus):
        if number < len(services):
            assigned[services[number].name].append(gpu)
        elif services:
            best = services[0]
            for s in services[1:]:
                if s.calls * len(assigned[best.name]) > best.calls * len(assigned[s.name]):
                    best = s
            assigned[best.name].append(gpu)
    return assigned
