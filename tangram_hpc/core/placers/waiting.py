"""Pure. Who waits, in the order in which `elastic` looks at them.

Law (bounded bypass): smallest expected work first, in buckets of an eighth of an octave, in order
of turn inside; but the one that has waited longest first once it was overtaken BYPASS times by
later ones of its bay, or has waited OVERDUE_NS. Reads the queue and changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..ledger import Ledger
from ..queue import Line, Shape
from ..speed import octaves

BYPASS = 256
OVERDUE_NS = 20_000_000_000


def rank(ledger: Ledger, shape: Shape) -> int:
    """The bucket of what an action of this shape is expected to take."""
    if shape.size:
        return shape.size
    return octaves(ledger.estimator.mean(shape.key, shape.name, shape.degrees))


def is_overdue(ledger: Ledger, action: int, now: int, more: int = 0, bypass: int = BYPASS) -> bool:
    """Whether nobody may overtake it any more; `more` have in this pass."""
    return (now - ledger.actions[action].submitted_at >= OVERDUE_NS
            or ledger.ready.passed(action) + more >= bypass)


class Next(NamedTuple):
    """Who is next, and whether because nobody may overtake him."""

    action: int
    shape: Shape
    turn: int
    overdue: bool


class Waiting:
    """One pass over some lines. Made in O(lines); a step costs O(log lines)."""

    def __init__(self, ledger: Ledger, lines: Iterable[Line], now: int,
                 bypass: int = BYPASS) -> None:
        self._ledger, self._now, self._bypass = ledger, now, bypass
        # (bucket, turn, action, line, rest of the line)
        self._ahead: list[tuple[int, int, int, Line, Iterator[tuple[int, int]] | None]] = []
        self._oldest: list[tuple[int, int, Line, Iterator[tuple[int, int]] | None]] = []
        self.n = 0
        for line in lines:
            turn = line.actions.first()
            action = line.actions.at[turn]
            self._ahead.append((rank(ledger, line.shape), turn, action, line, None))
            self._oldest.append((turn, action, line, None))
            self.n += len(line)
        heapq.heapify(self._ahead)
        heapq.heapify(self._oldest)
        self._gone: set[int] = set()
        self._skipped: set[Shape] = set()
        self._passes = 0

    def oldest(self) -> Next | None:
        """Who has waited longest."""
        heap = self._oldest
        while heap and (heap[0][0] in self._gone or heap[0][2].shape in self._skipped):
            turn, _, line, rest = heapq.heappop(heap)
            if line.shape not in self._skipped:
                rest = _after(line, rest)
                if (found := next(rest, None)) is not None:
                    heapq.heappush(heap, (*found, line, rest))
        if not heap:
            return None
        turn, action, line, _ = heap[0]
        due = is_overdue(self._ledger, action, self._now, self._passes, self._bypass)
        return Next(action, line.shape, turn, due)

    def head(self) -> Next | None:
        """Who is next; None when nobody is left."""
        first = self.oldest()
        if first is None or first.overdue:
            return first
        heap = self._ahead
        while heap[0][1] in self._gone or heap[0][3].shape in self._skipped:
            bucket, _, _, line, rest = heapq.heappop(heap)
            if line.shape not in self._skipped:
                rest = _after(line, rest)
                if (found := next(rest, None)) is not None:
                    heapq.heappush(heap, (bucket, *found, line, rest))
        _, turn, action, line, _ = heap[0]
        return Next(action, line.shape, turn, False)

    def take(self, chosen: Next) -> None:
        """He starts, or is to be passed over."""
        first = self.oldest()
        self._passes += first is not None and first.turn != chosen.turn
        self._gone.add(chosen.turn)
        self.n -= 1

    def skip_shape(self, shape: Shape) -> None:
        """Nobody of this shape can start in this pass."""
        self._skipped.add(shape)


def _after(line: Line, rest: Iterator[tuple[int, int]] | None) -> Iterator[tuple[int, int]]:
    if rest is None:
        rest = line.actions.walk()
        next(rest)
    return rest
