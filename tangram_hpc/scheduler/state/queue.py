"""Pure. The waiting actions that may start now, grouped by shape, and their order.

Problem: a pass of a placer must not cost more because more actions wait.

Idea: an action's shape is all that placement looks at, and actions of one shape are
interchangeable. So a placer that finds no room for one of them need not look at the others
(HyperQueue groups resource requests likewise). Actions of one shape stand in a *shape queue*. Shape
queues stand in *queue shards*, one for each key, home node, client and group of that client's
actions; a placer that knows where units are free looks at the shards of those nodes only. Shards
whose keys compete for the same units form a *pool*.

Invariants: the ledger's handlers decide which actions are in here. Within a shard the order is that
of order tags, which are drawn once for each action. Between the shards of several clients or groups
`fair_order` says who is next. Adding and removing costs O(log length of a shape queue); a walk
costs O(shards) at its start and O(log) a step, and changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from ...domain.action import Action, Kind
from ...domain.ids import client_of
from .fair_order import (
    SINGLE,
    TRAJECTORY,
    ClientShare,
    PoolShares,
    Rounds,
    arrival_of,
    trajectory_of,
)
from .speed import octaves
from .tenant_use import Tenants, TenantTurns

CPU, GPU, NOTHING = "cpu", "gpu", "nothing"  # pools; each endpoint has one of its own
# A shard with this many shape queues opens no further one for a single class. Actions of further
# classes share shape queues by expected work, one for each octave, so that a thousand names cost a
# pass no more than a few.
QUEUES_NAMED = 16
_OCTAVE = 7  # the low bits of a bucket of `octaves`
_T = TypeVar("_T")


class ActionShape(NamedTuple):
    """All properties of an action that placement uses.

    Attributes:
        key: the key resource.
        degrees: the numbers of units on which it can run, ascending.
        mem_mib: its memory.
        gpus: GPUs beside its key resource.
        component: the component whose nodes it needs; empty for any.
        node: the home node of its session; 0 for any node.
        session: its session, if that reserves cores of its own; 0 otherwise.
        name: its class, if `size` is 0.
        size: its expected work as a bucket of `octaves`, from its profile, or from the estimate at
            the time when it came to a shard that had many shape queues. With 0 the class's present
            estimate counts.
        resizable: whether its size may change while it runs.
        guarded: whether it needs a node that can keep its code from its user's files.
        at_client: whether its client carries it out, on no node.
        limit: its timeout as a bucket of `octaves`; 0 for none.
    """

    key: str
    degrees: tuple[int, ...]
    mem_mib: int
    gpus: int
    component: str
    node: int
    session: int
    name: str = ""
    size: int = 0
    resizable: bool = True
    guarded: bool = False
    at_client: bool = False
    limit: int = 0


def pool_of(key: str, units: int) -> str:
    """The pool in which an action waits.

    Args:
        key: its key resource.
        units: its largest degree.
    """
    if key == "cpu":
        return CPU if units else NOTHING
    return GPU if key.startswith("service:") else key


class TagHeap(Generic[_T]):
    """Values in order of their order tags, with removal anywhere.

    It is a heap in which removed tags stay until they come to its front or outnumber the others.
    """

    __slots__ = ("_heap", "at")

    def __init__(self) -> None:
        self._heap: list[int] = []
        self.at: dict[int, _T] = {}

    def __len__(self) -> int:
        return len(self.at)

    def add(self, order_tag: int, value: _T) -> None:
        """Adds a value under an order tag that is not in use."""
        assert order_tag not in self.at
        self.at[order_tag] = value
        heapq.heappush(self._heap, order_tag)

    def drop(self, order_tag: int) -> _T:
        """Removes and returns the value under an order tag."""
        value = self.at.pop(order_tag)
        heap = self._heap
        while heap and heap[0] not in self.at:
            heapq.heappop(heap)
        if len(heap) > len(self.at) * 9 // 8 + 64:
            heap[:] = sorted(self.at)
        return value

    def move(self, order_tag: int, to: int) -> None:
        """Puts the value under an order tag under another one that is not in use."""
        heap, at = self._heap, self.at
        if heap[0] != order_tag:
            self.add(to, self.drop(order_tag))
            return
        at[to] = at.pop(order_tag)
        heapq.heapreplace(heap, to)
        while heap[0] not in at:
            heapq.heappop(heap)

    def first(self) -> int:
        """The lowest order tag; there must be one."""
        return self._heap[0]

    def walk(self) -> Iterator[tuple[int, _T]]:
        """Yields order tags and values in order; nothing may change meanwhile."""
        heap, at, size = self._heap, self.at, len(self._heap)
        edge = [(heap[0], 0)] if heap else []
        last = 0
        while edge:
            order_tag, index = heapq.heappop(edge)
            for child in (2 * index + 1, 2 * index + 2):
                if child < size:
                    heapq.heappush(edge, (heap[child], child))
            if order_tag in at and order_tag != last:
                last = order_tag
                yield order_tag, at[order_tag]


class ShapeQueue:
    """The waiting actions of one shape in one shard, in order."""

    __slots__ = ("_head", "actions", "shape", "shard")

    def __init__(self, shape: ActionShape, shard: QueueShard) -> None:
        self.shape, self.shard = shape, shard
        self.actions: TagHeap[int] = TagHeap()
        self._head = 0  # this queue's order tag in the heads of its shard

    def __len__(self) -> int:
        return len(self.actions)


class QueueShard:
    """The shape queues of one key, of actions that must start on the same node or may start on any,
    and of one group of one client's actions.

    Attributes:
        key: the key resource.
        node: the node on which the actions must start; 0 for any.
        share: the client's grants in the pool.
        group: the group of the client's actions, `SINGLE` or `TRAJECTORY`.
        queues: the shape queues that are not empty, by shape.
        heads: the same shape queues under the order tag of their first action.
        bypasses: how many actions have left although another one had waited longer.
    """

    __slots__ = ("bypasses", "group", "heads", "key", "node", "queues", "share")

    def __init__(self, key: str, node: int, share: ClientShare, group: int) -> None:
        self.key, self.node, self.share, self.group = key, node, share, group
        self.queues: dict[ActionShape, ShapeQueue] = {}
        self.bypasses = 0
        self.heads: TagHeap[ShapeQueue] = TagHeap()

    def refresh(self, queue: ShapeQueue) -> None:
        """Updates `heads` after the first action of a shape queue may have changed."""
        head = queue.actions.first() if queue.actions.at else 0
        if head == queue._head:
            return
        if not head:
            self.heads.drop(queue._head)
            del self.queues[queue.shape]
        elif queue._head:
            self.heads.move(queue._head, head)
        else:
            self.heads.add(head, queue)
        queue._head = head


_Shards = dict[tuple[int, int], QueueShard]  # by client and group


class ReadyQueue:
    """The actions that compete for units, by pool, shard, shape and order tag.

    Attributes:
        pools: for each pool in which an action waits, its shards: by key and home node, and there
            by client and group.
        gpu_actions: how many of the actions ask for GPUs beside their key resource.
    """

    __slots__ = ("_last", "_place", "_shares", "_tenants", "gpu_actions", "pools")

    def __init__(self, tenants: Tenants) -> None:
        self.pools: dict[str, dict[tuple[str, int], _Shards]] = {}
        self.gpu_actions = 0
        self._tenants = tenants
        # order tag, shape queue, and the bypasses of its shard when it came
        self._place: dict[int, tuple[int, ShapeQueue, int]] = {}
        self._shares: dict[str, PoolShares] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, action: object) -> bool:
        return action in self._place

    def draw(self, action: Action | None = None) -> int:
        """Draws the next order tag; this is done when an action's wait for units begins."""
        self._last += 1
        trajectory = trajectory_of(action) if action is not None else 0
        if action is None or not trajectory:
            return self._last
        share = self._pool(pool_of(action.key, action.degrees[-1])).of(client_of(action.id))
        return share.draw(trajectory, self._last)

    def _pool(self, pool: str) -> PoolShares:
        shares = self._shares.get(pool)
        if shares is None:
            shares = self._shares[pool] = PoolShares(self._tenants, pool)
        return shares

    def push(self, action: Action, node: int, session: int, order_tag: int,
             estimate: Callable[[Action], tuple[int, int]] | None = None, counted: int = 0
             ) -> None:
        """Lets an action compete for units.

        Args:
            action: the action.
            node: the home node of its session; 0 for any node.
            session: its session, if that reserves cores of its own; 0 otherwise.
            order_tag: its place in the order.
            estimate: gives the serial fraction and work of an action without a profile. It is
                called if the shard has too many shape queues to open another one for a class.
            counted: what `take` returned for a grant of the action that came back; 0 for none.
        """
        profile, key = action.profile, action.key
        size = octaves(profile.work_ns) if profile is not None else 0
        # by the constructor of tuple, as that of a named tuple takes 1.7 times as long
        shape: ActionShape = tuple.__new__(ActionShape, (
            key, action.degrees, action.mem_mib, action.gpus, action.component, node, session,
            "" if size else action.name, size, action.resizable, action.guarded,
            action.kind is Kind.GRANT, octaves(action.timeout_ns) if action.timeout_ns else 0))
        pool, client = pool_of(key, action.degrees[-1]), client_of(action.id)
        group = TRAJECTORY if trajectory_of(action) else SINGLE
        shares = self._pool(pool)
        share = shares.clients.get(client) or shares.of(client)
        if counted:
            share.returned(action.id, counted)
        share.wait(group)
        at = self.pools.get(pool)
        if at is None:
            at = self.pools[pool] = {}
        shards = at.get((key, node))
        if shards is None:
            shards = at[key, node] = {}
        shard = shards.get((client, group))
        if shard is None:
            shard = shards[client, group] = QueueShard(key, node, share, group)
        queue = shard.queues.get(shape)
        if queue is None:
            if len(shard.queues) >= QUEUES_NAMED and not size and estimate is not None:
                shape = shape._replace(name="", size=octaves(estimate(action)[1]) | _OCTAVE)
                queue = shard.queues.get(shape)
            if queue is None:
                queue = shard.queues[shape] = ShapeQueue(shape, shard)
        queue.actions.add(order_tag, action.id)
        shard.refresh(queue)
        self.gpu_actions += action.gpus > 0
        self._place[action.id] = (order_tag, queue, shard.bypasses)

    def take(self, action: int) -> int:
        """Removes an action that is granted units, and counts the grant for its client and
        trajectory. Returns the value that `push` needs as `counted` if the grant comes back before
        the action has begun.
        """
        order_tag, queue, _ = self._place.pop(action)
        counted = queue.shard.share.served(queue.shard.group, order_tag, action)
        self._leave(order_tag, queue)
        return counted

    def remove(self, action: int) -> None:
        """Removes an action that is granted nothing."""
        order_tag, queue, _ = self._place.pop(action)
        queue.shard.share.counted.pop(action, None)
        self._leave(order_tag, queue)

    def _leave(self, order_tag: int, queue: ShapeQueue) -> None:
        shard = queue.shard
        shard.bypasses += order_tag != shard.heads.first()
        self.gpu_actions -= queue.shape.gpus > 0
        queue.actions.drop(order_tag)
        shard.refresh(queue)
        share, group = shard.share, shard.group
        share.leave(group)
        if not shard.queues:
            pool = pool_of(queue.shape.key, queue.shape.degrees[-1])
            at = self.pools[pool][shard.key, shard.node]
            del at[share.client, group]
            if not at:
                del self.pools[pool][shard.key, shard.node]
                if not self.pools[pool]:
                    del self.pools[pool]

    def shape_of(self, action: int) -> ActionShape:
        """The shape of an action that waits here."""
        return self._place[action][1].shape

    def shard_of(self, action: int) -> QueueShard:
        """The shard of an action that waits here."""
        return self._place[action][1].shard

    def bypass_count(self, action: int) -> int:
        """An upper bound on how many actions of its shard have overtaken an action. It counts all
        actions that have left the shard out of order since this one came, cancelled ones included.
        """
        _, queue, before = self._place[action]
        return queue.shard.bypasses - before

    def shards_at(self, pool: str, key: str, node: int) -> Iterable[QueueShard]:
        """The shards of a key and a home node (0: any) in which an action waits."""
        at = self.pools.get(pool)
        found = at.get((key, node)) if at is not None else None
        return found.values() if found is not None else ()

    def waits(self, pool: str) -> bool:
        """Whether an action waits in a pool."""
        return pool in self.pools

    def waiting(self, pool: str) -> int:
        """How many actions wait in a pool."""
        shares = self._shares.get(pool)
        return shares.waiting if shares is not None else 0

    def shards(self, pool: str) -> list[QueueShard]:
        """The shards of a pool in which an action waits."""
        return [shard for shards in self.pools.get(pool, {}).values() for shard in shards.values()]

    def walk(self, pool: str, turns: TenantTurns | None = None) -> Walk:
        """A walk through a pool from its front; the queue must not change meanwhile."""
        return fair_walk(self.shards(pool), turns)


