"""The event queue of the discrete-event simulation, which is also its clock.

The clock jumps from one event to the next; no real time passes in between.

Invariant: events are ordered by (time, priority, order of insertion), the same on every machine.
"""

from __future__ import annotations

import heapq
from typing import Any


class EventQueue:
    """The pending events. It implements `ports.Clock`: `now_ns` is the instant that is being
    applied.

    Attributes:
        now: The instant that is being applied, in ns. The simulation's loop sets it.
    """

    def __init__(self) -> None:
        self.now = 0
        self._heap: list[tuple[int, int, int, Any]] = []
        self._count = 0

    def now_ns(self) -> int:
        """The instant that is being applied, in ns."""
        return self.now

    def put(self, at: int, priority: int, item: Any) -> None:
        """Inserts `item` at time `at` (ns); at equal times a lower priority comes first."""
        assert at >= self.now, f"{item} would be in the past: {at} < {self.now}"
        self._count += 1
        heapq.heappush(self._heap, (at, priority, self._count, item))

    def next_at(self) -> int | None:
        """The time of the next event, in ns; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def take(self) -> Any:
        """Removes and returns the next event of this instant; None if there is none."""
        if self._heap and self._heap[0][0] == self.now:
            return heapq.heappop(self._heap)[3]
        return None
