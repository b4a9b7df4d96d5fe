"""Pure. What is believed of an action's run time before and while it runs.

Law: an action's own profile is believed where it has one; else what was learned from leases of its
class (key and name) that ended: a histogram of work, and the serial fraction that explains them
best. A class is shrunk to its parent (its key, one degree or several), the parent to everything,
everything to a second. A lease that did not end by itself (timeout, kill, lost node) says only that
it is longer. Fed by the ledger's events alone, so a replay learns the same. Whole numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..domain.action import Action
from .speed import ONE, lg, octaves, speed

# the grid of serial fractions, 1/1000; classes that offer degrees are at first believed to be PRIOR
SERIALS = (1, 10, 25, 50, 75, 100, 150, 200, 300, 450, 650, 1000)
PRIOR = 100
UNKNOWN_NS = 1_000_000_000  # the work of a thing nobody has ever seen
SHRINK = 3  # a parent's opinion weighs as much as so many samples
# A class departs from PRIOR after so many samples, and then only to the nearest fraction that is
# less than 8 bits + n/64 bits worse than the best; and only while RIPE have ended for each that
# runs, since those who still run are the long ones.
MIN_SERIAL, DOUBT, DOUBT_EACH, RIPE = 24, 8 << 10, 16, 4
_NEAREST = sorted(range(len(SERIALS)), key=lambda i: abs(i - SERIALS.index(PRIOR)))
_BUCKETS = 66 << 3

Spans = Sequence[tuple[int, int]]  # (units, ns), in order


def work_of(spans: Spans, serial: int) -> int:
    """The one-unit work done in these spans."""
    if len(spans) == 1:  # nearly all are
        units, ns = spans[0]
        return speed(serial, units) * ns >> ONE
    return sum([speed(serial, units) * ns for units, ns in spans]) >> ONE


class Sizes:
    """A histogram of work with the sum of each bucket; its suffix sums are renewed when it has
    grown by 1/16. Adding costs O(1) amortised over growth, asking O(1)."""

    __slots__ = ("_count", "_due", "_tail", "_total", "n", "version")

    def __init__(self) -> None:
        self._count, self._total = [0] * _BUCKETS, [0] * _BUCKETS
        self.n = self._due = self.version = 0
        self._tail = [(0, 0)] * (_BUCKETS + 1)

    def add(self, work_ns: int, bucket: int) -> None:
        """One more sample, in its bucket."""
        self._count[bucket] += 1
        self._total[bucket] += work_ns
        self.n += 1
        if self.n >= self._due:
            self._due = self.n + 1 + self.n // 16
            self.version += 1
            n = total = 0
            tail = [(0, 0)]
            for count, sum_ in zip(reversed(self._count), reversed(self._total), strict=True):
                n, total = n + count, total + sum_
                tail.append((n, total))
            self._tail = tail[::-1]

    def beyond(self, bucket: int) -> tuple[int, int]:
        """How many lie above this bucket (-1: all), and their sum."""
        return self._tail[bucket + 1]


class Serial:
    """Maximum likelihood of the serial fraction over a grid, the work log-normal with free mean and
    spread: sum log speed(f, last units) - sum log w_f - n log sd(log w_f)."""

    __slots__ = ("_first", "_logw", "_logw2", "best", "n")

    def __init__(self) -> None:
        self.n, self.best = 0, PRIOR
        self._first, self._logw, self._logw2 = ([0] * len(SERIALS) for _ in range(3))

    def add(self, spans: Spans, running: int) -> None:
        """One that ended by itself; `running` of its class still run. O(grid x spans)."""
        last = [units for units, _ in spans if units][-1]
        self.n += 1
        for i, f in enumerate(SERIALS):
            w = lg(max(1, work_of(spans, f)))
            self._first[i] += lg(speed(f, last)) - w
            self._logw[i] += w
            self._logw2[i] += w * w
        if self.n >= MIN_SERIAL and not self.n & 7 and self.n >= RIPE * running:
            n, likely = self.n, []
            for i in range(len(SERIALS)):
                spread = max(1, (self._logw2[i] * n - self._logw[i] ** 2) // (n * n))
                likely.append(self._first[i] - n * (lg(spread) - 20 * 1024) // 2)
            enough = max(likely) - (DOUBT + n * DOUBT_EACH)
            self.best = next(SERIALS[i] for i in _NEAREST if likely[i] >= enough)


class Estimator:
    """Classes of actions and what was learned of each. Memory: O(classes)."""

    def __init__(self) -> None:
        self.used = {"profile": 0, "learned": 0}  # leases begun, by what was believed of them
        self._sizes: dict[tuple[str, str], Sizes] = {}
        self._serials: dict[tuple[str, str], Serial] = {}
        self._parents: dict[tuple[str, bool], Sizes] = {}
        self._any = Sizes()
        self._memo: dict[tuple[str, str, bool, int], tuple[int, int]] = {}
        self._running: dict[tuple[str, str], int] = {}

    def believed(self, action: Action) -> tuple[int, int]:
        """Serial fraction (1/1000) and one-unit work (ns) before it has run. O(1)."""
        profile = action.profile
        if profile is not None:
            return self.serial(action), profile.work_ns
        return self.serial(action), self.mean(action.key, action.name, action.degrees)

    def seen(self, action: Action) -> bool:
        """Whether any of its class has ended."""
        return self.seen_class(action.key, action.name)

    def seen_class(self, key: str, name: str) -> bool:
        """Whether any of a class has ended."""
        return (key, name) in self._sizes

    def serial(self, action: Action) -> int:
        """Its serial fraction, in 1/1000."""
        if action.degrees[-1] <= 1:
            return 0
        if action.profile is not None:
            return action.profile.serial_ppm // 1000
        learned = self._serials.get((action.key, action.name))
        return learned.best if learned else PRIOR

    def remaining(self, action: Action, done_ns: int) -> int:
        """One-unit work expected to be left after so much was done; at least 1."""
        if action.profile is not None:
            return max(1, action.profile.work_ns - done_ns)
        return max(1, self.mean(action.key, action.name, action.degrees, done_ns) - done_ns)

    def mean(self, key: str, name: str, degrees: tuple[int, ...], done_ns: int = 0) -> int:
        """Mean work in the class of those larger than `done_ns`, shrunk. O(1)."""
        bucket = octaves(done_ns) if done_ns > 0 else -1
        several = degrees[-1] > degrees[0]
        own, parent = self._sizes.get((key, name)), self._parents.get((key, several))
        version = (self._any.version + (parent.version if parent is not None else 0)
                   + (own.version if own is not None else 0))
        memo = self._memo.get((key, name, several, bucket))
        if memo is not None and memo[0] == version:
            return memo[1]
        levels = [s for s in (self._any, parent, own) if s is not None]
        n = SHRINK
        total = SHRINK * max(UNKNOWN_NS, 2 * done_ns if bucket >= 0 else 0)
        for sizes in levels:
            k, more = sizes.beyond(bucket)
            n, total = SHRINK + k, SHRINK * total // n + more
        self._memo[key, name, several, bucket] = (version, total // n)
        return total // n

    # ---- what the scheduler tells ------------------------------------------------------------

    def began(self, action: Action) -> None:
        """A lease of this action was granted."""
        of = (action.key, action.name)
        self._running[of] = self._running.get(of, 0) + 1
        self.used["learned" if action.profile is None else "profile"] += 1

    def ended(self, action: Action, spans: Spans, whole: bool) -> None:
        """A lease of it ended; `whole`: by itself. O(grid x spans)."""
        of, several = (action.key, action.name), action.degrees[-1] > action.degrees[0]
        self._running[of] -= 1
        if not any(units and ns for units, ns in spans):
            return
        work = max(1, work_of(spans, self.serial(action)))
        if not whole:
            work = max(work, self.mean(*of, action.degrees, work))
        elif action.degrees[-1] > 1:
            self._serials.setdefault(of, Serial()).add(spans, self._running[of])
        parent, own = self._parents.get((action.key, several)), self._sizes.get(of)
        if parent is None:
            parent = self._parents[action.key, several] = Sizes()
        if own is None:
            own = self._sizes[of] = Sizes()
        bucket = octaves(work)
        for sizes in (self._any, parent, own):
            sizes.add(work, bucket)
