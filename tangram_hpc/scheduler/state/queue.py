"""Pure. The waiting actions that could start now, grouped by shape, and the order among them.

A shape is all that placement looks at; actions of one shape are interchangeable, so a placer that
finds no room for one of them need not look at the others (HyperQueue interns requests likewise).
Lines of one shape stand in *bays*, one for each key, home node, client and group of that client's
actions; bays of keys that compete for the same units form a *pool*. A placer that knows where
something is free looks at those bays only.
Law: who is in here is decided by the ledger. Inside a bay the order is that of turns, drawn once
for each action; between the bays of several clients or groups `fair_order` says who is next.
Push and remove cost O(log line), a walk O(log) a step after O(bays) at its start.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from ...domain.action import Action, Kind, Profile
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

CPU, GPU, NOTHING = "cpu", "gpu", "nothing"  # pools; each endpoint is one of its own
# A bay that has so many lines opens no further one for a class alone: actions of further classes
# stand in lines by what they are expected to take, one an octave, so that a thousand names cost a
# pass no more than a few.
QUEUES_NAMED = 16
_OCTAVE = 7  # the low bits of a bucket of `octaves`
_T = TypeVar("_T")


class ActionShape(NamedTuple):
    """What placement needs to know of an action.

    `node` is the home node of its session (0: any); `session` its session when that one reserves
    units of its own (0 otherwise). A placer may go by expected size, line by line: that is `size`,
    the bucket of the profile (`size_of`) or of what was believed when the action came; where that
    is 0, what is believed now of the class `name`. `guarded`: only on nodes
    that can keep code from its user's files. `at_client`: its client carries it out, on no node.
    `limit`: the bucket of its timeout, 0 for none.
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


def size_of(profile: Profile | None) -> int:
    """The bucket of a profile's work, eight an octave; 0 when nothing is known."""
    if profile is None:
        return 0
    return octaves(profile.work_ns)


def pool_of(key: str, units: int) -> str:
    """The pool in which an action of this key waits; `units` is its largest degree."""
    if key == "cpu":
        return CPU if units else NOTHING
    return GPU if key.startswith("service:") else key


class TagHeap(Generic[_T]):
    """Values by turn, in order of turn, with removal anywhere: a heap whose dead are passed."""

    __slots__ = ("_heap", "at")

    def __init__(self) -> None:
        self._heap: list[int] = []
        self.at: dict[int, _T] = {}

    def __len__(self) -> int:
        return len(self.at)

    def add(self, order_tag: int, value: _T) -> None:
        """Puts a value at a turn that is not taken."""
        assert order_tag not in self.at
        self.at[order_tag] = value
        heapq.heappush(self._heap, order_tag)

    def drop(self, order_tag: int) -> _T:
        """Takes the value at a turn out."""
        value = self.at.pop(order_tag)
        heap = self._heap
        while heap and heap[0] not in self.at:
            heapq.heappop(heap)
        if len(heap) > len(self.at) * 9 // 8 + 64:
            heap[:] = sorted(self.at)
        return value

    def first(self) -> int:
        """The lowest turn; there must be one."""
        return self._heap[0]

    def walk(self) -> Iterator[tuple[int, _T]]:
        """Turns and values in order; nothing may change meanwhile."""
        heap, at = self._heap, self.at
        edge = [(heap[0], 0)] if heap else []
        last = 0
        while edge:
            order_tag, index = heapq.heappop(edge)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(edge, (heap[child], child))
            if order_tag in at and order_tag != last:
                last = order_tag
                yield order_tag, at[order_tag]


class ShapeQueue:
    """Actions of one shape, in order, in their bay."""

    __slots__ = ("_head", "actions", "shape", "shard")

    def __init__(self, shape: ActionShape, shard: QueueShard) -> None:
        self.shape, self.shard = shape, shard
        self.actions: TagHeap[int] = TagHeap()
        self._head = 0  # the turn under which its bay knows it

    def __len__(self) -> int:
        return len(self.actions)


