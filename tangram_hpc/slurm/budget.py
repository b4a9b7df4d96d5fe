"""Rate limits for a broker's calls of Slurm: few queries, few other calls, a pause after a failure.

Pure: callers hand in the time (epoch ns) and the jitter's randomness, so the same calls at the same
times with the same seed give the same answers. The budget says when a call may be made; it calls
nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_SECOND = 10**9
# largest change of a pause, as a fraction: brokers that failed together must not retry together
_JITTER = 0.25


@dataclass(frozen=True)
class RpcLimits:
    """How often Slurm may be called.

    Attributes:
        query_ns: least time between two queries, ns.
        burst: how many submissions may be made at once; each other call but a query counts as one.
        refill_ns: after a burst, one further call is allowed each `refill_ns` ns.
        first_ns: the pause after a first failure, ns; it doubles with each further failure.
        most_ns: the longest such pause, ns.
    """

    query_ns: int = 30 * _SECOND
    burst: int = 8
    refill_ns: int = 30 * _SECOND
    first_ns: int = 15 * _SECOND
    most_ns: int = 600 * _SECOND


class Budget:
    """The rate limit of one broker: a token bucket, and a backoff with jitter.

    Every method is O(1).

    Args:
        uniform: returns a number between its two arguments, as `random.Random(seed).uniform` does.
        limits: what this budget keeps to; None for the defaults.

    Attributes:
        limits: what this budget keeps to.
        closed_until: no call may be made before this time, epoch ns; 0 outside of a pause.
    """

    def __init__(self, uniform: Callable[[float, float], float], limits: RpcLimits | None = None
                 ) -> None:
        self.limits = limits or RpcLimits()
        self._uniform = uniform
        self._queried_at = 0
        self._full_at = 0  # when the token bucket will be full again, epoch ns
        self._failures = 0  # number of failures in a row
        self.closed_until = 0

    def may_query_at(self, now: int) -> int:
        """Returns the time from which a query may be made, epoch ns; at most `now`: at once."""
        after = self._queried_at + self.limits.query_ns if self._queried_at else 0
        return max(after, self.closed_until)

    def queried(self, now: int) -> None:
        """Records that a query is made now."""
        self._queried_at = now

    def may_act_at(self, now: int) -> int:
        """Returns the time from which a submission may be made, epoch ns."""
        room = (self.limits.burst - 1) * self.limits.refill_ns
        return max(self._full_at - room, self.closed_until)

    def acted(self, now: int) -> None:
        """Records that a call other than a query is made now or was queued."""
        self._full_at = max(self._full_at, now) + self.limits.refill_ns

    def answered(self) -> None:
        """Records that Slurm answered a call, even if it rejected it; this ends any pause."""
        self._failures, self.closed_until = 0, 0

    def failed(self, now: int) -> None:
        """Records that a call got no answer, and begins a pause.

        Each failure in a row doubles the pause; jitter lets the pauses of many brokers drift apart.
        """
        pause = min(self.limits.most_ns, self.limits.first_ns << min(self._failures, 30))
        self._failures += 1
        self.closed_until = now + round(pause * (1 + _JITTER * self._uniform(-1.0, 1.0)))
