"""Pure. When a broker may call Slurm: queries far apart, few other calls, silence after a failure.

Law: times are handed in (epoch ns); the jitter comes from one seeded generator, so the same calls
at the same times with the same seed give the same answers. It says when; it calls nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_SECOND = 10**9
_JITTER = 0.25  # of a pause, either way: brokers that failed together do not come back together


@dataclass(frozen=True)
class Limits:
    """`query_ns`: least time between two queries. Other calls: `burst` at once, then one each
    `refill_ns`. After a failure nobody calls for `first_ns`, then twice that, up to `most_ns`."""

    query_ns: int = 30 * _SECOND
    burst: int = 8
    refill_ns: int = 30 * _SECOND
    first_ns: int = 15 * _SECOND
    most_ns: int = 600 * _SECOND


class Budget:
    """One broker's. Every method is O(1)."""

    def __init__(self, seed: int, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._dice = np.random.default_rng(seed)
        self._queried_at = 0
        self._full_at = 0  # when the bucket of other calls will be full again
        self._failures = 0  # in a row
        self.closed_until = 0  # no call before

    def may_query_at(self, now: int) -> int:
        """From when on a query may be made; at most `now` when that is already so."""
        after = self._queried_at + self.limits.query_ns if self._queried_at else 0
        return max(after, self.closed_until)

    def queried(self, now: int) -> None:
        """A query is made now."""
        self._queried_at = now

    def may_act_at(self, now: int) -> int:
        """From when on a call that is no query may be made."""
        room = (self.limits.burst - 1) * self.limits.refill_ns
        return max(self._full_at - room, self.closed_until)

    def acted(self, now: int) -> None:
        """Such a call is made now, or is in line to be."""
        self._full_at = max(self._full_at, now) + self.limits.refill_ns

    def answered(self) -> None:
        """Slurm has answered a call, be it with a refusal."""
        self._failures, self.closed_until = 0, 0

    def failed(self, now: int) -> None:
        """A call got no answer: a pause begins, longer each time in a row (a full doubling, with
        jitter so that the pauses of many brokers drift apart)."""
        pause = min(self.limits.most_ns, self.limits.first_ns << min(self._failures, 30))
        self._failures += 1
        self.closed_until = now + round(pause * (1 + _JITTER * self._dice.uniform(-1.0, 1.0)))
