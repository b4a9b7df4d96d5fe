"""The CPU side of `elastic`: chooses the nodes to look at, and starts and resizes actions there.
Pure.

The order of waiting actions comes from `Waiting`, and sizes come from `divide_cpus`, which chooses
among those that `rigid_sizes.py` allows an action that keeps its size. `start_choice.py` says which
actions may start at all.

A node is looked at when its revision has changed or its time has come. Most of the memory between
cycles only saves work: the revision that was seen, when to look again, and work that was already
added up. Without this memory every node is looked at. The rest is what tenants held on the node
lately (`tenant_parts.py`); a broker that is started again begins without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from .....domain.action import Action
from .....domain.ids import client_of
from .....domain.states import LeaseState
from ....state.estimator import Estimator
from ....state.ledger import RESIZE_GAP_NS, LeaseEntry
from ....state.queue import CPU, ActionShape, ShapeQueue
from ....state.speed import speed_gains
from ....state.tenant_use import TenantTurns, copy_of
from ...snapshot import NodeView, Snapshot
from ..base import Placement, Resizing, grant
from ..recent_use import RecentUse
from ..tenant_parts import BALANCE_NS, Held, TenantParts
from ..waiting import AGED_NS, OVERDUE_NS, Backlog, Waiting
from .cpu_division import ResizableLease, WaitingCandidate, weight
from .node_leases import cpu_leases, done_before, from_one, gives_back, is_elastic, work_left
from .resize_cost import PATIENCE, counted_cost, divide_with_cost, is_worth
from .rigid_sizes import NodeLoad, sizes_to_start
from .start_choice import Choice, Chosen

# Tenants that hold units of a node are compared again after BALANCE_NS, times the nodes divided by
# BALANCE_NODES. So at most BALANCE_NODES nodes are looked at for that in BALANCE_NS.
BALANCE_NODES = 16
# A lease whose size may change, its largest size, its serial fraction, and ns of work that is left.
_Holder = tuple[LeaseEntry, int, int, int]
STARTS = 64  # grants after which a cycle ends, if waiting actions may start on any node


@dataclass(slots=True)
class _Node:
    """The memory of one node.

    Attributes:
        revision: the node's revision when it was last looked at.
        look_at: when to look at it again, in epoch ns; 0 for not before it changes.
        keeps_gpus: whether an action that nothing may overtake waits here for more GPUs than are
            free.
        done: what `done_before` returned for each lease.
        recent: what tenants held here lately; empty if there is nothing to compare.
        lent: until when units are lent that gather here, by the action for which they do.
    """

    revision: int = -1
    look_at: int = 0
    keeps_gpus: bool = False
    done: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    recent: RecentUse = field(default_factory=RecentUse)
    lent: dict[int, int] = field(default_factory=dict)


class ElasticCpus:
    """Divides the CPUs of each node that has changed.

    Args:
        tail: see `weight`. If it is not 0, the action with the lowest order tag comes first once
            it has waited AGED_NS.
    """

    def __init__(self, tail: int) -> None:
        self._tail, self._aged_ns = tail, AGED_NS if tail else 0
        self._nodes: dict[int, _Node] = {}
        self._floating = -1

    def place(self, view: Snapshot, placement: Placement) -> None:
        """Adds resizings and grants of CPUs to the placement.

        The walk for each node must skip all actions that were started on other nodes in this cycle.
        To keep the cost from becoming quadratic, the cycle ends after STARTS starts, and the next
        one follows at once. O(nodes + n log n) for n actions that run or wait on the nodes that are
        looked at.
        """
        ledger = view.ledger
        floating = bool(ledger.ready.shards_at(CPU, "cpu", 0))
        for gone in [n for n in self._nodes if n not in view.nodes]:
            del self._nodes[gone]
        for node in self._due(view):
            kept = self._nodes[node.node]
            kept.revision = ledger.nodes[node.node].revision
            if kept.look_at <= view.now_ns:
                kept.look_at = 0
            self._divide(view, placement, node, kept)
            if floating and len(placement.grants) >= STARTS:
                placement.again_at = view.now_ns + 1  # nodes not looked at still count as changed
                return
        self._floating = ledger.revision
        times = [k.look_at for k in self._nodes.values() if k.look_at]
        if times:
            placement.again_at = min(times)

    def keeping_gpus(self) -> list[int]:
        """Returns the nodes whose GPUs no call of a service may take now."""
        return [n for n, kept in self._nodes.items() if kept.keeps_gpus]

    def look_again_at(self, nodes: Iterable[int]) -> None:
        """Looks at nodes in the next cycle although they may not have changed by then."""
        for number in nodes:
            self._nodes[number].revision = -1

    def _due(self, view: Snapshot) -> list[NodeView]:
        """Returns the nodes to look at.

        Where actions may start on any node, those with most free CPUs come first.
        """
        ledger, now = view.ledger, view.now_ns
        floating = bool(ledger.ready.shards_at(CPU, "cpu", 0))
        due: list[NodeView] = []
        rest: list[NodeView] = []
        for node in view.nodes.values():
            kept = self._nodes.setdefault(node.node, _Node())
            revision = ledger.nodes[node.node].revision
            (due if kept.revision != revision or 0 < kept.look_at <= now else rest).append(node)
        if floating:
            if ledger.revision != self._floating and rest:
                some = [n for n in rest if n.free_cpus]
                due += some or [min(rest, key=lambda n: (
                    len(ledger.nodes[n.node].leases) * 1_000_000 // max(1, n.cpus), n.node))]
            due.sort(key=lambda n: (-n.free_cpus, n.node))
        return due

    def _divide(self, view: Snapshot, placement: Placement, node: NodeView, kept: _Node) -> None:
        queues = _queues(view, node)
        divides = (view.ledger.nodes[node.node].wide > 0
                   or any(q.shape.degrees[-1] > 1 for q in queues))
        if divides:
            holders, lefts, soonest = self._holders(view, node, kept)
        else:  # there is nothing to divide, and what is left of the work decides nothing
            holders, lefts, soonest = [], 0, 0
            kept.done = {}
        turns = view.turns(CPU)
        drawn = copy_of(turns)
        parts = _parts(view, node, queues, drawn, kept.recent)
        if not holders and not queues:  # no lease to resize and no action to start
            kept.keeps_gpus = False
            return self._look_again(view, kept, soonest, [], None)
        room = node.free_cpus + sum(lease.units - 1 for lease, _, _, _ in holders
                                    if lease.units > 1)
        started = {g.action for g in placement.grants}
        backlog = None if self._tail else Backlog(view.ledger, queues, node.cpus, len(view.nodes))
        waiting = Waiting(view.ledger, queues, view.now_ns, aged_ns=self._aged_ns,
                          turns=drawn, backlog=backlog)
        choice = Choice(view, placement, node, waiting, room, started, parts, kept.lent, kept.done)
        kept.keeps_gpus = choice.keeps_gpus
        if divides:
            sizes_of = _StartSizes(view, node, queues, turns, parts, room)
            sizes, starts, again = self._sizes(view, node, holders, lefts, choice, sizes_of, turns)
        else:  # each has one size, and no more were chosen than there are CPUs
            sizes, starts, again = [], [(action.id, 1) for action, *_ in choice.chosen], ()
        shapes = {action.id: shape for action, shape, _, _ in choice.chosen}
        _carry_out(view, placement, node, kept, sizes, [(a, shapes.pop(a), n) for a, n in starts],
                   turns)
        self._look_again(view, kept, soonest,
                         [*shapes, *choice.aside,
                          *(first.action for first in waiting.each_oldest())], backlog)
        due = 0  # when tenants are compared again
        if turns is not None and (turns.contended or (parts is not None and parts.held_back)):
            due = view.now_ns + BALANCE_NS * -(-len(view.nodes) // BALANCE_NODES)
        for at in (*again, due):
            if at > view.now_ns:
                kept.look_at = min(kept.look_at or at, at)

    def _sizes(self, view: Snapshot, node: NodeView, holders: list[_Holder], lefts: int,
               choice: Choice, sizes_of: _StartSizes, turns: TenantTurns | None,
               ) -> tuple[list[tuple[int, int]], list[tuple[int, int]], tuple[int, ...]]:
        """Divides a node's CPUs among its leases and what was chosen to start.

        Returns:
            (lease, CPUs) of the leases that change; (action, CPUs) of the actions that start; and
            when the node must be looked at again, in epoch ns (0 or past: it need not be).
        """
        cost = counted_cost(view.ledger.nodes[node.node].resize_ns)
        takes_at = _takes_at(view, cost, choice.chosen)
        leases, candidates = self._competing(view, holders, lefts, choice.chosen, sizes_of, cost)
        sizes, starts = divide_with_cost(node.free_cpus, cost, takes_at > view.now_ns, leases,
                                         candidates, turns)
        left = len(starts) < len(choice.chosen)
        return sizes, starts, (sizes_of.changes_at, takes_at if left else 0)

    def _competing(self, view: Snapshot, holders: list[_Holder], lefts: int, chosen: list[Chosen],
                   sizes_of: _StartSizes, cost: int,
                   ) -> tuple[list[tuple[ResizableLease, int, int]], list[WaitingCandidate]]:
        """Returns the leases and the waiting actions among which a node's CPUs are divided, as
        `divide_with_cost` takes them.

        Args:
            lefts: the work that is left of the holders, in ns.
        """
        estimator, tenant_of = view.ledger.estimator, view.ledger.tenants.tenant_of
        estimates = [estimator.estimate(action) for action, _, _, _ in chosen]
        scale = (2 * (lefts + sum(work for _, work in estimates))
                 // max(1, len(holders) + len(chosen)))
        leases = [(ResizableLease(lease.lease, lease.units, top, speed_gains(serial, top),
                                  self._weight(view, lease.action, left, scale), lease.tenant),
                   serial, left)
                  for lease, top, serial, left in holders]
        candidates = []
        for (a, shape, must, most), (serial, work) in zip(chosen, estimates, strict=True):
            keeps = _keeps_size(estimator, a, cost, serial, work)
            candidates.append(WaitingCandidate(
                a.id, sizes_of(a, shape, serial, work, most, keeps), keeps,
                speed_gains(serial, a.degrees[-1]), self._weight(view, a.id, work, scale), must,
                tenant_of(client_of(a.id))))
        return leases, candidates

    def _weight(self, view: Snapshot, action: int, left: int, scale: int) -> int:
        if not self._tail:
            return weight(left, scale)
        # the clock of a broker that was started again may be behind that of its journal
        age = max(0, view.now_ns - view.ledger.actions[action].submitted_at)
        return weight(left, scale, age, self._tail)

    def _look_again(self, view: Snapshot, kept: _Node, soonest: int, left: list[int],
                    backlog: Backlog | None) -> None:
        """Sets when to look at a node again: when sizes may change, or when an action gets overdue.

        `left` are the actions that stay waiting.
        """
        if kept.look_at:
            return
        at = (soonest if left else view.now_ns + RESIZE_GAP_NS) if soonest else 0
        for action in left:
            since = view.ledger.actions[action].submitted_at
            overdue = since + OVERDUE_NS
            if backlog is not None and overdue <= view.now_ns:
                overdue = since + backlog.wait_ns(action)
            for due in (since + self._aged_ns, overdue):
                if due > view.now_ns and (not at or due < at):
                    at = due
        kept.look_at = at

    def _holders(self, view: Snapshot, node: NodeView, kept: _Node,
                 ) -> tuple[list[_Holder], int, int]:
        """Finds the leases whose size may change now.

        Returns:
            These leases; the sum of the work that is left; and when the first of the other leases
            may change, in epoch ns (0: none).
        """
        ledger, now = view.ledger, view.now_ns
        estimator, actions = ledger.estimator, ledger.actions
        found, lefts, soonest = [], 0, 0
        done: dict[int, tuple[int, int, int]] = {}
        for lease_id in ledger.nodes[node.node].leases:
            lease = ledger.leases[lease_id]
            if lease.key != "cpu" or lease.reserved or lease.state is LeaseState.RELEASING:
                continue
            action = actions[lease.action].action
            if not is_elastic(action.resizable, action.degrees):
                continue
            if now < lease.resizable_at:
                soonest = min(soonest or lease.resizable_at, lease.resizable_at)
                continue
            serial = estimator.serial(action)
            past = done_before(lease, serial, kept.done.get(lease_id))
            done[lease_id] = past
            left = work_left(view, lease, past)
            lefts += left
            found.append((lease, action.degrees[-1], serial, left))
        kept.done = done
        return found, lefts, soonest


def _carry_out(view: Snapshot, placement: Placement, node: NodeView, kept: _Node,
               sizes: list[tuple[int, int]], starts: list[tuple[int, ActionShape, int]],
               turns: TenantTurns | None) -> None:
    """Adds to the placement the leases of a node that change, as (lease, CPUs), and the actions
    that start, as (action, shape, CPUs).
    """
    for lease_id, units in sizes:
        lease = view.ledger.leases[lease_id]
        more = units - lease.units
        placement.resizings.append(Resizing(lease_id, units))
        node.free_cpus -= more
        if turns is not None:
            turns.charge(lease.tenant, more)
            _note_lately(view, kept, lease.tenant, lease.session, more)
    for action, shape, units in starts:
        grant(view, placement, action, shape, node, units)
        if turns is not None:
            _note_lately(view, kept, turns.tenant_of(client_of(action)),
                         view.ledger.actions[action].action.session, units)


def _keeps_size(estimator: Estimator, action: Action, cost: int, serial: int, work: int) -> bool:
    """Returns whether an action will keep the size with which it starts: because it must, or
    because no resize of it is expected to be worth its cost.
    """
    if not is_elastic(action.resizable, action.degrees):
        return True
    if not cost or (action.profile is None and not estimator.seen(action)):
        return False
    degrees = from_one(action.degrees)
    return not is_worth(cost, serial, work, degrees[0], degrees[-1])


def _takes_at(view: Snapshot, cost: int, chosen: list[Chosen]) -> int:
    """Returns when actions that may start may take units from those that run, in epoch ns; 0 if
    resizes cost nothing there.
    """
    if not cost or not chosen:
        return 0
    return PATIENCE * cost + min(view.ledger.actions[action.id].submitted_at
                                 for action, *_ in chosen)


class _StartSizes:
    """Gives the degrees on which each candidate of a node may start now.

    Attributes:
        changes_at: when a candidate that waits for units may start on fewer, epoch ns; 0 for none.
    """

    def __init__(self, view: Snapshot, node: NodeView, queues: list[ShapeQueue],
                 turns: TenantTurns | None, parts: TenantParts | None, room: int) -> None:
        self._view, self._node, self._queues = view, node, queues
        self._turns, self._parts, self._room = turns, parts, room
        self._load: NodeLoad | None = None
        self._own: dict[str, NodeLoad | None] = {}  # by tenant
        self.changes_at = 0

    def __call__(self, action: Action, shape: ActionShape, serial: int, work: int, most: int,
                 keeps: bool) -> tuple[int, ...]:
        degrees = from_one(shape.degrees)
        if len(degrees) == 1 or not keeps:
            return degrees
        ledger, now, load = self._view.ledger, self._view.now_ns, self._load
        if load is None:
            load = self._load = self._measure()
        limit = min(load.cpus, most)
        if self._turns is not None:
            limit = min(limit, self._turns.room(ledger.tenants.tenant_of(client_of(action.id))))
        possible = tuple(d for d in degrees if d <= limit) or degrees[:1]
        sizes, lasts = sizes_to_start(possible, serial, work, load,
                                      now - ledger.actions[action.id].submitted_at,
                                      self._on_own_part(action))
        if lasts:
            self.changes_at = min(self.changes_at or now + lasts, now + lasts)
        return sizes

    def _measure(self) -> NodeLoad:
        """Returns the load of the node."""
        running = len(cpu_leases(self._view, self._node))
        waiting = self._waiting(self._queues)
        return NodeLoad(self._node.cpus, self._node.free_cpus, running + waiting, waiting)

    def _on_own_part(self, action: Action) -> NodeLoad | None:
        """Returns the load of an action's tenant on its part of the node; None if no other tenant
        uses the node.
        """
        if self._parts is None:
            return None
        tenant = self._view.ledger.tenants.tenant_of(client_of(action.id))
        if tenant not in self._own:
            running = sum(lease.tenant == tenant for lease in cpu_leases(self._view, self._node))
            waiting = self._waiting([q for q in self._queues if q.shard.share.tenant == tenant])
            self._own[tenant] = self._parts.load(tenant, running + waiting, waiting, self._room)
        return self._own[tenant]

    def _waiting(self, queues: list[ShapeQueue]) -> int:
        """Returns how many actions wait. Those that may start on any node count in equal parts."""
        anywhere = sum(len(queue) for queue in queues if not queue.shard.node)
        return (sum(len(queue) for queue in queues if queue.shard.node)
                + -(-anywhere // len(self._view.nodes)))


def _queues(view: Snapshot, node: NodeView) -> list[ShapeQueue]:
    """Returns the shape queues whose actions may start on this node."""
    ready, queues = view.ledger.ready, []
    for home in (node.node, 0):
        for shard in ready.shards_at(CPU, "cpu", home):
            queues += [queue for queue in shard.queues.values() if node.takes(queue.shape)]
    return queues


def _parts(view: Snapshot, node: NodeView, queues: list[ShapeQueue], turns: TenantTurns | None,
           recent: RecentUse) -> TenantParts | None:
    """Returns the parts of the node's tenants, and notes what they hold; None if there is nothing
    to compare. O(leases and queues of the node).
    """
    if turns is None:
        return None
    held = defaultdict[str, Held](Held)
    for lease in cpu_leases(view, node):
        of = held[lease.tenant]
        of.units += lease.units
        of.solid += min(1, lease.units) if gives_back(view, lease) else lease.units
        if _counts_lately(view, lease.session):
            of.lately += lease.units
    recent.note({tenant: of.lately for tenant, of in held.items()}, view.now_ns, turns.changed_at)
    return TenantParts(node.cpus, turns, held, (q.shard.share.tenant for q in queues), recent)


def _counts_lately(view: Snapshot, session: int) -> bool:
    """Returns whether the units of an action count for what its tenant held lately on the node.
    Actions without a session do only if there is one node, since the next one may start on any.
    """
    return session != 0 or len(view.nodes) == 1


def _note_lately(view: Snapshot, kept: _Node, tenant: str, session: int, units: int) -> None:
    """Notes `units` more that an action of a tenant holds on a node; `session` is 0 for none."""
    if _counts_lately(view, session):
        kept.recent.add(tenant, units, view.now_ns)
