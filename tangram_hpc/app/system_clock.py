"""The system clock as a `ports.Clock`; the broker reads no other clock."""

from __future__ import annotations

import time


class SystemClock:
    """Epoch time that never runs backwards: the epoch is read once, then the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """Returns the time in nanoseconds since the epoch."""
        return time.monotonic_ns() + self._offset
