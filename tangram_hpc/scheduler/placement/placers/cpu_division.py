"""Divides the CPUs of one node among the actions that run and those that wait. Pure.

The value of a further unit is its gain in the action's speed, times the action's weight. As speeds
grow ever more slowly, lending unit after unit where its value is highest makes the sum of weighted
speeds largest. Two heaps find the highest and the lowest value in O(log).

No unit is made or lost, no running action that has a unit falls below one, and the actions that
start are a prefix of those that wait. The result depends on the arguments alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

NUM, DEN = 3, 2  # a unit moves to another action only if its value grows by more than NUM/DEN


class ResizableLease(NamedTuple):
    """A running lease whose size may change now.

    Attributes:
        id: number of the lease.
        units: CPUs that it holds.
        top: the most CPUs that it may hold.
        steps: what each further unit adds to its speed, from the first on.
        weight: how much its speed counts.
    """

    id: int
    units: int
    top: int
    steps: tuple[int, ...]
    weight: int


class WaitingCandidate(NamedTuple):
    """A waiting action that may start in this cycle.

    Attributes:
        id: id of the action.
        degrees: its degrees, in ascending order.
        rigid: whether it keeps the size with which it starts, which must be one of its degrees.
        steps: what each further unit adds to its speed, from the first on.
        weight: how much its speed counts.
        must: whether it starts whenever enough units can be taken from others.
    """

    id: int
    degrees: tuple[int, ...]
    rigid: bool
    steps: tuple[int, ...]
    weight: int
    must: bool

    @property
    def least(self) -> int:
        """The fewest units on which it can start."""
        return self.degrees[0] if self.rigid else 1


def weight(left: int, scale: int) -> int:
    """Returns a weight that mildly prefers actions that are nearly done: (left + scale) ** -1/4."""
    return (1 << 30) // (isqrt(isqrt(((left + scale) >> 10) << 20)) + 1)


class _Shares:
    """The units of each action, and heaps of the values of its last unit and of a further one.

    Heap entries that are out of date are removed when they come to the top.
    """

    def __init__(self) -> None:
        self.units: list[int] = []
        self.least: list[int] = []
        self.top: list[int] = []
        self._steps: list[tuple[int, ...]] = []
        self._weight: list[int] = []
        self._low: list[tuple[int, int, int]] = []
        self._high: list[tuple[int, int, int]] = []

    def add(self, units: int, least: int, of: ResizableLease | WaitingCandidate, top: int) -> None:
        self.units.append(units)
        self.least.append(least)
        self.top.append(top)
        self._steps.append(of.steps)
        self._weight.append(of.weight)
        self._note(len(self.units) - 1)

    def _note(self, k: int) -> None:
        units = self.units[k]
        if units > self.least[k]:
            heapq.heappush(self._low, (self._steps[k][units - 1] * self._weight[k], k, units))
        if units < self.top[k]:
            heapq.heappush(self._high, (-self._steps[k][units] * self._weight[k], k, units))

    def cheapest(self) -> tuple[int, int] | None:
        """Returns (value, index) for the action whose last unit has the lowest value."""
        while self._low:
            value, k, units = self._low[0]
            if self.units[k] == units > self.least[k]:
                return value, k
            heapq.heappop(self._low)
        return None

    def dearest(self) -> tuple[int, int] | None:
        """Returns (value, index) for the action where a further unit has the highest value."""
        while self._high:
            value, k, units = self._high[0]
            if self.units[k] == units < self.top[k]:
                return -value, k
            heapq.heappop(self._high)
        return None

    def shift(self, k: int, by: int) -> None:
        self.units[k] += by
        self._note(k)

    def spread(self, free: int) -> int:
        """Lends free units where their value is highest; returns how many no action wants."""
        while free and (found := self.dearest()) is not None:
            self.shift(found[1], 1)
            free -= 1
        return free

    def take_cheapest(self) -> None:
        found = self.cheapest()
        assert found is not None, "more units are wanted than can be given up"
        self.shift(found[1], -1)

    def settle(self) -> None:
        """Moves units between actions while a move gains more than NUM/DEN."""
        while True:
            up, down = self.dearest(), self.cheapest()
            if (up is None or down is None or up[0] * DEN <= down[0] * NUM
                    or up[1] == down[1]):
                return
            self.shift(down[1], -1)
            self.shift(up[1], 1)


def divide_cpus(free: int, holders: Sequence[ResizableLease],
                candidates: Sequence[WaitingCandidate],
                ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns (id, units) of the leases that change, and (id, units) of the actions that start.

    First, free units go where their value is highest. Second, each candidate in order takes the
    units of its smallest size from the actions that value them least, if the candidate values them
    more or must start; the first candidate for which neither holds ends the list. Third, units move
    while a move gains enough. Fourth, a rigid action keeps the largest degree within its share.
    O((holders + candidates + units moved) log).
    """
    shares = _Shares()
    for holder in holders:
        shares.add(holder.units, min(1, holder.units), holder, holder.top)
    n = len(holders)
    spare = free + sum(max(0, h.units - 1) for h in holders)
    free = shares.spread(free)
    for e in candidates:
        need = e.least
        if need > spare:
            break
        if free < need and not e.must:
            cheap = shares.cheapest()
            if cheap is None or cheap[0] * need > sum(e.steps[:need]) * e.weight:
                break
        spare -= need
        while free < need:
            shares.take_cheapest()
            free += 1
        shares.add(need, need, e, e.degrees[-1])
        free = shares.spread(free - need)
    shares.settle()
    started = len(shares.units) - n
    free += _fix(shares, candidates[:started], n)
    shares.spread(free)
    changed = [(h.id, shares.units[k]) for k, h in enumerate(holders)
               if shares.units[k] != h.units]
    return changed, [(e.id, shares.units[n + k]) for k, e in enumerate(candidates[:started])]


def _fix(shares: _Shares, started: Sequence[WaitingCandidate], n: int) -> int:
    """Rounds rigid actions down to one of their degrees; returns the number of freed units."""
    free = 0
    for k, e in enumerate(started, n):
        if e.rigid:
            degree = max(d for d in e.degrees if d <= shares.units[k])
            free += shares.units[k] - degree
            shares.units[k] = shares.least[k] = shares.top[k] = degree
    return free
