"""Pure. Finds the best rollout instances, and their requests, for every number of GPUs.

A dynamic program over the length-sorted requests (Libra, Algorithm 1: ROLLOUT_DP). It is exact over
all ways to cut them into runs, one run for one instance of any degree. The table for G GPUs
contains that of every smaller number, so one table serves all splits.

Invariants: more GPUs are never worse, because a GPU may stay idle; among equal answers the one that
uses the fewest GPUs is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from .lengths import Ints
from .shapes import NEVER


class StrataRange(NamedTuple):
    """One instance of this degree, for strata `first` .. `end - 1`."""

    degree: int
    first: int
    end: int


class RolloutDpTable:
    """The least makespan, in ns, of the first i strata on at most g GPUs.

    least[g][i] = min over degree and j of max(least[g - degree][j], cost(degree, j .. i-1)).
    """

    def __init__(self, segments: Mapping[int, Ints], gpus: int) -> None:
        """Fills the table. O(gpus x degrees x strata ** 2), in numpy.

        Args:
            segments: For each degree the matrix [j, i] of the times of strata j .. i-1, in ns.
            gpus: The largest number of GPUs.
        """
        self._ending = {d: np.ascontiguousarray(segments[d].T) for d in sorted(segments)}  # [i, j]
        strata = next(iter(self._ending.values())).shape[0]
        self._least = np.full((gpus + 1, strata), NEVER, np.int64)
        self._least[0, 0] = 0
        room, least = np.empty((strata, strata), np.int64), np.empty(strata, np.int64)
        for g in range(1, gpus + 1):
            row = self._least[g]
            row[:] = self._least[g - 1]  # one GPU idles
            for degree, ending in self._ending.items():
                if degree > g:
                    break
                np.maximum(ending, self._least[g - degree], out=room)
                np.minimum(row, room.min(axis=1, out=least), out=row)

    def ns(self, gpus: int) -> int:
        """The least makespan of all requests on at most `gpus` GPUs; NEVER if they cannot run."""
        return int(self._least[gpus, -1])

    def least_gpus(self, within_ns: int) -> int:
        """The fewest GPUs on which all requests end within that time; -1 for none."""
        good = np.flatnonzero(self._least[:, -1] <= within_ns)
        return int(good[0]) if len(good) else -1

    def pieces(self, gpus: int) -> list[StrataRange]:
        """The instances behind `ns(gpus)`, shortest requests first.

        O(instances x degrees x strata).
        """
        found: list[StrataRange] = []
        at, g = self._least.shape[1] - 1, gpus
        while at:
            wanted = self._least[g, at]
            g = int(np.flatnonzero(self._least[:, at] == wanted)[0])  # the other GPUs idle
            piece = next(self._ways(g, at, int(wanted)))
            found.append(piece)
            at, g = piece.first, g - piece.degree
        return found[::-1]

    def _ways(self, g: int, at: int, ns: int) -> Iterator[StrataRange]:
        """Yields the instances that can come last when `g` GPUs are divided so that all strata
        before `at` are served in `ns`; instances of small degrees come first.
        """
        for degree, ending in self._ending.items():
            if degree <= g:
                takes = np.maximum(ending[at], self._least[g - degree])
                yield from (StrataRange(degree, int(first), at)
                            for first in np.flatnonzero(takes == ns))
