"""Pure. What a placer sees: the free units of each node now, and who waits.

Law: the amounts here are a copy that the placer draws down while it places; the queue and the
ledger behind it are read only. Making one costs O(nodes that are up + GPUs); it holds no word of
who waits but the ledger's own queue (`view.ledger.ready`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...domain.session import SessionSpec
from ..policy.ending import Endings
from ..state.gpu_blocks import GpuSet, Resident
from ..state.ledger import Ledger, NodeEntry
from ..state.queue import ActionShape
from .eligible_nodes import eligible_nodes, may_fork


@dataclass(slots=True)
class NodeView:
    """A node's amounts, drawn down while a placement is made. `gpus` is a copy of the node's set:
    its mask of free GPUs and what stands on them. `guards`: it can keep code from its user's files.
    `entry`, `endings`: of a node whose allocation has a known end.
    """

    node: int
    component: str
    cpus: int
    free_cpus: int
    free_mem_mib: int
    sessions: int
    gpus: GpuSet
    guards: bool
    entry: NodeEntry
    endings: Endings | None = None

    def takes(self, shape: ActionShape) -> bool:
        """Whether an action of this shape may start here, amounts and home aside."""
        return (not shape.component or shape.component == self.component) and (
            self.guards or not shape.guarded) and (
            self.endings is None or self.endings.fits(self.entry, shape))

    @property
    def free_gpus(self) -> int:
        """How many GPUs are free."""
        return self.gpus.free


@dataclass(slots=True)
class EndpointView:
    """An endpoint's quota, drawn down while a placement is made."""

    name: str
    free: int
    tokens: int

    @property
    def starts(self) -> int:
        """How many calls may start now."""
        return min(self.free, self.tokens)


class FreeBlock(NamedTuple):
    """A free aligned block: `warm` if the service asked for stands on it, else `parks` is what
    would be parked."""

    node: NodeView
    gpus: tuple[int, ...]
    warm: bool
    parks: tuple[Resident, ...]


@dataclass(slots=True)
class Snapshot:
    """All that a placer may look at."""

    now_ns: int
    nodes: dict[int, NodeView]
    endpoints: dict[str, EndpointView]
    ledger: Ledger
    _eligible: dict[tuple[str, str, str, bool], list[NodeView]] = field(default_factory=dict)

    def fits(self, view: NodeView, shape: ActionShape, units: int) -> bool:
        """Whether an action of this shape can start with `units` CPUs on this node now; the units
        of one whose session reserves its own are there already."""
        return (
            (bool(shape.session) or units <= view.free_cpus)
            and shape.mem_mib <= view.free_mem_mib
            and (not shape.gpus or shape.gpus <= view.free_gpus)
            and view.takes(shape)
        )

    def room_for(self, view: NodeView, spec: SessionSpec, reserve: int) -> bool:
        """Whether a session fits on one of its possible homes with `reserve` cores of its own."""
        return spec.mem_mib <= view.free_mem_mib and reserve <= view.free_cpus

    def eligible_nodes(self, spec: SessionSpec) -> list[NodeView]:
        """The nodes on which a session may open now, amounts aside; none for a fork whose origin
        works."""
        if spec.origin:
            rests = may_fork(self.ledger.sessions[spec.origin], spec.id)
            return [self.nodes[n.node] for n in eligible_nodes(self.ledger, spec)] if rests else []
        want = (spec.component, spec.backend, spec.image, spec.trusted)
        if want not in self._eligible:
            self._eligible[want] = [self.nodes[n.node] for n in eligible_nodes(self.ledger, spec)]
        return self._eligible[want]

    def candidates(self, shape: ActionShape) -> Iterator[NodeView]:
        """The nodes on which an action of this shape may start, in order of joining."""
        if shape.node:
            home = self.nodes.get(shape.node)
            found = iter([home] if home is not None else [])
        else:
            found = iter(self.nodes.values())
        return (n for n in found if n.takes(shape))

    def blocks(self, service: str, size: int, shape: ActionShape) -> Iterator[FreeBlock]:
        """The free aligned blocks of this size on which a call of this service can start now."""
        spec, nodes = self.ledger.services[service], self.ledger.nodes
        for view in self.candidates(shape):
            if shape.mem_mib > view.free_mem_mib:
                continue
            for gpus in view.gpus.free_blocks(size):
                if not spec.may_stand(nodes[view.node].spec.name, gpus):
                    continue
                warm = view.gpus.holds(service, gpus)
                yield FreeBlock(view, gpus, warm, () if warm else tuple(view.gpus.residents(gpus)))


def snapshot(ledger: Ledger, now_ns: int) -> Snapshot:
    """The ledger's amounts as of now."""
    endings = Endings(ledger, now_ns)
    views = {
        n.node: NodeView(n.node, n.spec.component, len(n.cores.units), n.cores.free,
                         n.room_mib, len(n.sessions), n.gpus.copy() if n.gpus.units else n.gpus,
                         bool(n.spec.untrusted), n, endings if n.spec.ends_at_ns else None)
        for n in ledger.up_nodes()
    }
    endpoints = {name: EndpointView(name, e.free, e.tokens(now_ns))
                 for name, e in ledger.endpoints.items()}
    return Snapshot(now_ns, views, endpoints, ledger)
