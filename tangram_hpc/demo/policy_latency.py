"""How long a policy takes before an action of a class, drawn from measured quantiles.

The table holds quantiles only, of measured traces of a coding agent (SWE-bench Verified, bash
actions). Source: gruckion/mini-swe-agent at commit d12a71af (a fork of SWE-agent/mini-swe-agent),
`swebench_results/20251118_gemini-3-pro-74pct/trajs`; licence MIT.

The traces give the time between two model requests at a resolution of one second, which is the
policy's latency plus the execution of the action. The median execution time of the action's class
in AgentCgroup's statistics (arXiv 2602.09345, API model) was subtracted: test 1.2 s, python 0.95 s,
git 0.09 s, other shell 0.06 s, reading and editing 0.05 s. Differences below 0.25 s count as 0.25
s. Steps that timed out are left out. This module reads neither a clock nor a file.
"""

from __future__ import annotations

import numpy as np

from ..errors import InvalidInput

# 21 levels, denser towards the tail, which contributes much of the mean
LEVELS = (
    0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85,
    0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0,
)  # fmt: skip

# Seconds at LEVELS, by the class of the action that the policy chooses. They come from 8662, 3822,
# 3873, 1868, 283 and 967 measured steps.
QUANTILES: dict[str, tuple[float, ...]] = {
    "read": (
        0.95, 1.95, 1.95, 2.95, 2.95, 2.95, 3.95, 3.95, 4.95, 6.95, 7.95,
        10.95, 12.95, 15.95, 21.95, 26.95, 39.95, 46.95, 62.63, 79.31, 165.95,
    ),
    "edit": (
        0.95, 2.95, 2.95, 3.95, 4.95, 5.95, 6.95, 7.95, 9.95, 12.95, 14.95,
        17.95, 20.95, 26.9, 33.95, 38.95, 48.95, 65.74, 87.02, 106.2, 203.95,
    ),
    "python": (
        1.05, 1.05, 1.05, 2.05, 2.05, 2.05, 3.05, 3.05, 4.05, 6.05, 7.05,
        9.05, 12.05, 14.05, 19.05, 22.05, 33.33, 44.05, 55.56, 62.56, 107.05,
    ),
    "test": (
        0.25, 1.15, 1.8, 1.8, 2.8, 2.8, 3.8, 4.8, 5.8, 8.8, 9.8,
        13.8, 16.8, 20.8, 27.8, 35.8, 40.8, 46.46, 56.07, 60.07, 66.8,
    ),
    "git": (
        1.91, 1.91, 1.91, 2.91, 3.91, 4.91, 4.91, 5.91, 7.91, 9.91, 10.91,
        11.91, 12.91, 16.81, 21.07, 28.59, 42.09, 45.27, 51.27, 54.09, 56.91,
    ),
    "other": (
        1.94, 1.94, 2.94, 2.94, 2.94, 3.94, 3.94, 4.94, 4.94, 6.94, 7.94,
        10.94, 11.94, 14.64, 18.94, 22.94, 38.62, 40.94, 48.35, 55.57, 101.94,
    ),
}  # fmt: skip

KINDS = tuple(QUANTILES)


class PolicyLatency:
    """Draws policy latencies; the same seed and order of draws give the same values."""

    def __init__(self, seed: int | np.random.Generator, scale: float = 1.0) -> None:
        """Begins a sequence of draws.

        Args:
            seed: A seed of at least 0, or the generator to draw from.
            scale: Factor on all latencies, at least 0.

        Raises:
            InvalidInput: The scale is negative or not finite, or the seed is negative.
        """
        if not (np.isfinite(scale) and scale >= 0):
            raise InvalidInput(f"scale {scale}: must be finite and at least 0")
        if isinstance(seed, int) and seed < 0:
            raise InvalidInput(f"seed {seed}: must be at least 0")
        self._rng = np.random.default_rng(seed)
        self._scale = float(scale)

    def draw(self, kind: str) -> float:
        """Returns a latency in seconds before an action of class `kind`.

        Raises:
            InvalidInput: The class is not known.
        """
        level = self._rng.random()
        return self._scale * float(np.interp(level, LEVELS, _quantiles(kind)))


def mean_s(kind: str) -> float:
    """Returns the mean of the latencies of class `kind`, in unscaled seconds."""
    seconds = np.asarray(_quantiles(kind))
    return float(np.sum((seconds[1:] + seconds[:-1]) / 2 * np.diff(LEVELS)))


def _quantiles(kind: str) -> tuple[float, ...]:
    try:
        return QUANTILES[kind]
    except KeyError:
        raise InvalidInput(f"policy latency: class {kind!r} is not known; known are "
                           f"{', '.join(KINDS)}") from None
