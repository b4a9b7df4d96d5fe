"""Pure. The division of one node's CPUs among those who run and those who wait.

Law: the value of a further unit of an action is what it adds to its speed times its weight, so free
units go where they are worth most; units are neither made nor lost, nobody who runs falls under one
unit, and those who start are a prefix of those who wait. A function of its arguments alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

NUM, DEN = 3, 2  # a unit moves from one to another only for a gain of more than NUM/DEN


class ResizableLease(NamedTuple):
    """One that runs and whose size may change now."""

    id: int
    units: int
    top: int
    steps: tuple[int, ...]
    weight: int


class Entrant(NamedTuple):
    """One that waits; a rigid one keeps a degree for good, `must` it start if it can at all."""

    id: int
    degrees: tuple[int, ...]
    rigid: bool
    steps: tuple[int, ...]
    weight: int
    must: bool

    @property
    def least(self) -> int:
        """On how many units it can start."""
        return self.degrees[0] if self.rigid else 1


def weight(left: int, scale: int) -> int:
    """A mild preference for what is nearly done: (left + scale) ** -1/4."""
    return (1 << 30) // (isqrt(isqrt(((left + scale) >> 10) << 20)) + 1)


class _Shares:
    """Units of each, and heaps of what the last one held and the next one are worth (lazy)."""

    def __init__(self) -> None:
        self.units: list[int] = []
        self.least: list[int] = []
        self.top: list[int] = []
        self._steps: list[tuple[int, ...]] = []
        self._weight: list[int] = []
        self._low: list[tuple[int, int, int]] = []
        self._high: list[tuple[int, int, int]] = []

    def add(self, units: int, least: int, of: ResizableLease | Entrant, top: int) -> None:
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
        """(value, whose) of the unit that is worth least where it is."""
        while self._low:
            value, k, units = self._low[0]
            if self.units[k] == units > self.least[k]:
                return value, k
            heapq.heappop(self._low)
        return None

    def dearest(self) -> tuple[int, int] | None:
        """(value, whose) of the unit that would be worth most."""
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
        """Lends free units where they are worth most; says how many nobody wants."""
        while free and (found := self.dearest()) is not None:
            self.shift(found[1], 1)
            free -= 1
        return free

    def take_cheapest(self) -> None:
        found = self.cheapest()
        assert found is not None, "more is wanted than can be given up"
        self.shift(found[1], -1)

    def settle(self) -> None:
        """Moves units while that gains more than NUM/DEN."""
        while True:
            up, down = self.dearest(), self.cheapest()
            if (up is None or down is None or up[0] * DEN <= down[0] * NUM
                    or up[1] == down[1]):
                return
            self.shift(down[1], -1)
            self.shift(up[1], 1)


def divide(free: int, holders: Sequence[ResizableLease],
           entrants: Sequence[Entrant]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(id, units) of those who change, and of those who start.

    1. Free units go where they are worth most. 2. Each entrant takes its least size from whoever
    values it least if it values it more, or must start; the first that does not ends the list.
    3. Units move while that gains enough. 4. A rigid one keeps the largest degree within its share.
    O((holders + entrants + units moved) log).
    """
    shares = _Shares()
    for holder in holders:
        shares.add(holder.units, min(1, holder.units), holder, holder.top)
    n = len(holders)
    spare = free + sum(max(0, h.units - 1) for h in holders)
    free = shares.spread(free)
    for e in entrants:
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
    free += _fix(shares, entrants[:started], n)
    shares.spread(free)
    changed = [(h.id, shares.units[k]) for k, h in enumerate(holders)
               if shares.units[k] != h.units]
    return changed, [(e.id, shares.units[n + k]) for k, e in enumerate(entrants[:started])]


def _fix(shares: _Shares, started: Sequence[Entrant], n: int) -> int:
    """Rounds rigid ones down to a degree; says how many units that frees."""
    free = 0
    for k, e in enumerate(started, n):
        if e.rigid:
            degree = max(d for d in e.degrees if d <= shares.units[k])
            free += shares.units[k] - degree
            shares.units[k] = shares.least[k] = shares.top[k] = degree
    return free
