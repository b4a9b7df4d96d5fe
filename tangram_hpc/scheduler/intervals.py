"""Pure. States within which bounds a start or an end lies, at the level `LEVEL`.

Run times of one class are spread widely, so a single expected time says little. The works that an
action may have are those of its class that have ended, weighted by the Kaplan-Meier estimator
(JASA 53, 1958), since the actions that still run take at least as long as they have taken: short
ones end first. `SHRINK` further works, a quarter, once and four times the estimated mean, stand for
what a few samples do not show. Beyond the longest work known, the chance to take longer falls as
one over the work.

The end of a running action lies between two quantiles of its remaining work, if it keeps its size.
For the start of a waiting action the scheduler is run ahead on `FUTURES` copies, with works that
are drawn for each lease. The interval from the least to the greatest of n equally likely results
holds a further one with the chance (n - 1) / (n + 1).

The expected time is made of mean works, and few long works can take it out of these bounds. Then
the interval is widened to it, which can only raise the chance.

Invariants: the original ledger is never changed; the draws are seeded by the action and the time,
so that the same question has the same answer; all futures of a question together handle at most
`STEPS_MAX` events; and nothing is stated that rests on a class of which no action has ended.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass

from ..domain.action import Action
from ..domain.states import LeaseState
from .forecast import (
    OVERDUE_NS,
    STEPS_MAX,
    Forecast,
    ForecastRun,
    at_most_its_limit,
    copied,
    expected_end,
    source,
)
from .scheduler import Scheduler
from .state.estimator import SHRINK, Sizes, counts_while_running, work_of
from .state.ledger import LeaseEntry, Ledger
from .state.speed import most_of, octaves, run_ns

FUTURES = 9
LEVEL = (FUTURES - 1) / (FUTURES + 1)
_WIDE = 4  # the assumed works are the mean divided by this, the mean, and this times the mean

_MASK = (1 << 64) - 1

Interval = tuple[int, int]  # two times in epoch ns


@dataclass(frozen=True, slots=True)
class StartInterval:
    """Bounds of the start and the end of a waiting action.

    Attributes:
        start: between which times it starts; None if that is not known.
        end: between which times it ends; None if that is not known.
        why: why neither is known; empty if the start is.
    """

    start: Interval | None = None
    end: Interval | None = None
    why: str = ""


class Draws:
    """Pseudo-random numbers (SplitMix64, OOPSLA 2014), the same on every machine for one seed."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def uniform(self) -> float:
        """Returns a number from 0 to less than 1."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = (self._state ^ self._state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        return ((mixed ^ mixed >> 31) >> 11) / (1 << 53)

    def gamma(self, shape: float) -> float:
        """Returns a number above 0 whose distribution is about gamma with this shape and scale 1:
        the cube of a normal number (Wilson and Hilferty, PNAS 17, 1931).
        """
        normal = sum([self.uniform() for _ in range(12)]) - 6
        root = 1 - 1 / (9 * shape) + normal / (3 * shape ** 0.5)
        return float(shape * max(0.01, root) ** 3)


class WorkCurve:
    """The share of a class's actions whose work is larger than an amount, as a step function.

    Attributes:
        works: the amounts at which the share falls, ascending, ns on one unit.
        shares: the share that is left beyond each of them.
    """

    def __init__(self, sizes: Sizes, mean: int, running: Counter[int],
                 draws: Draws | None = None) -> None:
        """Computes the curve in O(buckets log buckets).

        Args:
            sizes: the works of those that have ended.
            mean: the estimated mean work.
            running: how many still run, by the bucket of the work that they have done.
            draws: draws the weights of the samples, so that the curve is one of those that they
                allow (the Bayesian bootstrap, Annals of Statistics 9, 1981); None: all are equal.
        """
        ended = [(work, float(count), False) for work, count in sizes.means()]
        assumed = [mean // _WIDE, mean, mean * _WIDE]
        ended += [(work, SHRINK / len(assumed), True) for work in assumed]
        if draws is not None:
            ended = [(work, draws.gamma(count), guess) for work, count, guess in ended]
        steps = [(work, count, 0.0, guess) for work, count, guess in ended]
        steps += [(most_of(bucket), 0.0, float(count), False) for bucket, count in running.items()]
        at_risk, lost = sum(count + left for _, count, left, _ in steps), 0.0
        share = 1.0
        self.works: list[int] = []
        self.shares: list[float] = []
        for work, count, left, guess in sorted(steps):
            if count:
                # an assumed work does not stand for all that have been lost from sight before it
                share *= max(0.0, 1 - count / (at_risk + lost * guess))
                self.works.append(work)
                self.shares.append(share)
            at_risk -= count + left
            lost = lost + left if not count or guess else 0.0

    def quantile(self, chance: float, done: int) -> int:
        """Returns the work that an action exceeds with the chance `1 - chance`, if it exceeds
        `done`.
        """
        at = bisect_right(self.works, done)
        wanted = (1 - chance) * (self.shares[at - 1] if at else 1.0)
        found = bisect_left(self.shares, -wanted, lo=at, key=lambda share: -share)
        if found < len(self.works):
            return self.works[found]
        if at == len(self.works) or not self.shares[-1]:  # longer than all that is known
            return round(done / (1 - chance))
        return round(self.works[-1] * self.shares[-1] / wanted)


class LikelyWorks:
    """The curves of all classes at one time. Making it costs O(leases), and each curve is computed
    when it is first asked for.
    """

    def __init__(self, ledger: Ledger, now: int) -> None:
        self._ledger = ledger
        self._draws: Draws | None = None
        self._running: dict[int, Counter[int]] = {}  # by the identity of a class's histogram
        self._curves: dict[tuple[int, bool], WorkCurve] = {}  # a class may have many names
        for lease in ledger.leases.values():
            if lease.state is LeaseState.RELEASING or not lease.begun:
                continue  # the action has ended, and may be forgotten; or it has not begun
            action = ledger.actions[lease.action].action
            sizes = ledger.estimator.samples(action)
            if sizes is not None and counts_while_running(action):
                done = work_of(lease.spans(now), ledger.estimator.serial(action))
                self._running.setdefault(id(sizes), Counter())[octaves(done)] += 1

    def drawn(self, draws: Draws) -> LikelyWorks:
        """Returns curves that are drawn from those which the samples allow."""
        found = copy.copy(self)
        found._draws, found._curves = draws, {}
        return found

    def quantile(self, action: Action, chance: float, done: int) -> int | None:
        """Returns the work that an action without a profile exceeds with the chance `1 - chance`,
        if it exceeds `done`; None if no action of its class has ended.
        """
        estimator = self._ledger.estimator
        sizes = estimator.samples(action)
        if sizes is None:
            return None
        of = id(sizes), action.degrees[-1] > action.degrees[0]
        curve = self._curves.get(of)
        if curve is None:
            mean = estimator.mean(action.key, action.name, action.degrees)
            running = self._running.get(id(sizes), Counter())
            curve = self._curves[of] = WorkCurve(sizes, mean, running, self._draws)
        return curve.quantile(chance, done)


def end_interval(ledger: Ledger, lease: LeaseEntry, now: int,
                 likely: LikelyWorks | None = None) -> Interval | None:
    """Between which times a running lease ends if it keeps its size; None if that is not known. It
    is a point where a profile states the run time.
    """
    action = ledger.actions[lease.action].action
    end = expected_end(ledger, lease, now)
    if end is None:
        return None
    if action.profile is not None:
        return end, end
    likely = likely or LikelyWorks(ledger, now)
    low, high = (_end(ledger, lease, now, likely, chance, None)[0]
                 for chance in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return min(low, end), max(high, end)


def _end(ledger: Ledger, lease: LeaseEntry, now: int, likely: LikelyWorks, chance: float,
         work: int | None) -> tuple[int, int]:
    """When a lease ends, and its whole work, which is the quantile at `chance` unless it is given.
    """
    action = ledger.actions[lease.action].action
    serial = ledger.estimator.serial(action)
    done = work_of(lease.spans(now), serial)
    if work is None:
        found = likely.quantile(action, chance, done)
        assert found is not None, "the caller has seen that the class is known"
        work = found
    left = run_ns(max(0, work - done), serial, lease.units)
    end = max(now, lease.granted_at + lease.restore_ns) + max(OVERDUE_NS, left)
    return at_most_its_limit(action, lease, now, end), work


def start_interval(scheduler: Scheduler, action: int, now: int, told: Forecast) -> StartInterval:
    """Between which times a pending action starts and ends.

    Args:
        scheduler: the scheduler; it is not changed.
        action: the number of the action.
        now: the present time in epoch ns.
        told: the forecast of its start.
    """
    if told.at is None:
        return StartInterval(why=told.why)
    if told.rests_on["unknown"] and told.at > now:
        return StartInterval(why="it rests on run times of which nothing is known")
    if FUTURES * told.steps > STEPS_MAX:
        return StartInterval(why="it lies too many events ahead for an interval")
    known = source(scheduler.ledger, scheduler.ledger.actions[action].action) != "unknown"
    likely = LikelyWorks(scheduler.ledger, now)
    draws = Draws(action ^ now)
    starts, ends, left = [], [], STEPS_MAX
    for _ in range(FUTURES):
        future = _Future(copied(scheduler, learns=False), action, now, likely.drawn(draws), draws,
                         left)
        found = future.run()
        left -= found.steps
        if left < 0:
            return StartInterval(why="it lies too many events ahead for an interval")
        if found.at is None:
            return StartInterval(why="in some of its likely futures the start is not known")
        starts.append(found.at)
        ends.append(future.end or found.at)
    starts.append(told.at)  # it may be outside, as means are above most works of a class
    if told.end is not None:
        ends.append(told.end)
    return StartInterval((min(starts), max(starts)), (min(ends), max(ends)) if known else None)


class _Future(ForecastRun):
    """One run of a copied scheduler with works that are drawn.

    Attributes:
        end: when the action ends, epoch ns; 0 if it has not started or its class is not known.
    """

    def __init__(self, scheduler: Scheduler, action: int, now: int, likely: LikelyWorks,
                 draws: Draws, steps: int) -> None:
        super().__init__(scheduler, action, now, steps)
        self._likely, self._draws = likely, draws
        self._works: dict[int, int] = {}  # by lease
        self.end = 0

    def _end_of_lease(self, lease: LeaseEntry) -> int | None:
        """When a lease ends, with a work that is drawn when the lease is first seen."""
        kind = source(self._ledger, self._ledger.actions[lease.action].action)
        if kind != "learned" or not lease.units:
            end = super()._end_of_lease(lease)
        else:
            end, self._works[lease.lease] = _end(
                self._ledger, lease, self._now, self._likely, self._draws.uniform(),
                self._works.get(lease.lease))
        if lease.action == self._action:
            self.end = end or 0
        return end
