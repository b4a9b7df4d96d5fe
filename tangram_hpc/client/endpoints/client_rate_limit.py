"""Pure. When a call that was granted may really start, by its client's own clock.

Law: a process that stood still finds the grants of that time all at once; started together they
would break the very limit that they were counted against. So starts keep the endpoint's bucket here
too: a grant that comes a little early for it waits, one that would wait longer is not to be used.
"""

from __future__ import annotations

from ...domain.service import MICRO

_SECOND = 10**9
_LEAST_WAIT_NS = 5_000_000


class Pace:
    """The starts of one endpoint in one process, as one bucket."""

    __slots__ = ("_full_at",)

    def __init__(self) -> None:
        self._full_at = 0  # when the bucket is full again, if nothing starts until then

    def start_at(self, now: int, rate_micro: int, burst_micro: int) -> int:
        """When this call may start, its token taken; -1 if that is more than one token's time away:
        then it took none, and the grant is to be given back. `rate_micro` 0: now."""
        if not rate_micro:
            return now
        gap = -(-_SECOND * MICRO // rate_micro)
        most = (burst_micro + MICRO) * _SECOND // rate_micro + gap  # what another rate has left
        full_at = min(max(self._full_at, now), now + most)
        start = max(now, full_at - (burst_micro - MICRO) * _SECOND // rate_micro)
        if start - now > max(gap, _LEAST_WAIT_NS):
            return -1
        self._full_at = full_at + gap
        return start
