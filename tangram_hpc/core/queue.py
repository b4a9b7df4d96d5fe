"""Pure. The waiting actions that could start now, in order of readiness, grouped by shape.

A shape is all that placement looks at; actions of one shape are interchangeable, so a placer that
finds no room for one of them need not look at the others (HyperQueue interns requests likewise).
Law: who is in here is decided by the ledger; the order is that of `push`.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from ..domain.action import Action


class Shape(NamedTuple):
    """What placement needs to know of an action.

    `node` is the home node of its session (0: any); `session` its session when that one reserves
    units of its own (0 otherwise).
    """

    key: str
    degrees: tuple[int, ...]
    mem_mib: int
    gpus: int
    component: str
    node: int
    session: int


class ReadyQueue:
    """Ready actions; push, remove and head are O(1), a walk is O(log shapes) a step."""

    __slots__ = ("_shape_of", "_turn", "by_shape")

    def __init__(self) -> None:
        self.by_shape: dict[Shape, dict[int, int]] = {}  # shape -> {action id: turn}
        self._shape_of: dict[int, Shape] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._shape_of)

    def __contains__(self, action: object) -> bool:
        return action in self._shape_of

    def push(self, action: Action, node: int, session: int) -> None:
        """Appends an action that became ready."""
        shape = Shape(action.key, action.degrees, action.mem_mib, action.gpus, action.component,
                      node, session)
        self._turn += 1
        self.by_shape.setdefault(shape, {})[action.id] = self._turn
        self._shape_of[action.id] = shape

    def remove(self, action: int) -> None:
        """Takes an action out."""
        shape = self._shape_of.pop(action)
        members = self.by_shape[shape]
        del members[action]
        if not members:
            del self.by_shape[shape]

    def walk(self) -> Walk:
        """A walk from the front; the queue must not change meanwhile."""
        return Walk(self.by_shape)


class Walk:
    """One pass over a ReadyQueue in order of readiness, able to skip whole shapes."""

    __slots__ = ("_heads", "_members")

    def __init__(self, by_shape: dict[Shape, dict[int, int]]) -> None:
        self._members = [(shape, iter(members.items())) for shape, members in by_shape.items()]
        self._heads: list[tuple[int, int, int]] = []  # (turn, index into _members, action)
        for index in range(len(self._members)):
            self._advance(index)

    def _advance(self, index: int) -> None:
        head = next(self._members[index][1], None)
        if head is not None:
            heapq.heappush(self._heads, (head[1], index, head[0]))

    def head(self) -> tuple[int, Shape] | None:
        """The first action of those left, and its shape; None at the end."""
        if not self._heads:
            return None
        _, index, action = self._heads[0]
        return action, self._members[index][0]

    def next(self) -> None:
        """Passes the head."""
        _, index, _ = heapq.heappop(self._heads)
        self._advance(index)

    def skip_shape(self) -> None:
        """Passes the head and every later action of its shape."""
        heapq.heappop(self._heads)
