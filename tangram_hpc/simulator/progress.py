"""Pure. Computes when an attempt on a modelled machine ends, also if it is resized on its way.

Invariants: while the size never changes, the run time is rounded once from the workload's numbers.
When the size changes, progress is added up in whole parts of 2**-96 of the work, so nothing drifts.
"""

from __future__ import annotations

from fractions import Fraction

from .workload import WorkAction, to_ns

_ONE = 1 << 96
_SECOND = 10**9


class SimulatedAttempt:
    """An attempt that runs. `end_at` is its end in ns; None while it is suspended (0 units).

    `resize_ns` is the time that its resizes took so far, in ns. It makes no progress meanwhile. A
    resize that follows during another one replaces what is left of it.
    """

    __slots__ = ("_action", "_left", "_rates", "_since", "_units", "end_at", "resize_ns", "start")

    def __init__(self, action: WorkAction, units: int, start: int, restore_ns: int) -> None:
        self._action, self._units, self._since = action, units, start + restore_ns
        self.start, self._left = start, _ONE
        self.resize_ns = 0
        self._rates: dict[int, int] = {}
        self.end_at: int | None = None
        if units:
            self.end_at = self._since + action.run_ns(units)

    def resize(self, now: int, units: int, cost_ns: int = 0) -> None:
        """From `now` on it holds `units` units, on which it runs on after `cost_ns`."""
        if self._units and now > self._since:
            self._left -= (now - self._since) * self._rate(self._units)
        self._units, self._since = units, now + cost_ns
        self.resize_ns += cost_ns
        self.end_at = None
        if units:
            rate = self._rate(units)
            self.end_at = self._since + max(0, (2 * self._left + rate) // (2 * rate))

    @property
    def cpu_ns(self) -> int:
        """The CPU time that it has used when it ends: its work, if it works on CPUs."""
        return to_ns(self._action.work_s) if self._action.resource == "cpu" else 0

    def _rate(self, units: int) -> int:
        """Parts of the work that are done in a nanosecond on `units` units."""
        rate = self._rates.get(units)
        if rate is None:
            a = self._action
            work, serial = Fraction(a.work_s) * _SECOND, Fraction(a.serial)
            time = max(work * (serial + (1 - serial) / units), Fraction(1, 1 << 20))
            rate = self._rates[units] = round(_ONE / time)
        return rate
