"""Pure. An endpoint's quota: calls at once, and a token bucket counted in whole numbers.

Law: a level is `MICRO * 10**9` parts a token, so one nanosecond refills exactly `rate_micro` parts
and nothing is ever rounded; a start takes one token and may not take what is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..domain.service import MICRO, EndpointSpec

_SECOND = 10**9
TOKEN = MICRO * _SECOND
UNLIMITED = 1 << 30


@dataclass(slots=True)
class EndpointEntry:
    """An endpoint: who is inside, and the bucket's level as of `at`."""

    spec: EndpointSpec
    at: int
    level: int
    busy: int = 0

    @property
    def free(self) -> int:
        """Calls that may start beside those that run."""
        return self.spec.concurrency - self.busy

    def level_at(self, now: int) -> int:
        """The bucket's level, refilled up to `now`."""
        spec = self.spec
        if now <= self.at or not spec.rate_micro:
            return self.level
        return min(spec.burst_micro * _SECOND, self.level + (now - self.at) * spec.rate_micro)

    def tokens(self, now: int) -> int:
        """Whole tokens that may be taken now."""
        return self.level_at(now) // TOKEN if self.spec.rate_micro else UNLIMITED

    def next_token_at(self, now: int) -> int:
        """When a whole token is there: `now` if it is."""
        missing = TOKEN - self.level_at(now)
        if missing <= 0 or not self.spec.rate_micro:
            return now
        return max(now, self.at) + -(-missing // self.spec.rate_micro)

    def draw(self, now: int) -> None:
        """One call starts."""
        assert self.free > 0, f"endpoint {self.spec.name}: too many at once"
        assert self.tokens(now) >= 1, f"endpoint {self.spec.name}: no token at {now}"
        self.busy += 1
        if self.spec.rate_micro:
            self.level, self.at = self.level_at(now) - TOKEN, max(now, self.at)

    def done(self) -> None:
        """One call ended."""
        self.busy -= 1


def full(spec: EndpointSpec, now: int) -> EndpointEntry:
    """The endpoint as it is declared: nobody inside, the bucket full."""
    return EndpointEntry(spec, now, spec.burst_micro * _SECOND)
