"""Remembers what tenants held in one place lately. Pure.

A place is what `tenant_parts.py` divides: a node with its CPUs, an endpoint with its concurrent
calls, or all nodes with their memory. The most that a tenant held is kept for periods of several
lengths, as the action that would take its units decides how far back *lately* goes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# What a tenant held counts for one of these periods, and up to twice as long. On drawn loads
# (bench_drawn_tenants) a third of the longest left more tenants worse off than on their own part,
# and four times as much kept too many units.
PERIODS_NS = tuple(30_000_000_000 >> k for k in range(4, -1, -1))
AWAY = 4  # a tenant that was away for so many run times of an action hardly comes back in one


def period_for(run_ns: int) -> int:
    """Returns which period counts for an action that will run for so long, from 0 on."""
    return min(bisect_left(PERIODS_NS, AWAY * run_ns), len(PERIODS_NS) - 1)


@dataclass(slots=True)
class _Most:
    """The most units that a tenant held in one period and in the one before.

    Attributes:
        since: when the present period began, epoch ns.
        before: the most units that it held in the period before.
        most: the most that it held in the present period.
    """

    since: int
    before: int = 0
    most: int = 0


class _Recent:
    """What a tenant held in one place lately.

    Attributes:
        now: what it holds since it was last noted.
        most: for each of PERIODS_NS, the most that it held.
    """

    __slots__ = ("most", "now")

    def __init__(self, at: int) -> None:
        self.now, self.most = 0, [_Most(at) for _ in PERIODS_NS]

    def note(self, units: int, changed_at: int, now: int) -> None:
        """Notes what it holds from `changed_at` until now. O(periods)."""
        for period, use in zip(PERIODS_NS, self.most, strict=True):
            _roll(use, period, self.now, changed_at)
            use.most = max(use.most, units)
            _roll(use, period, units, now)
        self.now = units


def _roll(use: _Most, period: int, units: int, until: int) -> None:
    """Goes on to the period that `until` is in, with so many units held meanwhile."""
    if (age := until - use.since) >= period:
        use.before = use.most if age < 2 * period else units
        use.most, use.since = units, until - age % period


class RecentUse:
    """Remembers the most units that each tenant held in one place lately."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[str, _Recent] = {}

    def note(self, held: dict[str, int], now: int, changed_at: Callable[[str], int] | None = None
             ) -> None:
        """Notes what each tenant holds. O(tenants).

        Args:
            held: the units of each tenant.
            now: the present time, epoch ns.
            changed_at: since when a tenant has held no other number, if that is known; epoch ns.
        """
        for tenant in dict.fromkeys((*self._of, *held)):
            use = self._use(tenant, now)
            use.note(held.get(tenant, 0), now if changed_at is None else changed_at(tenant), now)
            longest = use.most[-1]
            if not longest.most and not longest.before:
                del self._of[tenant]

    def add(self, tenant: str, units: int, now: int) -> None:
        """Notes `units` more that a tenant holds from `now` on; negative for fewer."""
        use = self._use(tenant, now)
        use.now += units
        for each in use.most:
            each.most = max(each.most, use.now)

    def _use(self, tenant: str, now: int) -> _Recent:
        use = self._of.get(tenant)
        if use is None:
            use = self._of[tenant] = _Recent(now)
        return use

    def most(self, tenant: str, period: int) -> int:
        """Returns the most that a tenant held within one of PERIODS_NS, and up to twice that."""
        use = self._of.get(tenant)
        return max(use.most[period].before, use.most[period].most) if use is not None else 0

    def tenants(self) -> Iterable[str]:
        """Returns the tenants that held anything within the longest period."""
        return self._of
