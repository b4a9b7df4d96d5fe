"""Defines the input of a placer: the free amounts of each node and endpoint at one moment. Pure.

The amounts are a copy, which the placer draws down while it places. The queue and the ledger behind
it (`Snapshot.ledger`) are read only: waiting actions are not copied. Making a snapshot costs
O(nodes that are up + their GPUs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...domain.ids import client_of
from ...domain.isolation import guards_without_image
from ...domain.session import SessionSpec
from ..policy.ending import Endings
from ..state.gpu_blocks import GpuSet, Resident
from ..state.ledger import Ledger, NodeEntry
from ..state.queue import GPU, ActionShape, pool_of
from ..state.tenant_use import MEMORY, NO_LIMIT, TenantTurns
from .eligible_nodes import eligible_nodes, may_fork


@dataclass(slots=True)
class NodeView:
    """The amounts of a node, drawn down while a placement is made.

    Attributes:
        node: number of the node.
        component: the component of the job that the node belongs to.
        cpus: all CPUs that are lent on the node.
        free_cpus: CPUs that no lease and no session holds.
        free_mem_mib: memory that is free, in MiB.
        sessions: how many sessions have the node as their home.
        gpus: a copy of the node's GPU set: which GPUs are free and which services are resident.
        guards: whether the node can keep an action's code away from the user's files.
        entry: the node in the ledger.
        endings: tells which actions still fit before the node's allocation ends; None if its end is
            not known.
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
        """Returns whether an action of this shape may start here if there is room.

        The home node of its session is not considered.
        """
        return (not shape.component or shape.component == self.component) and (
            self.guards or not shape.guarded) and (
            self.endings is None or self.endings.fits(self.entry, shape))

    @property
    def free_gpus(self) -> int:
        """How many GPUs are free."""
        return self.gpus.free


@dataclass(slots=True)
class EndpointView:
    """The quota of an endpoint, drawn down while a placement is made.

    Attributes:
        name: the NAME in `endpoint:NAME`.
        free: how many more calls may run at once.
        tokens: how many calls the token bucket allows now.
    """

    name: str
    free: int
    tokens: int

    @property
    def starts(self) -> int:
        """How many calls may start now."""
        return min(self.free, self.tokens)


class FreeBlock(NamedTuple):
    """A free aligned block of GPUs, as seen by calls of one service.

    Attributes:
        node: the node of the block.
        gpus: the GPUs of the block, by number.
        warm: whether the service is resident on this block.
        parks: the services that would be parked; empty if the block is warm.
    """

    node: NodeView
    gpus: tuple[int, ...]
    warm: bool
    parks: tuple[Resident, ...]


