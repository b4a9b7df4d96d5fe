"""Pure. `static:K`: one reservation per trajectory, the pod-like baseline.

A session waits until K CPUs of a node are free, in order of request, and holds them until it ends;
its actions run on those K, one after another, each on the largest feasible degree at most K
(`shared` formats: "static:K"). Actions without a session take turns on what is left.
"""

from __future__ import annotations

from ..snapshot import Snapshot
from .base import Placement, grant, largest, open_by_load
from .fcfs import find_node


class Static:
    """K CPUs for each session from its opening to its end."""

    def __init__(self, reserve: int) -> None:
        self.name = f"static:{reserve}"
        self.reserve = reserve

    def place(self, view: Snapshot) -> Placement:
        """Walks the queue once; O(grants x nodes + shapes)."""
        placement = Placement()
        open_by_load(view, placement, self.reserve)
        walk, blocked = view.ledger.ready.walk(), False
        while (head := walk.head()) is not None:
            action, shape = head
            units = largest(shape.degrees, self.reserve)
            wants = units > 0 and not shape.session  # one of the CPUs that nobody reserved
            node = find_node(view, shape, units) if not (blocked and wants) else None
            if node is None:
                blocked = blocked or wants
                walk.skip_shape()
                continue
            grant(view, placement, action, shape, node, units)
            walk.next()
        return placement
