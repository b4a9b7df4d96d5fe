"""The arithmetic of the published greedy: which actions start, and on how many units each. Pure.

A dynamic program finds, for each prefix of the candidates and each number of units, the degrees
with the least sum of run times. Then the last candidate is postponed for as long as that lowers the
estimated sum of all completion times. It costs O(candidates x degrees x free units).

The program is exact (a test compares it with brute force). All numbers are whole, and the result
depends on the arguments alone. Source: ARL-Tangram, Algorithms 1 and 2.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

DegreeOptions = Sequence[tuple[int, int]]  # (degree, run time in ns), degrees ascending
_NEVER = 1 << 200


def prefix_program(options: Sequence[DegreeOptions], free: int,
                   ) -> tuple[list[list[int]], list[list[int]]]:
    """Solves the dynamic program for all prefixes at once. O(candidates x degrees x free).

    Args:
        options: the degrees of each candidate, with the run time on each in ns.
        free: units that may be used.

    Returns:
        `rows`, where `rows[i][j]` is the least sum of run times of the first `i` candidates on at
        most `j` units (huge if they do not fit), and `picks`, where `picks[i][j]` is the degree of
        candidate `i` if candidates 0 to `i` use at most `j` units in the best way.
    """
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
    """Returns the degrees of the first `n` candidates on at most `free` units. O(n)."""
    degrees = []
    for k in range(n - 1, -1, -1):
        degrees.append(picks[k][free])
        free -= degrees[-1]
    return degrees[::-1]


def choose_degrees(options: Sequence[DegreeOptions], free: int, least: Sequence[tuple[int, int]],
                   releases: Sequence[tuple[int, int]], now: int) -> list[int]:
    """Returns the degrees of the candidates to start now, which are a prefix of all candidates.

    O(candidates x (degrees x free + (running + waiting) log)).

    Args:
        options: the choices of each candidate; all candidates fit on their smallest degrees.
        free: units that no lease holds.
        least: (units, run time in ns) of the actions that wait on their smallest degree, candidates
            first. All of them count for every prefix: if fewer counted for a shorter one, a shorter
            one would always seem better.
        releases: (time in epoch ns, units) of the actions that run.
        now: the time in epoch ns.
    """
    largest = [some[-1][0] for some in options]
    if sum(largest) <= free and len(least) == len(options):
        return largest  # no action waits behind the candidates
    free = min(free, sum(largest))
    rows, picks = prefix_program(options, free)

    def total(n: int) -> int:
        """Returns the estimated sum of completion times if the first `n` candidates start."""
        degrees = read_off(picks, n, free)
        ends = [(now + dict(some)[d], d) for d, some in zip(degrees, options, strict=False)]
        rest = _wait(free - sum(degrees), [*releases, *ends], least[n:], now)
        return rows[n][free] + rest

    n = len(options)
    best = total(n)
    while n > 1 and (value := total(n - 1)) < best:
        n, best = n - 1, value
    return read_off(picks, n, free)


def _wait(spare: int, heap: list[tuple[int, int]], rest: Sequence[tuple[int, int]], now: int
          ) -> int:
    """Returns the sum of completion times of all other actions, which start as running ones end."""
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
    return total
