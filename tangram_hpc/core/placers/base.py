"""Pure. What every placer is and answers.

Law: a placer reads a Snapshot and returns a Placement; it changes nothing else and keeps no state
that a restart would lose. Each line of a Placement becomes an event of the journal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..queue import Shape
from ..snapshot import NodeView, Snapshot


class Opening(NamedTuple):
    """Open this session here, with `reserve` cores of its own."""

    session: int
    node: int
    reserve: int


class Grant(NamedTuple):
    """Start this action here on so many units of its key resource."""

    action: int
    node: int
    units: int


class Resizing(NamedTuple):
    """Give this running lease so many units from now on."""

    lease: int
    units: int


@dataclass(slots=True)
class Placement:
    """A placer's answer, in the order in which to carry it out: resizes that shrink come first."""

    openings: list[Opening] = field(default_factory=list)
    resizings: list[Resizing] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)


class Placer(Protocol):
    """The interface of placement. `reserve`: CPUs that each session holds while it is open."""

    name: str
    reserve: int

    def place(self, view: Snapshot) -> Placement:
        """Who starts now; nobody is an answer."""
        ...


def largest(degrees: tuple[int, ...], at_most: int) -> int:
    """The largest feasible degree that is at most `at_most`; the smallest of all if none is."""
    fitting = [d for d in degrees if d <= at_most]
    return fitting[-1] if fitting else degrees[0]


def grant(view: Snapshot, placement: Placement, action: int, shape: Shape, node: NodeView,
          units: int) -> None:
    """Writes a grant down and draws its amounts from the snapshot."""
    if not shape.session:  # else the units are its session's own
        node.free_cpus -= units
    node.free_gpus -= shape.gpus
    node.free_mem_mib -= shape.mem_mib
    placement.grants.append(Grant(action, node.node, units))


def open_by_load(view: Snapshot, placement: Placement, reserve: int = 0) -> None:
    """Opens waiting sessions in order, each where the fewest sessions per CPU live.

    The head waits for room and everybody behind it waits too, so a big one is not starved.
    O(waiting sessions x nodes).
    """
    for session_id in view.ledger.opening:
        spec = view.ledger.sessions[session_id].spec
        fitting = [n for n in view.nodes.values() if view.room_for(n, spec, reserve)]
        if not fitting:
            return
        best = min(fitting, key=lambda n: ((n.sessions + 1) / max(1, n.cpus), n.node))
        best.sessions += 1
        best.free_mem_mib -= spec.mem_mib
        best.free_cpus -= reserve
        placement.openings.append(Opening(session_id, best.node, reserve))