class QueueShard:
    """The lines of one key whose actions must start on one node (0: on any), of one group of one
    client's actions."""

    __slots__ = ("bypasses", "group", "heads", "key", "node", "queues", "share")

    def __init__(self, key: str, node: int, share: ClientShare, group: int) -> None:
        self.key, self.node, self.share, self.group = key, node, share, group
        self.queues: dict[ActionShape, ShapeQueue] = {}
        self.bypasses = 0  # how many left although somebody had waited longer
        self.heads: TagHeap[ShapeQueue] = TagHeap()  # each line at the turn of its first action

    def refresh(self, queue: ShapeQueue) -> None:
        """A line's first action may be another one now."""
        head = queue.actions.first() if queue.actions.at else 0
        if head == queue._head:
            return
        if queue._head:
            self.heads.drop(queue._head)
        if head:
            self.heads.add(head, queue)
        else:
            del self.queues[queue.shape]
        queue._head = head


_Shards = dict[tuple[int, int], QueueShard]  # by client and group


class ReadyQueue:
    """Ready actions by pool, bay, line and turn."""

    __slots__ = ("_last", "_place", "_shares", "pools")

    def __init__(self) -> None:
        self.pools: dict[str, dict[tuple[str, int], _Shards]] = {}
        # turn, line, and how many had left its bay out of order when it came
        self._place: dict[int, tuple[int, ShapeQueue, int]] = {}
        self._shares: dict[str, PoolShares] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, action: object) -> bool:
        return action in self._place

    def draw(self, action: Action | None = None) -> int:
        """The next turn: one is drawn when an action's wait for units begins."""
        self._last += 1
        trajectory = trajectory_of(action) if action is not None else 0
        if action is None or not trajectory:
            return self._last
        share = self._pool(pool_of(action.key, action.degrees[-1])).of(client_of(action.id))
        return share.draw(trajectory, self._last)

    def _pool(self, pool: str) -> PoolShares:
        shares = self._shares.get(pool)
        if shares is None:
            shares = self._shares[pool] = PoolShares()
        return shares

    def push(self, action: Action, node: int, session: int, order_tag: int,
             estimate: Callable[[Action], tuple[int, int]] | None = None, counted: int = 0
             ) -> None:
        """Lets an action compete for units, at its turn. `believed` tells serial fraction and work
        of an action without a profile, where its bay has too many lines to tell classes apart.
        `counted`: what `take` returned for a grant of it that came back; 0 for none."""
        size, key = size_of(action.profile), action.key
        shape = ActionShape(key, action.degrees, action.mem_mib, action.gpus, action.component,
                            node, session, "" if size else action.name, size, action.resizable,
                            action.guarded, action.kind is Kind.GRANT,
                            octaves(action.timeout_ns) if action.timeout_ns else 0)
        pool, client = pool_of(key, action.degrees[-1]), client_of(action.id)
        group = TRAJECTORY if trajectory_of(action) else SINGLE
        shares = self._pool(pool)
        share = shares.clients.get(client) or shares.of(client)
        if counted:
            share.returned(action.id, counted)
        share.waiting[group] += 1
        shares.waiting += 1
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
        self._place[action.id] = (order_tag, queue, shard.bypasses)

    def take(self, action: int) -> int:
        """Takes an action out that was granted units: its client and trajectory had a turn. Returns
        what `push` wants as `counted` if the grant comes back without having begun."""
        order_tag, queue, _ = self._place.pop(action)
        counted = queue.shard.share.served(queue.shard.group, order_tag, action)
        self._leave(order_tag, queue)
        return counted

    def remove(self, action: int) -> None:
        """Takes an action out."""
        order_tag, queue, _ = self._place.pop(action)
        queue.shard.share.counted.pop(action, None)
        self._leave(order_tag, queue)

    def _leave(self, order_tag: int, queue: ShapeQueue) -> None:
        shard = queue.shard
        shard.bypasses += order_tag != shard.heads.first()
        queue.actions.drop(order_tag)
        shard.refresh(queue)
        share, group = shard.share, shard.group
        share.waiting[group] -= 1
        share.pool.waiting -= 1
        if not share.waiting[group]:
            share.pool.group_emptied(share)
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
        """The bay of an action that waits here."""
        return self._place[action][1].shard

    def bypass_count(self, action: int) -> int:
        """How many have left its bay out of order since an action came: no more have overtaken
        it there. One that was cancelled counts too."""
        _, queue, before = self._place[action]
        return queue.shard.bypasses - before

    def shards_at(self, pool: str, key: str, node: int) -> Iterable[QueueShard]:
        """The bays of a key and a home node (0: any) in which somebody waits."""
        at = self.pools.get(pool)
        found = at.get((key, node)) if at is not None else None
        return found.values() if found is not None else ()

    def waits(self, pool: str) -> bool:
        """Whether anybody waits in a pool."""
        return pool in self.pools

    def shards(self, pool: str) -> list[QueueShard]:
        """The bays of a pool in which somebody waits."""
        return [shard for shards in self.pools.get(pool, {}).values() for shard in shards.values()]

    def walk(self, pool: str) -> Walk:
        """A walk through a pool from its front; the queue must not change meanwhile."""
        return fair_walk(self.shards(pool))


