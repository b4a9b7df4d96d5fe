"""Pure. How often each kind of call to a service comes, and how long its calls are.

Law: fed by the ledger's events alone, so a replay learns the same. A rate is a count that fades as
x * h / (h + dt) between calls, so no exponential is needed. Whole numbers only.
"""

from __future__ import annotations

from ...domain.action import Action
from ...domain.service import service_of
from .estimator import Estimator

ONE = 1 << 20
HORIZON = 4  # restores: how far ahead calls are expected
YOUNG = 8  # a rate is believed once this part of a horizon was seen
HORIZON_MIN_NS = 1_000_000_000

CallKind = tuple[str, tuple[int, ...]]  # service, degrees


class Calls:
    """Of one kind: calls expected within the horizon, in 1/ONE, and the believed mean of one."""

    __slots__ = ("_at", "_first", "_x", "horizon", "serial", "work_ns")

    def __init__(self, horizon: int, serial: int, work_ns: int) -> None:
        self.horizon, self._x, self._at, self._first = horizon, 0, 0, 0
        self.serial, self.work_ns = serial, work_ns

    def expected(self, now: int) -> int:
        """Calls expected within the horizon; changes nothing."""
        since = now - self._at
        return self._x * self.horizon // (self.horizon + since) if since > 0 else self._x

    def steady(self, now: int) -> int:
        """Calls expected per horizon at the rate seen since the first call. It scales the count up
        while less than one horizon has passed."""
        seen = max(now - self._first, self.horizon // YOUNG)
        return self.expected(now) * self.horizon // min(seen, self.horizon)

    def is_young(self, now: int) -> bool:
        """Whether the first call came less than a horizon ago, so that the rate is a guess."""
        return now - self._first < self.horizon

    def came(self, now: int, serial: int, work_ns: int) -> None:
        """One more."""
        self._first = self._first or now
        self._x, self._at = self.expected(now) + ONE, now
        self.serial, self.work_ns = serial, self.work_ns + (work_ns - self.work_ns) // 8


class Demand:
    """Every kind of call that ever came, in order of its first."""

    def __init__(self) -> None:
        self.kinds: dict[CallKind, Calls] = {}
        self.of_service: dict[str, list[CallKind]] = {}

    def came(self, action: Action, now: int, restore_ns: int, estimator: Estimator) -> None:
        """A call was submitted. O(1)."""
        service = service_of(action.key)
        kind = (service, action.degrees)
        serial, work = estimator.estimate(action)
        if kind not in self.kinds:
            self.of_service.setdefault(service, []).append(kind)
            self.kinds[kind] = Calls(max(HORIZON_MIN_NS, HORIZON * restore_ns), serial, work)
        self.kinds[kind].came(now, serial, work)
