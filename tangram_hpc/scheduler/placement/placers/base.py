"""Defines the interface of placers, and the steps that several placers share. Pure.

A placer reads a `Snapshot` and returns a `Placement`. It changes nothing but the snapshot's copies
of amounts, and whatever it remembers may be lost at a restart. Each line of a placement becomes an
event of the journal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ....domain.ids import client_of
from ....domain.service import endpoint_of, service_of
from ...state.queue import NOTHING, ActionShape
from ..snapshot import EndpointView, FreeBlock, NodeView, Snapshot


class SessionPlacement(NamedTuple):
    """Opens a session on a node.

    Attributes:
        session: id of the session.
        node: number of its home node.
        reserve: CPUs that the session holds while it is open.
    """

    session: int
    node: int
    reserve: int


class Grant(NamedTuple):
    """Starts an action on a node.

    Attributes:
        action: id of the action.
        node: number of the node; 0 for an endpoint call that its client makes itself.
        units: units of the key resource. They are one of the action's degrees, or for an action
            whose CPUs may be resized any number from 0 to its largest degree.
        gpus: the aligned block of a service call, or whole GPUs for an action that asks for some.
    """

    action: int
    node: int
    units: int
    gpus: tuple[int, ...] = ()


class Resizing(NamedTuple):
    """Changes the CPUs of a running lease, at the earliest at `LeaseEntry.resizable_at`.

    Attributes:
        lease: number of the lease.
        units: CPUs from now on; 0 suspends the action.
    """

    lease: int
    units: int


@dataclass(slots=True)
class Placement:
    """The decisions of a placer in one cycle.

    It is carried out as openings, resizes that shrink, resizes that grow, and grants, each in the
    order given. So CPUs that one lease gives up can go to leases that grow or start.

    Attributes:
        openings: sessions to open. If there are any, only these are carried out and the placer is
            asked again at once, so that an action that waits for its session starts before younger
            ones.
        resizings: running leases that change their size.
        grants: actions that start.
        again_at: when to place again although nothing may have happened, in epoch ns; 0 for no
            need.
        drained: blocks of GPUs that are to come free for another call, as (node, GPU). Their copies
            take no further calls.
    """

    openings: list[SessionPlacement] = field(default_factory=list)
    resizings: list[Resizing] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    again_at: int = 0
    drained: set[tuple[int, int]] = field(default_factory=set)

    def look_again(self, at: int) -> None:
        """Asks to place again at a time at the latest, in epoch ns; 0 for no need."""
        if at:
            self.again_at = min(self.again_at or at, at)


class Placer(Protocol):
    """The interface of placement.

    Attributes:
        name: the name by which people choose it.
        reserve: CPUs that each session holds while it is open.
        block_max: the number of GPUs of the largest block that the placer grants to a service call.
            Admission refuses calls that run on larger blocks only.
    """

    name: str
    reserve: int
    block_max: int

    def place(self, view: Snapshot) -> Placement:
        """Returns the sessions to open, resizes and grants for now; an empty placement is valid."""
        ...


def largest(degrees: tuple[int, ...], at_most: int) -> int:
    """Returns the largest degree that is at most `at_most`, or the smallest degree if none is."""
    fitting = [d for d in degrees if d <= at_most]
    return fitting[-1] if fitting else degrees[0]


def grant(view: Snapshot, placement: Placement, action: int, shape: ActionShape, node: NodeView,
          units: int, gpus: tuple[int, ...] = ()) -> None:
    """Adds a grant to the placement and draws its amounts from the snapshot."""
    service, endpoint = service_of(shape.key), endpoint_of(shape.key)
    if service:
        node.gpus.take(gpus)
        node.gpus.settle(service, gpus, view.now_ns)
    elif endpoint:
        view.endpoints[endpoint].free -= 1
        view.endpoints[endpoint].tokens -= 1
    elif not shape.session:  # a session that reserves CPUs holds them already
        node.free_cpus -= units
    if shape.gpus:
        whole, _ = node.gpus.choose(shape.gpus, node.gpus.free_mask)
        node.gpus.take(whole)
        node.gpus.evict(whole)
        gpus = gpus or whole
    node.free_mem_mib -= shape.mem_mib
    view.charge(action, shape, units)
    placement.grants.append(Grant(action, node.node, units, gpus))


class Finder:
    """Finds nodes with free CPUs during one cycle.

    It remembers which nodes had free CPUs at the cycle's start, and for which needs it found no
    node: free amounts only shrink within a cycle, so it will not find one later either.
    """

    def __init__(self, view: Snapshot) -> None:
        self._view = view
        self._open = [n for n in view.nodes.values() if n.free_cpus]
        self._most: dict[tuple[str, bool, int], int] = {}
        self._full: set[tuple[object, ...]] = set()
        self._ends = any(n.endings is not None for n in view.nodes.values())

    def most(self, shape: ActionShape) -> int:
        """Returns the CPUs of the largest node on which an action of this shape may run."""
        where = (shape.component, shape.guarded, shape.node)
        if where not in self._most:
            self._most[where] = max((n.cpus for n in self._view.candidates(shape)), default=0)
        return self._most[where]

    def node(self, shape: ActionShape, units: int) -> NodeView | None:
        """Returns the node that joined first of those where an action of this shape can start now.
        """
        need: tuple[object, ...] = (units, shape) if self._ends else (
            units, shape.mem_mib, shape.gpus, shape.component, shape.guarded, shape.node,
            shape.session)
        if need in self._full:
            return None
        free = self._view.candidates(shape)
        if units and not shape.node:
            free = (n for n in self._open if n.takes(shape))
        for node in free:
            if self._view.fits(node, shape, units):
                return node
        self._full.add(need)
        return None


def find_block(view: Snapshot, shape: ActionShape, size: int) -> FreeBlock | None:
    """Returns the free block on which a call of this service costs least, or None. O(GPUs).

    A block on which the service is resident comes first, then a block where no service would be
    parked, then the block whose services were used longest ago.
    """
    def cost(block: FreeBlock) -> tuple[bool, int, int, tuple[int, ...]]:
        return (not block.warm, max((p.used_at for p in block.parks), default=-1),
                block.node.node, block.gpus)
    return min(view.blocks(service_of(shape.key), size, shape), key=cost, default=None)


def block_sizes(view: Snapshot, shape: ActionShape) -> tuple[int, ...]:
    """Returns the degrees of a call for which some node has a block, free or not.

    O(nodes x blocks).
    """
    spec, nodes = view.ledger.services[service_of(shape.key)], view.ledger.nodes
    return tuple(size for size in shape.degrees if any(
        spec.may_stand(nodes[n.node].spec.name, gpus)
        for n in view.candidates(shape) for gpus, _ in n.gpus.blocks[size]))


def start_unitless(view: Snapshot, placement: Placement) -> None:
    """Starts actions that hold no CPU, in order, where their memory and GPUs are free."""
    if not view.ledger.ready.waits(NOTHING):
        return
    walk, finder = view.ledger.ready.walk(NOTHING, view.turns(NOTHING)), Finder(view)
    while (head := walk.head()) is not None:
        action, shape = head
        node = finder.node(shape, 0) if view.room(action, shape) else None
        if node is None:
            walk.skip_shape()
            continue
        grant(view, placement, action, shape, node, 0)
        walk.next()


def start_all_calls(view: Snapshot, placement: Placement) -> None:
    """Starts calls of each endpoint, as far as its quota allows. O(starts + endpoints)."""
    for endpoint in view.endpoints.values():
        start_calls(view, placement, endpoint)


def start_calls(view: Snapshot, placement: Placement, endpoint: EndpointView,
                admit: Callable[[int], bool] | None = None) -> None:
    """Starts calls of an endpoint in order of readiness, as far as its quota allows. O(starts).

    Calls are spread over the nodes in turn.

    Args:
        view: the snapshot of this cycle.
        placement: gets the grants.
        endpoint: the endpoint.
        admit: is asked for each call that could start, and returns whether it does. After a call
            that does not, those of the same shape behind it in its queue are passed over. None
            admits all calls.
    """
    if endpoint.starts <= 0:
        return
    pool = "endpoint:" + endpoint.name
    walk = view.ledger.ready.walk(pool, view.turns(pool))
    while endpoint.starts > 0 and (head := walk.head()) is not None:
        action, shape = head
        if not view.room(action, shape):
            walk.skip_shape()
            continue
        if shape.at_client and client_of(action) in view.ledger.disconnected:
            walk.next()  # it cannot call
            continue
        nodes = [] if shape.at_client else [n for n in view.candidates(shape)
                                            if view.fits(n, shape, 0)]
        if not (nodes or shape.at_client) or (admit is not None and not admit(action)):
            walk.skip_shape()
            continue
        if shape.at_client:
            endpoint.free, endpoint.tokens = endpoint.free - 1, endpoint.tokens - 1
            view.charge(action, shape, 1)
            placement.grants.append(Grant(action, 0, 1))
        else:
            turn = (view.ledger.next_lease + len(placement.grants)) % len(nodes)
            grant(view, placement, action, shape, nodes[turn], 1)
        walk.next()