@dataclass(slots=True)
class Snapshot:
    """All that a placer may look at.

    Attributes:
        now_ns: the time of the snapshot, in epoch ns.
        nodes: the nodes that are up, by number, in order of joining.
        endpoints: the endpoints for which a call waits, by name.
        ledger: the scheduler's state; read only.
    """

    now_ns: int
    nodes: dict[int, NodeView]
    endpoints: dict[str, EndpointView]
    ledger: Ledger
    _eligible: dict[tuple[str, str, str, bool], list[NodeView]] = field(default_factory=dict)
    _turns: dict[str, TenantTurns | None] = field(default_factory=dict)

    def turns(self, resource: str) -> TenantTurns | None:
        """Returns the order of the tenants in a resource, which placers draw down as they grant;
        None if there is nothing to compare.
        """
        if not self.ledger.tenants.compared:
            return None
        if resource not in self._turns:
            self._turns[resource] = self.ledger.tenants.turns(resource, self.now_ns)
        return self._turns[resource]

    def room(self, action: int, shape: ActionShape) -> int:
        """Returns how many units of its key resource an action's tenant may hold in addition; 0 if
        its memory or its GPUs would be beyond a limit.
        """
        tenants = self.ledger.tenants
        if not tenants.limited:
            return NO_LIMIT
        tenant = tenants.tenant_of(client_of(action))
        pool = pool_of(shape.key, shape.degrees[-1])
        wants = [(resource, units) for resource, units in ((MEMORY, shape.mem_mib),
                                                           (GPU, shape.gpus)) if units]
        for resource, units in wants:
            turns = self.turns(resource)
            if turns is not None and units > turns.room(tenant):
                return 0
        turns = self.turns(pool)
        return NO_LIMIT if turns is None or shape.session else max(0, turns.room(tenant))

    def hold_back(self, action: int, shape: ActionShape) -> None:
        """Lets the tenant of an action that waits for the tenant's limit start no other one with
        this key resource in this pass, so that the units that come free gather for it.
        """
        turns = self.turns(pool_of(shape.key, shape.degrees[-1]))
        if turns is not None:
            turns.charge(turns.tenant_of(client_of(action)), self.room(action, shape))

    def charge(self, action: int, shape: ActionShape, units: int) -> None:
        """Counts for its tenant what an action is granted in this pass."""
        tenants = self.ledger.tenants
        if not tenants.compared:
            return
        tenant = tenants.tenant_of(client_of(action))
        pool = pool_of(shape.key, shape.degrees[-1])
        for resource, amount in ((pool, 0 if shape.session else max(1, units)),
                                 (MEMORY, shape.mem_mib), (GPU, shape.gpus)):
            if amount and (turns := self.turns(resource)) is not None:
                turns.charge(tenant, amount)

    def fits(self, view: NodeView, shape: ActionShape, units: int) -> bool:
        """Returns whether an action of this shape can start with `units` CPUs on this node now.

        An action in a session that reserves CPUs has its units already.
        """
        return (
            (bool(shape.session) or units <= view.free_cpus)
            and shape.mem_mib <= view.free_mem_mib
            and (not shape.gpus or shape.gpus <= view.free_gpus)
            and view.takes(shape)
        )

    def room_for(self, view: NodeView, spec: SessionSpec, reserve: int) -> bool:
        """Returns whether an eligible node has room for a session that reserves `reserve` CPUs."""
        return spec.mem_mib <= view.free_mem_mib and reserve <= view.free_cpus

    def eligible_nodes(self, spec: SessionSpec) -> list[NodeView]:
        """Returns the nodes on which a session may open now if memory and cores suffice.

        A fork whose origin is busy may open nowhere.
        """
        if spec.origin:
            rests = may_fork(self.ledger.sessions[spec.origin], spec.id)
            return [self.nodes[n.node] for n in eligible_nodes(self.ledger, spec)] if rests else []
        want = (spec.component, spec.backend, spec.image, spec.trusted)
        if want not in self._eligible:
            self._eligible[want] = [self.nodes[n.node] for n in eligible_nodes(self.ledger, spec)]
        return self._eligible[want]

    def candidates(self, shape: ActionShape) -> Iterator[NodeView]:
        """Returns the nodes on which an action of this shape may start, in order of joining."""
        if shape.node:
            home = self.nodes.get(shape.node)
            found = iter([home] if home is not None else [])
        else:
            found = iter(self.nodes.values())
        return (n for n in found if n.takes(shape))

    def blocks(self, service: str, size: int, shape: ActionShape) -> Iterator[FreeBlock]:
        """Yields the free aligned blocks of `size` GPUs for a call of this service."""
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
    """Returns the amounts of the ledger at `now_ns`."""
    endings = Endings(ledger, now_ns)
    views = {
        n.node: NodeView(n.node, n.spec.component, len(n.cores.units), n.cores.free,
                         n.room_mib, len(n.sessions), n.gpus.copy() if n.gpus.units else n.gpus,
                         guards_without_image(n.spec.untrusted), n,
                         endings if n.spec.ends_at_ns else None)
        for n in ledger.up_nodes()
    }
    endpoints = {e.spec.name: EndpointView(e.spec.name, e.free, e.tokens(now_ns))
                 for e in ledger.called_endpoints()}
    return Snapshot(now_ns, views, endpoints, ledger)
