"""A clock and a timer that move by hand (`ports.Clock` and `ports.Timer`), for a broker that runs
inside the test."""

from __future__ import annotations

import heapq
from collections.abc import Callable

S = 10**9


class HandClock:
    """Time that passes only when a test says so.

    Attributes:
        now: the time in ns.
    """

    def __init__(self) -> None:
        self.now, self._count = 1_000 * S, 0
        self._timers: list[tuple[int, int, Callable[[], None]]] = []

    def now_ns(self) -> int:
        return self.now

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._timers, (self.now + int(delay_s * S), self._count, call))

    def check(self) -> None:
        """Called whenever no timer is due any more."""

    def settle(self) -> None:
        """Runs the timers that are due."""
        ran = 0
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2]()
            ran += 1
            assert ran < 5_000, "the broker's timers never rest"
        self.check()

    def run(self, seconds: float) -> None:
        """Lets time pass in which the broker runs."""
        until = self.now + int(seconds * S)
        while self._timers and self._timers[0][0] <= until:
            self.now = max(self.now, self._timers[0][0])
            self.settle()
        self.now = until

    def stall(self, seconds: float) -> None:
        """Lets time pass in which the broker does not run, as while its job is suspended; when it
        goes on, its timers come first."""
        self.now += int(seconds * S)
        self.settle()
