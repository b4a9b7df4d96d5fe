"""The placers `fcfs:K` and `first-fit`: order of readiness, at most K units for an action. Pure.

Under `fcfs:K`, the head of the waiting list takes the largest degree of at most K. If no node where
the action may run has that many free units, every action behind it that wants such units waits too.
If only the limit of its tenant is in the way, those of its tenant wait.
CPUs, GPUs and each endpoint have a list of their own, so no action waits for units that it does not
want, and an action that wants no unit waits for no other one.

`first-fit` passes over what does not fit. Small actions get through, and a large one may starve.
"""

from __future__ import annotations

from ....domain.service import BLOCK_SIZES, service_of
from ...state.queue import CPU, GPU, NOTHING, ActionShape, fair_walk
from ..snapshot import Snapshot
from .base import (
    Finder,
    Placement,
    block_sizes,
    find_block,
    grant,
    largest,
    start_all_calls,
)
from .session_openings import open_by_load


class Fcfs:
    """First come, first served.

    If `strict`, all actions wait behind a head that does not fit; else they may start before it.
    """

    def __init__(self, degree_max: int, strict: bool = True) -> None:
        self.name = f"fcfs:{degree_max}" if strict else "first-fit"
        self._degree_max = degree_max
        self._strict = strict
        self.reserve, self.block_max = 0, BLOCK_SIZES[-1]

    def place(self, view: Snapshot) -> Placement:
        """Grants from each list as long as actions may start. O(grants x nodes + shapes passed)."""
        placement = Placement()
        open_by_load(view, placement)
        self._cpus(view, placement, NOTHING)
        self._cpus(view, placement, CPU)
        self._services(view, placement)
        start_all_calls(view, placement)
        return placement

    def _cpus(self, view: Snapshot, placement: Placement, pool: str) -> None:
        shards = view.ledger.ready.shards(pool)
        if not self._strict and pool == CPU:  # full nodes need not be searched
            some = {n.node for n in view.nodes.values() if n.free_cpus}
            shards = [b for b in shards if b.node in some or (some and not b.node)]
        walk, finder = fair_walk(shards, view.turns(pool)), Finder(view)
        while (head := walk.head()) is not None:
            action, shape = head
            room = view.room(action, shape)
            units = largest(shape.degrees, min(self._degree_max, finder.most(shape), room))
            if not room or units > room:
                if self._strict:
                    view.hold_back(action, shape)
                walk.skip_shape()
                continue
            node = finder.node(shape, units)
            if node is not None:
                grant(view, placement, action, shape, node, units)
                walk.next()
            elif self._strict and units and not _lacks_gpus(view, shape):
                return
            else:
                walk.skip_shape()

    def _services(self, view: Snapshot, placement: Placement) -> None:
        walk = view.ledger.ready.walk(GPU, view.turns(GPU))
        while (head := walk.head()) is not None:
            action, shape = head
            room = view.room(action, shape)
            sizes = block_sizes(view, shape)
            size = largest(sizes or shape.degrees, min(self._degree_max, room))
            if size > room:
                if self._strict:
                    view.hold_back(action, shape)
                walk.skip_shape()
                continue
            block = find_block(view, shape, size)
            if block is not None:
                grant(view, placement, action, shape, block.node, size, block.gpus)
                walk.next()
            elif self._strict and service_of(shape.key):
                return
            else:
                walk.skip_shape()


def _lacks_gpus(view: Snapshot, shape: ActionShape) -> bool:
    """Returns whether the action waits for GPUs; it holds back no action that wants CPUs only."""
    return bool(shape.gpus) and all(n.free_gpus < shape.gpus for n in view.candidates(shape))
