"""Pure. An endpoint's quota: calls at once, a token bucket, and how much of both is used after the
endpoint pushed back.

Law: a level is `MICRO * 10**9` parts a token, so one nanosecond refills exactly `rate_micro` parts
and nothing is ever rounded; a start takes one token and may not take what is not there. One share
rules rate and concurrency: what pushes back cuts it at once, once for all calls that were under way
by then, each later success gives a step back, up to what is declared.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...domain.service import MICRO, THROTTLED, EndpointSpec

_SECOND = 10**9
TOKEN = MICRO * _SECOND
UNLIMITED = 1 << 30
WHOLE = 1 << 10  # the share of an endpoint that does not push back
LEAST = WHOLE >> 6
STEP = WHOLE >> 5  # what a success gives back


@dataclass(slots=True)
class EndpointEntry:
    """An endpoint: who is inside, and the bucket's level as of `at`."""

    spec: EndpointSpec
    at: int
    level: int
    busy: int = 0
    share: int = WHOLE
    cut_at: int = -1  # what was granted by then says nothing about the share
    closed_until: int = 0
    calls: int = 0  # that ended
    cost_micro: int = 0  # of those

    @property
    def concurrency(self) -> int:
        """Calls at once, as things are."""
        return max(1, self.spec.concurrency * self.share // WHOLE)

    @property
    def rate_micro(self) -> int:
        """Millionths of a token a second, as things are; 0 for no limit."""
        return -(-self.spec.rate_micro * self.share // WHOLE)

    @property
    def free(self) -> int:
        """Calls that may start beside those that run."""
        return self.concurrency - self.busy

    def level_at(self, now: int) -> int:
        """The bucket's level, refilled up to `now`."""
        if now <= self.at or not self.spec.rate_micro:
            return self.level
        return min(self.spec.burst_micro * _SECOND, self.level + (now - self.at) * self.rate_micro)

    def tokens(self, now: int) -> int:
        """Whole tokens that may be taken now."""
        if now < self.closed_until:
            return 0
        return self.level_at(now) // TOKEN if self.spec.rate_micro else UNLIMITED

    def next_token_at(self, now: int) -> int:
        """When a whole token is there: `now` if it is."""
        now = max(now, self.closed_until)
        missing = TOKEN - self.level_at(now)
        if missing <= 0 or not self.spec.rate_micro:
            return now
        return max(now, self.at) + -(-missing // self.rate_micro)

    def draw(self, now: int) -> None:
        """One call starts."""
        assert self.free > 0, f"endpoint {self.spec.name}: too many at once"
        assert self.tokens(now) >= 1, f"endpoint {self.spec.name}: no token at {now}"
        self.busy += 1
        if self.spec.rate_micro:
            self._settle(now)
            self.level -= TOKEN

    def done(self) -> None:
        """One call left."""
        self.busy -= 1

    def ended(self, granted_at: int, now: int, good: bool, cost_micro: int) -> None:
        """One call's outcome is known; with `good` the endpoint has served it."""
        self.calls += 1
        self.cost_micro += cost_micro
        if good and self.share < WHOLE and granted_at > self.cut_at:
            self._settle(now)
            self.share = min(WHOLE, self.share + STEP)

    def pushed_back(self, granted_at: int, now: int, until: int, how: int) -> None:
        """A call that was granted then was not served: closed until a time, and cut if that call
        began after the last cut. After THROTTLED the bucket begins empty, as its owner's is."""
        self._settle(now)
        self.closed_until = max(self.closed_until, until)
        if granted_at > self.cut_at:
            rest = self.share // 2 if how == THROTTLED else self.share * 7 // 8
            self.share, self.cut_at = max(LEAST, rest), now
            if how == THROTTLED:
                self.level = 0
        self.at = max(self.at, self.closed_until)

    def _settle(self, now: int) -> None:
        self.level, self.at = self.level_at(now), max(now, self.at)


def full(spec: EndpointSpec, now: int) -> EndpointEntry:
    """The endpoint as it is declared: nobody inside, the bucket full."""
    return EndpointEntry(spec, now, spec.burst_micro * _SECOND)


def declared_again(old: EndpointEntry, spec: EndpointSpec, now: int) -> EndpointEntry:
    """The same endpoint under another quota: it does not get a fuller bucket by that, and stays
    closed for as long as it was."""
    level = old.level_at(now) if old.spec.rate_micro and spec.rate_micro else 0
    return EndpointEntry(spec, max(now, old.at), min(level, spec.burst_micro * _SECOND),
                         closed_until=old.closed_until, calls=old.calls, cost_micro=old.cost_micro)
