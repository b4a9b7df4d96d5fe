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
LINES_NAMED = 16
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


class Turns(Generic[_T]):
    """Values by turn, in order of turn, with removal anywhere: a heap whose dead are passed."""

    __slots__ = ("_heap", "at")

    def __init__(self) -> None:
        self._heap: list[int] = []
        self.at: dict[int, _T] = {}

    def __len__(self) -> int:
        return len(self.at)

    def add(self, turn: int, value: _T) -> None:
        """Puts a value at a turn that is not taken."""
        assert turn not in self.at
        self.at[turn] = value
        heapq.heappush(self._heap, turn)

    def drop(self, turn: int) -> _T:
        """Takes the value at a turn out."""
        value = self.at.pop(turn)
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
            turn, index = heapq.heappop(edge)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(edge, (heap[child], child))
            if turn in at and turn != last:
                last = turn
                yield turn, at[turn]


class ShapeQueue:
    """Actions of one shape, in order, in their bay."""

    __slots__ = ("_head", "actions", "bay", "shape")

    def __init__(self, shape: ActionShape, bay: Bay) -> None:
        self.shape, self.bay = shape, bay
        self.actions: Turns[int] = Turns()
        self._head = 0  # the turn under which its bay knows it

    def __len__(self) -> int:
        return len(self.actions)


class Bay:
    """The lines of one key whose actions must start on one node (0: on any), of one group of one
    client's actions."""

    __slots__ = ("group", "heads", "key", "lines", "node", "passed", "share")

    def __init__(self, key: str, node: int, share: ClientShare, group: int) -> None:
        self.key, self.node, self.share, self.group = key, node, share, group
        self.lines: dict[ActionShape, ShapeQueue] = {}
        self.passed = 0  # how many left although somebody had waited longer
        self.heads: Turns[ShapeQueue] = Turns()  # each line at the turn of its first action

    def refresh(self, line: ShapeQueue) -> None:
        """A line's first action may be another one now."""
        head = line.actions.first() if line.actions.at else 0
        if head == line._head:
            return
        if line._head:
            self.heads.drop(line._head)
        if head:
            self.heads.add(head, line)
        else:
            del self.lines[line.shape]
        line._head = head


_Bays = dict[tuple[int, int], Bay]  # by client and group


