"""A clock that jumps: a heap of what is to happen, and no time passes in between.

Law: order is (time, priority, order of entry), so it is the same on every machine.
"""

from __future__ import annotations

import heapq
from typing import Any


class EventQueue:
    """What happens when. Also a `ports.Clock`: `now_ns` is the instant being applied."""

    def __init__(self) -> None:
        self.now = 0
        self._heap: list[tuple[int, int, int, Any]] = []
        self._count = 0

    def now_ns(self) -> int:
        """The instant being applied."""
        return self.now

    def put(self, at: int, priority: int, item: Any) -> None:
        """`item` happens at `at`, not before what is already due then with a lower priority."""
        assert at >= self.now, f"{item} would be in the past: {at} < {self.now}"
        self._count += 1
        heapq.heappush(self._heap, (at, priority, self._count, item))

    def next_at(self) -> int | None:
        """When the next thing happens; None for never."""
        return self._heap[0][0] if self._heap else None

    def take(self) -> Any:
        """The next thing of this very instant; None when there is none left."""
        if self._heap and self._heap[0][0] == self.now:
            return heapq.heappop(self._heap)[3]
        return None
