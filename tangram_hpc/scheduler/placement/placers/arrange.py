"""Pure. The published greedy's arithmetic: a dynamic program over degrees, and the postponing of
the last candidate while the estimated sum of completion times falls (ARL-Tangram, Algorithms 1, 2).

Law: whole numbers; a function of its arguments alone. The program is exact: for each prefix and
each number of units the least sum of durations (a test compares it with brute force).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

DegreeOptions = Sequence[tuple[int, int]]  # (degree, duration), degrees ascending
_NEVER = 1 << 200


def arrange(options: Sequence[DegreeOptions], free: int) -> tuple[list[list[int]], list[list[int]]]:
    """rows[i][j]: the least sum of durations of the first i on at most j units (huge if they do not
    fit); picks[i][j]: the degree of the i-th in it. O(candidates x degrees x free)."""
    rows, picks = [[0] * (free + 1)], []
    for some in options:
        last, row, pick = rows[-1], [_NEVER] * (free + 1), [0] * (free + 1)
        for degree, duration in some:
            for j in range(degree, free + 1):
                value = last[j - degree] + duration
                if value < row[j]:
                    row[j], pick[j] = value, degree
        rows.append(row)
        picks.append(pick)
    return rows, picks


def read_off(picks: Sequence[Sequence[int]], n: int, free: int) -> list[int]:
    """The degrees of the first n on at most `free` units. O(n)."""
    degrees = []
    for k in range(n - 1, -1, -1):
        degrees.append(picks[k][free])
        free -= degrees[-1]
    return degrees[::-1]


def choose_degrees(options: Sequence[DegreeOptions], free: int, least: Sequence[tuple[int, int]],
                   releases: Sequence[tuple[int, int]], now: int, depth: int) -> list[int]:
    """Degrees of those to start now, a prefix of the candidates.

    `options`: the candidates' choices; they fit with their least degrees. `least`: (units,
    duration) of all who wait, candidates first, on their least degree. `releases`: (time, units) of
    those who run. O(candidates x (degrees x free + (running + depth) log)).
    """
    largest = [some[-1][0] for some in options]
    if sum(largest) <= free and len(least) == len(options):
        return largest  # nobody waits behind them
    free = min(free, sum(largest))
    rows, picks = arrange(options, free)

    def total(n: int) -> int:
        """The estimated sum of completion times if the first n start."""
        degrees = read_off(picks, n, free)
        ends = [(now + dict(some)[d], d) for d, some in zip(degrees, options, strict=False)]
        rest = _wait(free - sum(degrees), [*releases, *ends], least[n:n + depth],
                     len(least) - n, now)
        return rows[n][free] + rest

    n = len(options)
    best = total(n)
    while n > 1 and (value := total(n - 1)) < best:
        n, best = n - 1, value
    return read_off(picks, n, free)


def _wait(spare: int, heap: list[tuple[int, int]], rest: Sequence[tuple[int, int]], waiting: int,
          now: int) -> int:
    """Completion times of the rest, started in order on least units as others end."""
    heapq.heapify(heap)
    total, at = 0, now
    for units, duration in rest:
        while spare < units and heap:
            at, more = heapq.heappop(heap)
            spare += more
        if spare < units:
            break
        spare -= units
        total += at + duration - now
        heapq.heappush(heap, (at + duration, units))
    return total + max(0, waiting - len(rest)) * (at - now)