class Walk:
    """One pass over bays of one client and group in order of turn, able to skip whole lines."""

    __slots__ = ("_ahead",)

    def __init__(self, shards: Iterable[QueueShard]) -> None:
        # (turn, action, line, rest of the line, lines of its bay that are not yet seen)
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
        """The first action of those left, and its shape; None at the end."""
        return (self._ahead[0][1], self._ahead[0][2].shape) if self._ahead else None

    def rank(self) -> tuple[int, int]:
        """Where the head stands in order of arrival."""
        return 0, arrival_of(self._ahead[0][0])

    def counted(self) -> int:
        """On which levels the head was counted before (`ClientShare.counted`)."""
        _, action, queue, _, _ = self._ahead[0]
        return queue.shard.share.counted.get(action, 0)

    def next(self) -> None:
        """Passes the head."""
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
        """Passes the head and every later action of its shape."""
        queues = heapq.heappop(self._ahead)[4]
        if queues is not None:
            self._open(queues)


class Rotation(Walk):
    """One pass over bays of several clients or groups, by turns. Whoever is passed by `next` counts
    as served, whoever is skipped does not."""

    __slots__ = ("_rounds",)

    def __init__(self, lists: Iterable[list[QueueShard]]) -> None:
        self._rounds = Rounds((some[0].share, some[0].group, Walk(some)) for some in lists)

    def head(self) -> tuple[int, ActionShape] | None:
        """The first action of those left, and its shape; None at the end."""
        walk = self._rounds.current()
        return walk.head() if walk is not None else None

    def next(self) -> None:
        """Passes the head."""
        walk = self._rounds.current()
        assert walk is not None, "nobody is left"
        counted = walk.counted()
        walk.next()
        self._rounds.charge(counted)

    def skip_shape(self) -> None:
        """Passes the head and every later action of its shape."""
        walk = self._rounds.current()
        assert walk is not None, "nobody is left"
        walk.skip_shape()


def by_list(shards: Iterable[QueueShard]) -> list[list[QueueShard]]:
    """Bays of one client and one group together, in order of their first."""
    found: dict[tuple[int, int], list[QueueShard]] = {}
    for shard in shards:
        found.setdefault((shard.share.client, shard.group), []).append(shard)
    return list(found.values())


def fair_walk(shards: Iterable[QueueShard]) -> Walk:
    """A walk over bays of one pool from its front; the queue must not change meanwhile."""
    shards = list(shards)
    lists = by_list(shards) if len(shards) > 1 else ()
    return Walk(shards) if len(lists) < 2 else Rotation(lists)
