"""Divides the CPUs of one node among the actions that run and those that wait. Pure.

The value of a further unit is its gain in the action's speed, times the action's weight. As speeds
grow ever more slowly, lending unit after unit where its value is highest makes the sum of weighted
speeds largest. Two heaps find the highest and the lowest value in O(log).

No unit is made or lost, and no running action that has a unit falls below one. A waiting action is
passed over only if it needs more units than all that are free or could be taken. The result depends
on the arguments alone.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from math import isqrt
from typing import NamedTuple

from ....state.tenant_use import Rank, TenantTurns

_ROOT_BITS = 80  # the fourth root of a ratio keeps a quarter of these bits
NUM, DEN = 3, 2  # a unit moves to another action only if its value grows by more than NUM/DEN


class ResizableLease(NamedTuple):
    """A running lease whose size may change now.

    Attributes:
        id: number of the lease.
        units: CPUs that it holds.
        top: the most CPUs that it may hold.
        steps: what each further unit adds to its speed, from the first on.
        weight: how much its speed counts.
        tenant: the tenant for which it counts.
        least: the fewest CPUs that it keeps.
    """

    id: int
    units: int
    top: int
    steps: tuple[int, ...]
    weight: int
    tenant: str = ""
    least: int = 1


class WaitingCandidate(NamedTuple):
    """A waiting action that may start in this cycle.

    Attributes:
        id: id of the action.
        degrees: its degrees, in ascending order.
        rigid: whether it keeps the size with which it starts, which must be one of its degrees.
        steps: what each further unit adds to its speed, from the first on.
        weight: how much its speed counts.
        must: whether it starts whenever enough units can be taken from others.
        tenant: the tenant for which it counts.
    """

    id: int
    degrees: tuple[int, ...]
    rigid: bool
    steps: tuple[int, ...]
    weight: int
    must: bool
    tenant: str = ""

    @property
    def least(self) -> int:
        """The fewest units on which it can start."""
        return self.degrees[0] if self.rigid else 1


def weight(left: int, scale: int, age: int = 0, tail: int = 0) -> int:
    """Returns how much an action's speed counts: the fourth root of flow ** tail / (left + scale).

    The divisor mildly prefers actions that are nearly done, which makes the mean completion time
    small. `flow` is about the action's completion time, from its submission on. The greater its
    power, the more units go to the actions that take longest, as if the completion times were
    summed by such a power (Edmonds, Im and Moseley, SODA 2011). That makes the tail short, and the
    mean longer.

    Args:
        left: the work that is left, ns on one unit.
        scale: twice the mean work that is left on the node, ns.
        age: the time since it was submitted, ns.
        tail: the power, in quarters; 0 counts no time.
    """
    if not tail:
        return (1 << 30) // (isqrt(isqrt(((left + scale) >> 10) << 20)) + 1)
    flow = age + (left >> 1) + scale >> 10
    return isqrt(isqrt((flow ** tail << _ROOT_BITS) // ((left + scale >> 10) + 1))) + 1


def _last_first(rank: Rank) -> Rank:
    return -rank[0], -rank[1], rank[2]


class _Shares:
    """The units of each action, and heaps of the values of its last unit and of a further one.

    Each tenant has heaps of its own, since tenants are compared before values are; two more heaps
    hold the tenants by rank. Heap entries that are out of date are removed when they come to the
    top.
    """

    def __init__(self, turns: TenantTurns | None) -> None:
        self.turns = turns
        self.units: list[int] = []
        self.least: list[int] = []
        self.top: list[int] = []
        self._steps: list[tuple[int, ...]] = []
        self._weight: list[int] = []
        self._tenant: list[str] = []
        self._low: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self._high: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self._behind: list[Rank] = []  # tenants by their rank with one unit more
        self._ahead: list[Rank] = []  # tenants by their rank, the last first

    def add(self, units: int, least: int, of: ResizableLease | WaitingCandidate, top: int) -> None:
        self.units.append(units)
        self.least.append(least)
        self.top.append(top)
        self._steps.append(of.steps)
        self._weight.append(of.weight)
        self._tenant.append(of.tenant if self.turns is not None else "")
        self._note(len(self.units) - 1)

    def _note(self, k: int) -> None:
        units, tenant = self.units[k], self._tenant[k]
        if units > self.least[k]:
            value = self._steps[k][units - 1] * self._weight[k]
            heapq.heappush(self._low[tenant], (value, k, units))
        if units < self.top[k]:
            heapq.heappush(self._high[tenant], (-self._steps[k][units] * self._weight[k], k, units))
        if self.turns is not None:
            heapq.heappush(self._behind, self.turns.rank(tenant, 1))
            heapq.heappush(self._ahead, _last_first(self.turns.rank(tenant)))

    def cheapest(self, tenant: str) -> tuple[int, int] | None:
        """Returns (value, index) for the tenant's action whose last unit has the lowest value."""
        low = self._low[tenant]
        while low:
            value, k, units = low[0]
            if self.units[k] == units > self.least[k]:
                return value, k
            heapq.heappop(low)
        return None

    def dearest(self, tenant: str) -> tuple[int, int] | None:
        """Returns (value, index) for the tenant's action to which a further unit is worth most."""
        high = self._high[tenant]
        while high:
            value, k, units = high[0]
            if self.units[k] == units < self.top[k]:
                return -value, k
            heapq.heappop(high)
        return None

    def gaining(self) -> int | None:
        """Returns the action that gets the next unit: of the tenant that is behind, the one to
        which it is worth most. None if no action wants a unit that it may have.
        """
        turns, heap = self.turns, self._behind
        if turns is None:
            found = self.dearest("")
            return found[1] if found is not None else None
        while heap:
            tenant = heap[0][2]
            if (heap[0] == turns.rank(tenant, 1) and turns.room(tenant) > 0
                    and (found := self.dearest(tenant)) is not None):
                return found[1]
            heapq.heappop(heap)
        return None

    def giving(self) -> int | None:
        """Returns the action that gives up the next unit: of the tenant that is ahead, the one to
        which its last unit is worth least. None if no action can.
        """
        turns, heap = self.turns, self._ahead
        while heap and turns is not None:
            tenant = heap[0][2]
            if (heap[0] == _last_first(turns.rank(tenant))
                    and (found := self.cheapest(tenant)) is not None):
                return found[1]
            heapq.heappop(heap)
        return None

    def shift(self, k: int, by: int) -> None:
        self.units[k] += by
        if self.turns is not None:
            self.turns.charge(self._tenant[k], by)
        self._note(k)

    def spread(self, free: int) -> int:
        """Lends free units where their value is highest; returns how many no action wants."""
        while free and (k := self.gaining()) is not None:
            self.shift(k, 1)
            free -= 1
        return free

    def admit(self, e: WaitingCandidate, free: int) -> int | None:
        """Starts a candidate on its smallest size, from free units and from those of others.

        A tenant that would hold more than its part gets units of its own actions only; within a
        tenant the candidate must be worth more than what it takes, or be one that must start.

        Returns:
            How many units are free then; None if the candidate cannot start.
        """
        own, taken, judged = e.tenant if self.turns is not None else "", list[int](), e.must
        while free < e.least or not self._has_room(e):
            k = self._from_others(e) if self._has_room(e) else None
            if k is None:
                cheap = self.cheapest(own)
                if cheap is None or (not judged and cheap[0] * e.least
                                     > sum(e.steps[:e.least]) * e.weight):
                    for back in taken:
                        self.shift(back, 1)
                    return None
                k, judged = cheap[1], True
            self.shift(k, -1)
            taken.append(k)
            free += 1
        if self.turns is not None:
            self.turns.charge(e.tenant, e.least)
        self.add(e.least, e.least, e, e.degrees[-1])
        return free - e.least

    def _has_room(self, e: WaitingCandidate) -> bool:
        """Returns whether the limit of its tenant lets a candidate start on its smallest size."""
        return self.turns is None or self.turns.room(e.tenant) >= e.least

    def _from_others(self, e: WaitingCandidate) -> int | None:
        """Returns an action of another tenant that gives up a unit; None if none should."""
        k = self.giving()
        if k is None or self.turns is None or self._tenant[k] == e.tenant or (
                self.turns.rank(e.tenant, e.least) >= self.turns.rank(self._tenant[k])):
            return None
        return k

    def settle(self) -> None:
        """Moves units from tenants that are ahead to tenants that are behind, and then between the
        actions of a tenant while a move gains more than NUM/DEN.
        """
        while self.turns is not None:
            to, of = self.gaining(), self.giving()
            if to is None or of is None or (self.turns.rank(self._tenant[to], 1)
                                            >= self.turns.rank(self._tenant[of])):
                break
            self.shift(of, -1)
            self.shift(to, 1)
        for tenant in list(self._high):
            self._settle(tenant)

    def _settle(self, tenant: str) -> None:
        while True:
            up, down = self.dearest(tenant), self.cheapest(tenant)
            if (up is None or down is None or up[0] * DEN <= down[0] * NUM
                    or up[1] == down[1]):
                return
            self.shift(down[1], -1)
            self.shift(up[1], 1)


