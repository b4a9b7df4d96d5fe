"""The one door to the clock. Owns nothing else."""

from __future__ import annotations

import time


class SystemClock:
    """Epoch ns that never run backwards: the epoch is read once, then the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """Epoch ns."""
        return time.monotonic_ns() + self._offset