class Walk:
    """One pass over shards of one client and group by order tag. It can skip whole shapes."""

    __slots__ = ("_ahead",)

    def __init__(self, shards: Iterable[QueueShard]) -> None:
        # (order tag, action, shape queue, the rest of that queue, queues of its shard not yet seen)
        self._ahead: list[tuple[int, int, ShapeQueue, Iterator[tuple[int, int]] | None,
                                Iterator[tuple[int, ShapeQueue]] | None]] = []
        for shard in shards:
            self._open(shard.heads.walk())

    def _open(self, queues: Iterator[tuple[int, ShapeQueue]]) -> None:
        found = next(queues, None)
        if found is not None:
            tag, queue = found
            heapq.heappush(self._ahead, (tag, queue.actions.at[tag], queue, None, queues))

    def head(self) -> tuple[int, ActionShape] | None:
        """The first action of those that are left, and its shape; None at the end."""
        return (self._ahead[0][1], self._ahead[0][2].shape) if self._ahead else None

    def rank(self) -> tuple[int, int]:
        """The place of the first action in order of arrival."""
        return 0, arrival_of(self._ahead[0][0])

    def counted(self) -> int:
        """On which levels a grant of the first action was counted before (`ClientShare.counted`).
        """
        _, action, queue, _, _ = self._ahead[0]
        return queue.shard.share.counted.get(action, 0)

    def next(self) -> None:
        """Goes on to the action after the first."""
        _, _, queue, rest, queues = heapq.heappop(self._ahead)
        if rest is None:
            rest = queue.actions.walk()
            next(rest)
        found = next(rest, None)
        if found is not None:
            heapq.heappush(self._ahead, (*found, queue, rest, None))
        if queues is not None:
            self._open(queues)

    def skip_shape(self) -> None:
        """Leaves out the first action and every later one of its shape."""
        queues = heapq.heappop(self._ahead)[4]
        if queues is not None:
            self._open(queues)