def divide_cpus(free: int, holders: Sequence[ResizableLease],
                candidates: Sequence[WaitingCandidate], turns: TenantTurns | None = None,
                ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns (id, units) of the leases that change, and (id, units) of the actions that start.

    First, free units go where their value is highest. Second, each candidate in order takes the
    units of its smallest size from the actions that value them least, if the candidate values them
    more or must start. The first candidate for which neither holds ends the list; but one that
    needs more units than are free or could be taken is passed over, unless it must start. Third,
    units move while a move gains enough. Fourth, a rigid action keeps the largest degree within its
    share.
    O((holders + candidates + units moved) log).

    Between tenants, their ranks decide in place of values: a free unit goes to the tenant that is
    behind, and a tenant that is ahead gives up units to one that stays behind with them. A
    candidate that cannot start ends the list for its own tenant, and for all if its tenant stays
    behind another one, so that the units that come free gather for it.

    Args:
        free: units that no action holds.
        holders: the actions whose size may change.
        candidates: the actions that may start, in order.
        turns: the order of the tenants, which is drawn down; None if there is nothing to compare.
    """
    shares = _Shares(turns)
    for holder in holders:
        shares.add(holder.units, min(holder.least, holder.units), holder, holder.top)
    n = len(holders)
    spare = free + sum(max(0, h.units - h.least) for h in holders)
    free = shares.spread(free)
    started: list[WaitingCandidate] = []
    ended: set[str] = set()  # tenants whose candidates start no more
    last: Rank | None = None  # of the tenant that is most ahead; None if it may have changed
    for e in candidates:
        if e.tenant in ended:
            continue
        left = shares.admit(e, free) if e.least <= spare else None
        if left is None:
            passed_over = e.least > spare and not e.must
            if turns is None and not passed_over:
                break
            if turns is None or turns.room(e.tenant) < e.least:
                continue  # no units are kept for it
            last = last or max(map(turns.rank, turns.holders()), default=turns.rank(e.tenant))
            if e.tenant != last[2] and turns.rank(e.tenant, e.least) < last:
                break
            if not passed_over:
                ended.add(e.tenant)
            continue
        last = None
        started.append(e)
        spare -= e.least
        free = shares.spread(left)
    shares.settle()
    free += _fix(shares, started, n)
    shares.spread(free)
    changed = [(h.id, shares.units[k]) for k, h in enumerate(holders)
               if shares.units[k] != h.units]
    return changed, [(e.id, shares.units[n + k]) for k, e in enumerate(started)]


def _fix(shares: _Shares, started: Sequence[WaitingCandidate], n: int) -> int:
    """Gives each rigid action one of its degrees; returns the number of units that become free."""
    rigid = defaultdict[str, list[tuple[int, WaitingCandidate]]](list)
    for k, e in enumerate(started, n):
        if e.rigid:
            rigid[e.tenant if shares.turns is not None else ""].append((k, e))
    return sum(_fix_of_tenant(shares, some) for some in rigid.values())


def _fix_of_tenant(shares: _Shares, rigid: Sequence[tuple[int, WaitingCandidate]]) -> int:
    """Gives each of these actions the largest degree within its share. With the units that this
    leaves, those that were nearest to their next degree get that one, until none fits.

    O(n log n) for n actions and each degree. Returns the number of units that are left.
    """
    share, free = {k: shares.units[k] for k, _ in rigid}, 0

    def fix(k: int, degree: int) -> None:
        nonlocal free
        free += shares.units[k] - degree
        shares.top[k] = max(shares.top[k], degree)
        shares.shift(k, degree - shares.units[k])
        shares.least[k] = shares.top[k] = degree

    for k, e in rigid:
        fix(k, max(d for d in e.degrees if d <= share[k]))
    while True:
        steps = [(k, shares.units[k], min(d for d in e.degrees if d > shares.units[k]))
                 for k, e in rigid if shares.units[k] < e.degrees[-1]]
        fitting = [(Fraction(now - share[k], then - now), k, then)
                   for k, now, then in steps if then - now <= free]
        if not fitting:
            return free
        for _, k, then in sorted(fitting):
            if then - shares.units[k] <= free:
                fix(k, then)
