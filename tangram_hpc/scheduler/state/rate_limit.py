"""Pure. An endpoint's quota: calls at once, a token bucket, and a reduction after the endpoint
refused calls.

The level of the bucket is kept in `MICRO * 10**9` parts of a token. One nanosecond then refills
exactly `rate_micro` parts, and nothing is ever rounded. A call takes one token, and is not granted
without one. One factor reduces both rate and concurrency: an endpoint that refuses a call reduces
it at once, though only once for all calls that were under way at that time, and each later success
raises it by a step, up to the declared quota (additive increase, multiplicative decrease).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...domain.service import MICRO, THROTTLED, EndpointSpec

_SECOND = 10**9
TOKEN = MICRO * _SECOND
UNLIMITED = 1 << 30
WHOLE = 1 << 10  # the share of an endpoint that refuses no calls
LEAST = WHOLE >> 6
STEP = WHOLE >> 5  # the increase of the share by each success


@dataclass(slots=True)
class EndpointEntry:
    """An endpoint, its calls that run, and its token bucket.

    Attributes:
        spec: its declaration.
        at: the time to which `level` refers, epoch ns.
        level: the level of its token bucket, in 1/TOKEN of a token.
        busy: how many calls run.
        share: which part of the quota is used, in 1/WHOLE; reduced after the endpoint refused
            calls.
        cut_at: when the share was last cut, epoch ns. Calls that were granted by then do not change
            it.
        closed_until: until when nothing is granted, epoch ns.
        calls: how many calls have ended.
        cost_micro: what these cost, in millionths.
    """

    spec: EndpointSpec
    at: int
    level: int
    busy: int = 0
    share: int = WHOLE
    cut_at: int = -1
    closed_until: int = 0
    calls: int = 0
    cost_micro: int = 0

    @property
    def concurrency(self) -> int:
        """How many calls may run at once, with the present share."""
        return max(1, self.spec.concurrency * self.share // WHOLE)

    @property
    def rate_micro(self) -> int:
        """The refill of the bucket with the present share, in millionths of a token a second; 0 for
        no limit.
        """
        return -(-self.spec.rate_micro * self.share // WHOLE)

    @property
    def least_ns(self) -> int:
        """For how long each call would run if its rate and its concurrency were both used up, in
        ns; 0 if there is no rate.
        """
        rate = self.spec.rate_micro
        return self.spec.concurrency * TOKEN // rate if rate else 0

    @property
    def free(self) -> int:
        """How many calls may start beside those that run."""
        return self.concurrency - self.busy

    def level_at(self, now: int) -> int:
        """The bucket's level, refilled up to `now`."""
        if now <= self.at or not self.spec.rate_micro:
            return self.level
        return min(self.spec.burst_micro * _SECOND, self.level + (now - self.at) * self.rate_micro)

    def tokens(self, now: int) -> int:
        """How many whole tokens may be taken now."""
        if now < self.closed_until:
            return 0
        return self.level_at(now) // TOKEN if self.spec.rate_micro else UNLIMITED

    def next_token_at(self, now: int) -> int:
        """When the next whole token will be there, epoch ns; `now` if there is one."""
        now = max(now, self.closed_until)
        missing = TOKEN - self.level_at(now)
        if missing <= 0 or not self.spec.rate_micro:
            return now
        return max(now, self.at) + -(-missing // self.rate_micro)

    def draw(self, now: int) -> None:
        """Counts a call that starts, and takes its token."""
        assert self.free > 0, f"endpoint {self.spec.name}: more calls at once than its quota"
        assert self.tokens(now) >= 1, f"endpoint {self.spec.name}: no token at {now}"
        self.busy += 1
        if self.spec.rate_micro:
            self._settle(now)
            self.level -= TOKEN

    def done(self) -> None:
        """Counts a call as no longer running."""
        self.busy -= 1

    def ended(self, granted_at: int, now: int, good: bool, cost_micro: int) -> None:
        """Counts the end of a call. With `good` the endpoint has served the call, and the share may
        grow.
        """
        self.calls += 1
        self.cost_micro += cost_micro
        if good and self.share < WHOLE and granted_at > self.cut_at:
            self._settle(now)
            self.share = min(WHOLE, self.share + STEP)

    def pushed_back(self, granted_at: int, now: int, until: int, how: int) -> None:
        """Closes the endpoint for a while because it did not serve a call.

        The share is cut if that call began after the last cut. After THROTTLED the bucket begins
        empty, since the bucket of the endpoint's owner is empty then.

        Args:
            granted_at: when the call was granted, epoch ns.
            now: epoch ns.
            until: when the endpoint may be called again, epoch ns.
            how: how the endpoint refused the call (`Outcome.pushed`).
        """
        self._settle(now)
        self.closed_until = max(self.closed_until, until)
        if granted_at > self.cut_at:
            rest = self.share // 2 if how == THROTTLED else self.share * 7 // 8
            self.share, self.cut_at = max(LEAST, rest), now
            if how == THROTTLED:
                self.level = 0
        self.at = max(self.at, self.closed_until)

    def clock_set(self, now: int) -> None:
        """Goes on at `now`, which may be earlier than the last call, since the wall clock of a
        broker that was started again may have been set back. Without this, nothing would refill the
        bucket before the earlier time is reached again.
        """
        self.at = min(self.at, max(now, self.closed_until))

    def _settle(self, now: int) -> None:
        self.level, self.at = self.level_at(now), max(now, self.at)


def full(spec: EndpointSpec, now: int) -> EndpointEntry:
    """An endpoint as it is declared: without calls and with a full bucket."""
    return EndpointEntry(spec, now, spec.burst_micro * _SECOND)


def declared_again(old: EndpointEntry, spec: EndpointSpec, now: int) -> EndpointEntry:
    """The same endpoint, maybe with another quota. The change does not fill its bucket, and a
    closed endpoint stays closed. Calls that run go on: a broker that was started again declares the
    endpoints of its config file, while clients still hold grants of them.
    """
    if spec == old.spec:
        return old
    level = old.level_at(now) if old.spec.rate_micro and spec.rate_micro else 0
    return EndpointEntry(spec, max(now, old.at), min(level, spec.burst_micro * _SECOND), old.busy,
                         closed_until=old.closed_until, calls=old.calls, cost_micro=old.cost_micro)