class Rotation(Walk):
    """One pass over shards of several clients or groups, in the order of `fair_order`.

    An action that `next` passes counts as served; an action that `skip_shape` leaves out does not.
    Both are about the action that `head` returned last: units that were granted to it since may
    have changed whose turn it is.
    """

    __slots__ = ("_rounds", "_walk")

    def __init__(self, lists: Iterable[list[QueueShard]], turns: TenantTurns | None) -> None:
        self._rounds = Rounds(((some[0].share, some[0].group, Walk(some)) for some in lists), turns)
        self._walk: Walk | None = None

    def head(self) -> tuple[int, ActionShape] | None:
        """The first action of those that are left, and its shape; None at the end."""
        self._walk = walk = self._rounds.current()
        return walk.head() if walk is not None else None

    def next(self) -> None:
        """Goes on to the action after the first."""
        walk = self._walk
        assert walk is not None, "no action is left"
        counted = walk.counted()
        walk.next()
        self._rounds.charge(counted)

    def skip_shape(self) -> None:
        """Leaves out the first action and every later one of its shape."""
        walk = self._walk
        assert walk is not None, "no action is left"
        walk.skip_shape()


def by_list(shards: Iterable[QueueShard]) -> list[list[QueueShard]]:
    """The shards grouped by client and group, in order of the first shard of each."""
    found: dict[tuple[int, int], list[QueueShard]] = {}
    for shard in shards:
        found.setdefault((shard.share.client, shard.group), []).append(shard)
    return list(found.values())


def fair_walk(shards: Iterable[QueueShard], turns: TenantTurns | None = None) -> Walk:
    """A walk over shards of one pool from its front; the queue must not change meanwhile.

    Args:
        shards: the shards.
        turns: the order of the tenants; None if there is only one.
    """
    shards = list(shards)
    lists = by_list(shards) if len(shards) > 1 else ()
    return Walk(shards) if len(lists) < 2 else Rotation(lists, turns)
