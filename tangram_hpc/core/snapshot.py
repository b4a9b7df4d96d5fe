"""Pure. What a placer sees: the free units of each node now, and who waits.

Law: the amounts here are a copy that the placer draws down while it places; the queue and the
ledger behind it are read only. Making one costs O(nodes that are up).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..domain.session import SessionSpec
from .ledger import Ledger
from .queue import Shape


@dataclass(slots=True)
class NodeView:
    """A node's amounts, drawn down while a placement is made."""

    node: int
    component: str
    cpus: int
    free_cpus: int
    free_gpus: int
    free_mem_mib: int
    sessions: int


@dataclass(slots=True)
class Snapshot:
    """All that a placer may look at."""

    now_ns: int
    nodes: dict[int, NodeView]
    ledger: Ledger

    def fits(self, view: NodeView, shape: Shape, units: int) -> bool:
        """Whether an action of this shape can start with `units` on this node now; the units of
        one whose session reserves its own are there already."""
        return (
            (bool(shape.session) or units <= view.free_cpus)
            and shape.gpus <= view.free_gpus
            and shape.mem_mib <= view.free_mem_mib
            and (not shape.component or shape.component == view.component)
        )

    def room_for(self, view: NodeView, spec: SessionSpec, reserve: int) -> bool:
        """Whether a session fits here with `reserve` cores of its own."""
        return (
            spec.mem_mib <= view.free_mem_mib
            and reserve <= view.free_cpus
            and (not spec.component or spec.component == view.component)
        )


def snapshot(ledger: Ledger, now_ns: int) -> Snapshot:
    """The ledger's amounts as of now."""
    views = {
        n.node: NodeView(n.node, n.spec.component, len(n.cores.units), n.cores.free, n.gpus.free,
                         n.free_mem_mib, len(n.sessions))
        for n in ledger.up_nodes()
    }
    return Snapshot(now_ns, views, ledger)
