"""The system clock as a `ports.Clock`; the broker reads no other clock."""

from __future__ import annotations

import time


class SystemClock:
    """Tells the epoch time and never runs backwards: it reads the epoch once, and from then on adds
    the time of the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """Returns the time in nanoseconds since the epoch."""
        return time.monotonic_ns() + self._offset
