"""The rate limit of one endpoint in one process: when a granted call may really start.

A process that was stopped receives all grants of that time at once. If their calls started
together, they would exceed the limit for which the broker counted them. This process therefore has
a token bucket of its own for the endpoint, by its own clock: a grant that comes a little early
waits for its token, and a grant that would have to wait longer is given back. The module does no
I/O.
"""

from __future__ import annotations

from ...domain.service import MICRO

_SECOND = 10**9
_LEAST_WAIT_NS = 5_000_000


class ClientRateLimit:
    """The token bucket of one endpoint in one process."""

    __slots__ = ("_full_at", "_quota")

    def __init__(self) -> None:
        self._full_at = 0  # when the bucket is full again, if nothing starts until then
        self._quota = (0, 0)  # rate and burst of the last call

    def start_at(self, now: int, rate_micro: int, burst_micro: int) -> int:
        """Takes a token for one call.

        Args:
            now: this process's clock, in ns.
            rate_micro: tokens per second, in millionths; 0 for no limit.
            burst_micro: the most tokens that the bucket holds, in millionths.

        Returns:
            When the call may start, in ns. -1 if that is more than the time of one token away (and
            more than 5 ms): no token was taken, and the grant must be given back.
        """
        if not rate_micro:
            return now
        gap = -(-_SECOND * MICRO // rate_micro)
        refill = (burst_micro - MICRO) * _SECOND // rate_micro  # ns from one token to a full bucket
        wait_max = max(gap, _LEAST_WAIT_NS)
        full_at = max(self._full_at, now)
        if self._quota != (rate_micro, burst_micro):
            # Under a lower rate before, the time of a full bucket may be so far in the future that
            # every start would be refused. Under the new quota this call waits like any other.
            self._quota = (rate_micro, burst_micro)
            full_at = min(full_at, now + refill + wait_max)
        start = max(now, full_at - refill)
        if start - now > wait_max:
            return -1
        self._full_at = full_at + gap
        return start
