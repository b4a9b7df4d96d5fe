"""How long the tests of a tool call take, drawn from a measured distribution.

`tool_times.json` has the quantiles of a published trace. Between two quantiles the logarithm of the
duration is interpolated. A duration depends only on the run's seed and on the names that the caller
gives, so all modes of the run draw the same durations, in whatever order they make the calls.
"""

from __future__ import annotations

import hashlib
import json
import math
from itertools import pairwise
from pathlib import Path

TRACE = Path(__file__).with_name("tool_times.json")
LIMIT_S = 120.0  # the time limit of a tool, in the trace's time


class ToolTimes:
    """Draws durations.

    Args:
        seed: the run's seed.
        scale: how many seconds a second of the trace takes in this run.
        limit_s: the longest duration, in seconds of the trace; longer ones are cut.
        path: a file with quantiles.

    Raises:
        ValueError: the quantiles do not rise from 0 to 1, or a duration is not positive.
    """

    def __init__(self, seed: int, scale: float, limit_s: float = LIMIT_S,
                 path: Path = TRACE) -> None:
        self.seed, self.scale, self.limit_s = seed, scale, limit_s
        self.points = [(float(p), float(s)) for p, s in json.loads(path.read_text())["quantiles"]]
        shares, seconds = zip(*self.points, strict=True)
        if not (shares[0] == 0 and shares[-1] == 1 and seconds[0] > 0
                and all(a < b for a, b in pairwise(shares))
                and all(a <= b for a, b in pairwise(seconds))):
            raise ValueError(f"{path.name}: quantiles must rise from share 0 to share 1, with "
                             "durations above 0 that do not fall")

    def at(self, share: float) -> float:
        """Returns the duration below which this share of the trace's durations lies, in s."""
        for (low, first), (high, last) in pairwise(self.points):
            if share <= high:
                part = (share - low) / (high - low)
                return math.exp(math.log(first) * (1 - part) + math.log(last) * part)
        return self.points[-1][1]

    def draw(self, *names: object) -> float:
        """Returns the duration of one tool call in seconds of this run. The same names give the
        same duration."""
        text = ":".join(map(str, (self.seed, *names))).encode()
        share = int.from_bytes(hashlib.sha256(text).digest()[:7], "big") / 2**56
        return min(self.at(share), self.limit_s) * self.scale
