"""Pure. The rollout side: which instances, and which requests each, for every number of GPUs.

Law: exact over all ways to cut the length-sorted requests into runs, one an instance of any degree.
The table of G GPUs holds that of each fewer, so one table serves all splits. More GPUs are never
worse, as one may idle; of equal answers the one that uses fewest GPUs is kept. (Libra, Algorithm 1:
ROLLOUT_DP.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .lengths import Ints
from .shapes import NEVER


class Piece(NamedTuple):
    """One instance, for strata `first` .. `end - 1`."""

    degree: int
    first: int
    end: int


class RolloutTable:
    """least[g][i] = min over degree, j of max(least[g - degree][j], cost(degree, j .. i-1)), ns."""

    def __init__(self, segments: Mapping[int, Ints], gpus: int) -> None:
        """`segments[degree][j, i]` in ns. O(gpus x degrees x strata ** 2), in numpy."""
        degrees = sorted(segments)
        ending = {d: np.ascontiguousarray(segments[d].T) for d in degrees}  # [i, j]
        strata = segments[degrees[0]].shape[0]
        self._least = np.full((gpus + 1, strata), NEVER, np.int64)
        self._least[0, 0] = 0
        self._degree = np.zeros((gpus + 1, strata), np.int16)  # 0: one GPU idles
        self._first = np.zeros((gpus + 1, strata), np.int16)
        columns = np.arange(strata)
        room = np.empty((strata, strata), np.int64)
        for g in range(1, gpus + 1):
            row = self._least[g]
            row[:] = self._least[g - 1]
            for degree in degrees:
                if degree > g:
                    break
                np.maximum(ending[degree], self._least[g - degree], out=room)
                first = room.argmin(axis=1)
                least = room[columns, first]
                better = least < row
                row[better] = least[better]
                self._degree[g, better] = degree
                self._first[g, better] = first[better]

    def ns(self, gpus: int) -> int:
        """The least makespan of all requests on at most so many GPUs; NEVER if there is none."""
        return int(self._least[gpus, -1])

    def least_gpus(self, within_ns: int) -> int:
        """On how few GPUs all requests are done within that time; -1: on none of the table's."""
        good = np.flatnonzero(self._least[:, -1] <= within_ns)
        return int(good[0]) if len(good) else -1

    def pieces(self, gpus: int) -> list[Piece]:
        """The instances behind `ns(gpus)`, shortest requests first."""
        found: list[Piece] = []
        at, g = self._least.shape[1] - 1, gpus
        while at:
            degree = int(self._degree[g, at])
            if degree:
                first = int(self._first[g, at])
                found.append(Piece(degree, first, at))
                at, g = first, g - degree
            else:
                g -= 1
                assert g > 0, "a makespan without instances"
        return found[::-1]