class ReadyQueue:
    """Ready actions by pool, bay, line and turn."""

    __slots__ = ("_last", "_place", "_shares", "pools")

    def __init__(self) -> None:
        self.pools: dict[str, dict[tuple[str, int], _Bays]] = {}
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

    def push(self, action: Action, node: int, session: int, turn: int,
             believed: Callable[[Action], tuple[int, int]] | None = None, counted: int = 0
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
        bays = at.get((key, node))
        if bays is None:
            bays = at[key, node] = {}
        bay = bays.get((client, group))
        if bay is None:
            bay = bays[client, group] = Bay(key, node, share, group)
        line = bay.lines.get(shape)
        if line is None:
            if len(bay.lines) >= LINES_NAMED and not size and believed is not None:
                shape = shape._replace(name="", size=octaves(believed(action)[1]) | _OCTAVE)
                line = bay.lines.get(shape)
            if line is None:
                line = bay.lines[shape] = ShapeQueue(shape, bay)
        line.actions.add(turn, action.id)
        bay.refresh(line)
        self._place[action.id] = (turn, line, bay.passed)

    def take(self, action: int) -> int:
        """Takes an action out that was granted units: its client and trajectory had a turn. Returns
        what `push` wants as `counted` if the grant comes back without having begun."""
        turn, line, _ = self._place.pop(action)
        counted = line.bay.share.served(line.bay.group, turn, action)
        self._leave(turn, line)
        return counted

    def remove(self, action: int) -> None:
        """Takes an action out."""
        turn, line, _ = self._place.pop(action)
        line.bay.share.counted.pop(action, None)
        self._leave(turn, line)

    def _leave(self, turn: int, line: ShapeQueue) -> None:
        bay = line.bay
        bay.passed += turn != bay.heads.first()
        line.actions.drop(turn)
        bay.refresh(line)
        share, group = bay.share, bay.group
        share.waiting[group] -= 1
        share.pool.waiting -= 1
        if not share.waiting[group]:
            share.pool.rest(share)
        if not bay.lines:
            pool = pool_of(line.shape.key, line.shape.degrees[-1])
            at = self.pools[pool][bay.key, bay.node]
            del at[share.client, group]
            if not at:
                del self.pools[pool][bay.key, bay.node]
                if not self.pools[pool]:
                    del self.pools[pool]

    def shape_of(self, action: int) -> ActionShape:
        """The shape of an action that waits here."""
        return self._place[action][1].shape

    def bay_of(self, action: int) -> Bay:
        """The bay of an action that waits here."""
        return self._place[action][1].bay

    def passed(self, action: int) -> int:
        """How many have left its bay out of order since an action came: no more have overtaken
        it there. One that was cancelled counts too."""
        _, line, before = self._place[action]
        return line.bay.passed - before

    def bays_at(self, pool: str, key: str, node: int) -> Iterable[Bay]:
        """The bays of a key and a home node (0: any) in which somebody waits."""
        at = self.pools.get(pool)
        found = at.get((key, node)) if at is not None else None
        return found.values() if found is not None else ()

    def waits(self, pool: str) -> bool:
        """Whether anybody waits in a pool."""
        return pool in self.pools

    def bays(self, pool: str) -> list[Bay]:
        """The bays of a pool in which somebody waits."""
        return [bay for bays in self.pools.get(pool, {}).values() for bay in bays.values()]

    def walk(self, pool: str) -> Walk:
        """A walk through a pool from its front; the queue must not change meanwhile."""
        return walk_by_turns(self.bays(pool))


class Walk:
    """One pass over bays of one client and group in order of turn, able to skip whole lines."""

    __slots__ = ("_ahead",)

    def __init__(self, bays: Iterable[Bay]) -> None:
        # (turn, action, line, rest of the line, lines of its bay that are not yet seen)
        self._ahead: list[tuple[int, int, ShapeQueue, Iterator[tuple[int, int]] | None,
                                Iterator[tuple[int, ShapeQueue]] | None]] = []
        for bay in bays:
            self._open(bay.heads.walk())

    def _open(self, lines: Iterator[tuple[int, ShapeQueue]]) -> None:
        found = next(lines, None)
        if found is not None:
            turn, line = found
            heapq.heappush(self._ahead, (turn, line.actions.at[turn], line, None, lines))

    def head(self) -> tuple[int, ActionShape] | None:
        """The first action of those left, and its shape; None at the end."""
        return (self._ahead[0][1], self._ahead[0][2].shape) if self._ahead else None

    def rank(self) -> tuple[int, int]:
        """Where the head stands in order of arrival."""
        return 0, arrival_of(self._ahead[0][0])

    def counted(self) -> int:
        """On which levels the head was counted before (`ClientShare.counted`)."""
        _, action, line, _, _ = self._ahead[0]
        return line.bay.share.counted.get(action, 0)

    def next(self) -> None:
        """Passes the head."""
        _, _, line, rest, lines = heapq.heappop(self._ahead)
        if rest is None:
            rest = line.actions.walk()
            next(rest)
        found = next(rest, None)
        if found is not None:
            heapq.heappush(self._ahead, (*found, line, rest, None))
        if lines is not None:
            self._open(lines)

    def skip_shape(self) -> None:
        """Passes the head and every later action of its shape."""
        lines = heapq.heappop(self._ahead)[4]
        if lines is not None:
            self._open(lines)


class Rotation(Walk):
    """One pass over bays of several clients or groups, by turns. Whoever is passed by `next` counts
    as served, whoever is skipped does not."""

    __slots__ = ("_rounds",)

    def __init__(self, lists: Iterable[list[Bay]]) -> None:
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


def by_list(bays: Iterable[Bay]) -> list[list[Bay]]:
    """Bays of one client and one group together, in order of their first."""
    found: dict[tuple[int, int], list[Bay]] = {}
    for bay in bays:
        found.setdefault((bay.share.client, bay.group), []).append(bay)
    return list(found.values())


def walk_by_turns(bays: Iterable[Bay]) -> Walk:
    """A walk over bays of one pool from its front; the queue must not change meanwhile."""
    bays = list(bays)
    lists = by_list(bays) if len(bays) > 1 else ()
    return Walk(bays) if len(lists) < 2 else Rotation(lists)
