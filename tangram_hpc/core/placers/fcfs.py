"""Pure. `fcfs:K` and `first-fit`: in order of readiness, at most K units an action.

`fcfs:K`: the head of the one waiting list takes the largest feasible degree that is at most K; if
that is not free anywhere it may run, everybody waits behind it. `first-fit`: what does not fit is
passed over, which lets small actions through and may starve a large one.
An action that asks for no unit waits for nobody.
"""

from __future__ import annotations

from ..queue import Shape
from ..snapshot import NodeView, Snapshot
from .base import Placement, grant, largest, open_by_load


class Fcfs:
    """First come, first served; `strict` keeps everybody behind a head that does not fit."""

    def __init__(self, degree_max: int, strict: bool = True) -> None:
        self.name = f"fcfs:{degree_max}" if strict else "first-fit"
        self._degree_max = degree_max
        self._strict = strict
        self.reserve = 0

    def place(self, view: Snapshot) -> Placement:
        """Walks the queue once; O(grants x nodes + shapes)."""
        placement = Placement()
        open_by_load(view, placement)
        walk, blocked = view.ledger.ready.walk(), False
        while (head := walk.head()) is not None:
            action, shape = head
            units = largest(shape.degrees, self._degree_max)
            node = find_node(view, shape, units) if not (blocked and units) else None
            if node is None:
                blocked = blocked or (self._strict and units > 0)
                walk.skip_shape()
                continue
            grant(view, placement, action, shape, node, units)
            walk.next()
        return placement


def find_node(view: Snapshot, shape: Shape, units: int) -> NodeView | None:
    """The first node, in order of joining, where an action of this shape can start now."""
    if shape.node:
        home = view.nodes.get(shape.node)
        return home if home is not None and view.fits(home, shape, units) else None
    for node in view.nodes.values():
        if view.fits(node, shape, units):
            return node
    return None
