"""Pure. The waiting actions that could start now, in order of readiness, grouped by shape.

A shape is all that placement looks at; actions of one shape are interchangeable, so a placer that
finds no room for one of them need not look at the others (HyperQueue interns requests likewise).
Lines of one shape stand in *bays*, one a key and home node; bays of keys that compete for the same
units form a *pool*. A placer that knows where something is free looks at those bays only.
Law: who is in here is decided by the ledger; the order is that of turns, drawn once an action.
Push and remove cost O(log line), a walk O(log) a step after O(bays) at its start.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from ..domain.action import Action, Kind, Profile
from .speed import octaves

CPU, GPU, NOTHING = "cpu", "gpu", "nothing"  # pools; each endpoint is one of its own
_T = TypeVar("_T")


class Shape(NamedTuple):
    """What placement needs to know of an action.

    `node` is the home node of its session (0: any); `session` its session when that one reserves
    units of its own (0 otherwise). `name` is its class and `size` its profile's bucket
    (`size_of`), so that a placer may go by expected size, line by line. `guarded`: only on nodes
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


class Line:
    """Actions of one shape, in order, in their bay."""

    __slots__ = ("_head", "actions", "bay", "shape")

    def __init__(self, shape: Shape, bay: Bay) -> None:
        self.shape, self.bay = shape, bay
        self.actions: Turns[int] = Turns()
        self._head = 0  # the turn under which its bay knows it

    def __len__(self) -> int:
        return len(self.actions)


class Bay:
    """The lines of one key whose actions must start on one node (0: on any)."""

    __slots__ = ("heads", "key", "lines", "node", "passed")

    def __init__(self, key: str, node: int) -> None:
        self.key, self.node = key, node
        self.lines: dict[Shape, Line] = {}
        self.passed = 0  # how many left although somebody had waited longer
        self.heads: Turns[Line] = Turns()  # each line at the turn of its first action

    def refresh(self, line: Line) -> None:
        """A line's first action may be another one now."""
        head = line.actions.first() if len(line) else 0
        if head == line._head:
            return
        if line._head:
            self.heads.drop(line._head)
        if head:
            self.heads.add(head, line)
        else:
            del self.lines[line.shape]
        line._head = head


class ReadyQueue:
    """Ready actions by pool, bay, line and turn."""

    __slots__ = ("_last", "_place", "pools")

    def __init__(self) -> None:
        self.pools: dict[str, dict[tuple[str, int], Bay]] = {}
        # turn, line, and how many had left its bay out of order when it came
        self._place: dict[int, tuple[int, Line, int]] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, action: object) -> bool:
        return action in self._place

    def draw(self) -> int:
        """The next turn: one is drawn when an action's wait for units begins."""
        self._last += 1
        return self._last

    def push(self, action: Action, node: int, session: int, turn: int) -> None:
        """Lets an action compete for units, at its turn."""
        shape = Shape(action.key, action.degrees, action.mem_mib, action.gpus, action.component,
                      node, session, action.name, size_of(action.profile), action.resizable,
                      action.guarded, action.kind is Kind.GRANT,
                      octaves(action.timeout_ns) if action.timeout_ns else 0)
        bays = self.pools.setdefault(pool_of(action.key, action.degrees[-1]), {})
        bay = bays.get((action.key, node))
        if bay is None:
            bay = bays[action.key, node] = Bay(action.key, node)
        line = bay.lines.get(shape)
        if line is None:
            line = bay.lines[shape] = Line(shape, bay)
        line.actions.add(turn, action.id)
        bay.refresh(line)
        self._place[action.id] = (turn, line, bay.passed)

    def remove(self, action: int) -> None:
        """Takes an action out."""
        turn, line, _ = self._place.pop(action)
        bay = line.bay
        bay.passed += turn != bay.heads.first()
        line.actions.drop(turn)
        bay.refresh(line)
        if not bay.lines:
            shape = line.shape
            pool = pool_of(shape.key, shape.degrees[-1])
            del self.pools[pool][shape.key, shape.node]
            if not self.pools[pool]:
                del self.pools[pool]

    def shape_of(self, action: int) -> Shape:
        """The shape of an action that waits here."""
        return self._place[action][1].shape

    def turn_of(self, action: int) -> int:
        """The turn of an action that waits here."""
        return self._place[action][0]

    def passed(self, action: int) -> int:
        """How many have left its bay out of order since an action came: no more have overtaken
        it there. One that was cancelled counts too."""
        _, line, before = self._place[action]
        return line.bay.passed - before

    def bay(self, pool: str, key: str, node: int) -> Bay | None:
        """The bay of a key and a home node (0: any), if somebody waits in it."""
        return self.pools.get(pool, {}).get((key, node))

    def waits(self, pool: str) -> bool:
        """Whether anybody waits in a pool."""
        return pool in self.pools

    def bays(self, pool: str) -> Iterable[Bay]:
        """The bays of a pool in which somebody waits."""
        return self.pools.get(pool, {}).values()

    def walk(self, pool: str) -> Walk:
        """A walk through a pool from its front; the queue must not change meanwhile."""
        return Walk(self.bays(pool))


class Walk:
    """One pass over bays in order of turn, able to skip whole lines."""

    __slots__ = ("_ahead",)

    def __init__(self, bays: Iterable[Bay]) -> None:
        # (turn, action, line, rest of the line, lines of its bay that are not yet seen)
        self._ahead: list[tuple[int, int, Line, Iterator[tuple[int, int]] | None,
                                Iterator[tuple[int, Line]] | None]] = []
        for bay in bays:
            self._open(bay.heads.walk())

    def _open(self, lines: Iterator[tuple[int, Line]]) -> None:
        found = next(lines, None)
        if found is not None:
            turn, line = found
            heapq.heappush(self._ahead, (turn, line.actions.at[turn], line, None, lines))

    def head(self) -> tuple[int, Shape] | None:
        """The first action of those left, and its shape; None at the end."""
        return (self._ahead[0][1], self._ahead[0][2].shape) if self._ahead else None

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
