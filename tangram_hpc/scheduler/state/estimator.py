"""Pure. Estimates of an action's run time, before it runs and while it runs.

An action's own profile counts where it has one. Otherwise the estimate comes from leases of its
class (key and name) that have ended: a histogram of work, and the serial fraction that explains
their CPU time and their run times best. The mean of a class is shrunk towards that of its parent
(all actions of the same key, with one degree or with several), the parent's mean towards that of
all actions, and the latter towards one second. A lease that did not end by itself (timeout, kill,
lost node) says only that the action takes longer. So do the leases that still run: short actions
end first, and a mean of those that have ended would be too small for long. The Kaplan-Meier
estimator (JASA 53, 1958) counts both.

Invariants: only the ledger's events change it, so a replay learns the same; all numbers are whole.
All classes with running actions are kept, and at most CLASSES_MAX others. Names that differ in
numbers only become one class, with all that was learned of them, once there are more than VARIANTS
of them. If there are too many classes, the one that was used longest ago is forgotten: its samples
stay in its parent, which is used instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from ...domain.action import Action, Kind
from ...domain.class_names import template
from ...domain.outcome import Outcome
from .speed import ONE, lg, octaves, speed

# The grid of serial fractions, 1/1000. Classes that offer degrees begin with PRIOR.
SERIALS = (1, 10, 25, 50, 75, 100, 150, 200, 300, 450, 650, 1000)
PRIOR = 100
UNKNOWN_NS = 1_000_000_000  # the work of an action while nothing has ended yet
SHRINK = 3  # the weight of a parent's mean, in samples
# The sums of CPU time are halved whenever they have 2 * CPU_SAMPLES samples.
CPU_SAMPLES = 64
# A lease whose spans are longer than its execution by more than one part in IDLE_PART is not used
# for that, because set-up and resizes would count as serial work.
IDLE_PART = 20
# CPU time is not used either where it tells little of the serial fraction: where a program that is
# all parallel would have done less than TELLING_NUM/TELLING_DEN times the work of one that is all
# serial. In a long run on one unit, a short wait for a disk would look like serial work.
TELLING_NUM, TELLING_DEN = 5, 4
# Run times move a class after MIN_SERIAL samples, from what its CPU time says (from PRIOR if that
# is not known) to the nearest fraction that is less than 8 bits + n/64 bits worse than the best.
# They do so only while at least RIPE leases have ended for each lease that runs, because the leases
# that still run are the long ones.
MIN_SERIAL, DOUBT, DOUBT_EACH, RIPE = 24, 8 << 10, 16, 4
# Running leases count while fewer than ENOUGH leases have ended for each of them; at most LOOKED of
# them are looked at, evenly chosen. A running lease that has done more work than any ended one is
# assumed to have left the total work of ended and running leases divided by the number of ended
# ones, as if works were exponential, but at most FURTHER times the work that it has done.
ENOUGH, LOOKED, FURTHER = 16, 64, 4
WHOLE = 10  # samples are counted in 1/2**WHOLE
_PRIOR_AT = SERIALS.index(PRIOR)
CLASSES_MAX = 1024  # classes kept without a running action
VARIANTS = 16  # names of one template that have classes of their own
_MEMO_MAX = 4096  # means that are remembered

Spans = Sequence[tuple[int, int]]  # (units, ns), in order


class RunningLease(Protocol):
    """What the estimator needs of a lease that runs (`LeaseEntry` of the ledger).

    Attributes:
        lease: its number.
    """

    lease: int

    def spans(self, until: int) -> list[tuple[int, int]]:
        """The (units, ns) of each size that it had up to a time."""


Done = Callable[[Action, RunningLease], int]  # the work that a running lease has done


def counts_while_running(action: Action) -> bool:
    """Whether an action that runs tells something of its class: not where a profile states the run
    time, not of calls, as how they share a batch is known only at its end, not of slices of
    background work, and not where no unit is held.
    """
    return (action.profile is None and action.key == "cpu" and action.degrees[-1] > 0
            and action.kind is not Kind.BACKGROUND)


def work_of(spans: Spans, serial: int) -> int:
    """The work that was done in these spans, in ns on one unit."""
    if len(spans) == 1:  # true of nearly all leases
        units, ns = spans[0]
        return speed(serial, units) * ns >> ONE
    return sum([speed(serial, units) * ns for units, ns in spans]) >> ONE


class Sizes:
    """A histogram of work, with the sum of each bucket, and the leases that still run.

    Its suffix sums are renewed when it has grown by 1/16. Memory is O(buckets in use + running);
    adding a sample costs O(1) amortised over growth, asking O(log buckets).

    Attributes:
        n: how many samples were added.
        version: how often the suffix sums were renewed.
        running: the leases whose work so far counts, by number, each with its action.
    """

    __slots__ = ("_cells", "_due", "_edges", "_tail", "n", "running", "version")

    def __init__(self) -> None:
        self._cells: dict[int, tuple[int, int]] = {}  # count and sum by bucket
        self.n = self._due = self.version = 0
        self.running: dict[int, tuple[Action, RunningLease]] = {}
        self._edges: list[int] = []  # the buckets in use when the sums were renewed, in order
        self._tail = [(0, 0)]  # count, in 1/2**WHOLE, and sum from each of these buckets on

    def add(self, work_ns: int, bucket: int) -> bool:
        """Adds a sample to its bucket. Returns whether the suffix sums are to be renewed now."""
        count, total = self._cells.get(bucket, (0, 0))
        self._cells[bucket] = count + 1, total + work_ns
        self.n += 1
        return self.n >= self._due

    def renew(self, done: Done | None = None) -> None:
        """Renews the suffix sums. `done` tells the work that a running lease has done; None if none
        is to count.
        """
        self._renew(self._running_works(done))

    def merge(self, other: Sizes) -> None:
        """Adds all samples of another histogram."""
        for bucket, (count, total) in other._cells.items():
            mine = self._cells.get(bucket, (0, 0))
            self._cells[bucket] = mine[0] + count, mine[1] + total
        self.n += other.n
        self.running.update(other.running)
        self._renew({})
        self._due = 0  # the next sample brings a time at which running leases can be looked at

    def means(self) -> list[tuple[int, int]]:
        """The mean work and the number of samples of each bucket, ascending. O(buckets log
        buckets).
        """
        return [(total // count, count) for _, (count, total) in sorted(self._cells.items())]

    def _running_works(self, done: Done | None) -> dict[int, tuple[int, int, int]]:
        """Of the running leases that have done the work of each bucket: how many have done less
        than those that ended there took on average, how many have done more, and the sum of their
        works. Empty once enough leases have ended.
        """
        found: dict[int, tuple[int, int, int]] = {}
        if done is None or self.n >= ENOUGH * len(self.running):
            return found
        step = 1 + (len(self.running) - 1) // LOOKED
        for action, lease in islice(self.running.values(), 0, None, step):
            work = done(action, lease)
            if work > 0:
                bucket = octaves(work)
                less, more, total = found.get(bucket, (0, 0, 0))
                count, sum_ = self._cells.get(bucket, (0, 0))
                below = work * count < sum_
                found[bucket] = (less + step * below, more + step * (not below),
                                 total + work * step)
        return found

    def _renew(self, done: dict[int, tuple[int, int, int]]) -> None:
        self._due = self.n + 1 + self.n // 16
        self.version += 1
        self._edges = sorted({*self._cells, *done}) if done else sorted(self._cells)
        weights = self._weights(done) if done else [
            (count << WHOLE, total << WHOLE)
            for count, total in [self._cells[bucket] for bucket in self._edges]]
        n = total = 0
        tail = [(0, 0)]
        for count, sum_ in reversed(weights):
            n, total = n + count, total + sum_
            tail.append((n, total))
        self._tail = tail[::-1]

    def _weights(self, done: dict[int, tuple[int, int, int]]) -> list[tuple[int, int]]:
        """The count and the sum of each bucket by the Kaplan-Meier estimator: the share of a
        running lease goes to the works that are longer than what it has done. The counts add up to
        `n`.
        """
        left = self.n << WHOLE  # the count of those that are longer
        at_risk = self.n + sum([less + more for less, more, _ in done.values()])
        weights = []
        for bucket in self._edges:
            count, sum_ = self._cells.get(bucket, (0, 0))
            less, more, _ = done.get(bucket, (0, 0, 0))
            at_risk -= less
            weight = left * count // at_risk if count else 0
            weights.append((weight, weight * (sum_ // count) if count else 0))
            left -= weight
            at_risk -= count + more
        if left:  # some have done more than all that ended took
            less, more, sum_ = done[self._edges[-1]]
            ended = sum([total for _, total in self._cells.values()])
            every = ended + sum([total for _, _, total in done.values()])
            most, last = sum_ // (less + more), weights[-1]
            work = most + min(every // self.n, FURTHER * most)
            weights[-1] = last[0] + left, last[1] + left * work
        return weights

    def beyond(self, bucket: int) -> tuple[int, int]:
        """How many samples, in 1/2**WHOLE, lie above this bucket (-1: all of them), and their sum.
        """
        return self._tail[bisect_right(self._edges, bucket)]


def cpu_to_learn(outcome: Outcome, spans: Spans) -> int:
    """Returns the CPU time in ns from which a serial fraction can be learned; 0 if it is a lower
    bound, or where the spans, ns each, hold more than the execution.
    """
    total = sum(ns for _, ns in spans)
    return 0 if total * IDLE_PART > outcome.exec_ns * (IDLE_PART + 1) else outcome.known_cpu_ns


class Serial:
    """The estimate of the serial fraction of a class, over a grid.

    CPU time says it where programs only compute: an action that held u units for t ns and used c ns
    of CPU time on them did c ns of work, so its speed was c / t, and one fraction f explains that.
    The estimate is the f for which the works w_f of the samples add up to the CPU time that they
    used. An action that waits, for a disk or a network, seems to be serial, and indeed needs fewer
    cores; one that polls while it waits seems to be parallel.

    Run times can contradict that, as where more cores make each slower. The work is assumed to be
    log-normal with free mean and spread. The logarithm of the likelihood of a fraction f is
    sum log speed(f, last units) - sum log w_f - n log sd(log w_f), where w_f is the work of a
    sample if f is true. The estimate is the likely fraction that is nearest to what CPU time says.

    Attributes:
        n: how many actions were added.
        best: the estimate, in 1/1000.
    """

    __slots__ = ("_cpu_ns", "_cpu_samples", "_first", "_likely", "_logw", "_logw2", "_work", "best",
                 "n")

    def __init__(self) -> None:
        self.n, self.best = 0, PRIOR
        self._first, self._logw, self._logw2, self._work = ([0] * len(SERIALS) for _ in range(4))
        # samples with CPU time, and what they used; `_work`: their w_f
        self._cpu_samples = self._cpu_ns = 0
        # places in the grid that run times allow, by the last time they were judged
        self._likely = list(range(len(SERIALS)))

    def merge(self, other: Serial) -> None:
        """Adds all samples of another estimate."""
        self.n += other.n
        self._cpu_samples += other._cpu_samples
        self._cpu_ns += other._cpu_ns
        for mine, more in ((self._first, other._first), (self._logw, other._logw),
                           (self._logw2, other._logw2), (self._work, other._work)):
            mine[:] = [a + b for a, b in zip(mine, more, strict=True)]
        self._choose()

    def add(self, spans: Spans, running: int, cpu_ns: int = 0) -> None:
        """Adds an action that ended by itself. O(grid x spans).

        Args:
            spans: the sizes that it had.
            running: how many leases of its class still run.
            cpu_ns: the CPU time that it used; 0 if that is not known.
        """
        last = [units for units, _ in spans if units][-1]
        self.n += 1
        works = [max(1, work_of(spans, f)) for f in SERIALS]
        for i, (f, work) in enumerate(zip(SERIALS, works, strict=True)):
            w = lg(work)
            self._first[i] += lg(speed(f, last)) - w
            self._logw[i] += w
            self._logw2[i] += w * w
        if cpu_ns and works[0] * TELLING_DEN >= works[-1] * TELLING_NUM:
            self._compare(works, cpu_ns)
        if self.n >= MIN_SERIAL and not self.n & 7 and self.n >= RIPE * running:
            n, likely = self.n, []
            for i in range(len(SERIALS)):
                spread = max(1, (self._logw2[i] * n - self._logw[i] ** 2) // (n * n))
                likely.append(self._first[i] - n * (lg(spread) - 20 * 1024) // 2)
            enough = max(likely) - (DOUBT + n * DOUBT_EACH)
            self._likely = [i for i in range(len(SERIALS)) if likely[i] >= enough]
        self._choose()

    def _choose(self) -> None:
        """Takes the likely fraction that is nearest to what CPU time says."""
        first = self._by_cpu_time()
        self.best = SERIALS[min(self._likely, key=lambda i: abs(i - first))]

    def _compare(self, works: Sequence[int], cpu_ns: int) -> None:
        """Adds a sample with CPU time. Old samples lose weight, so that a class may change."""
        if self._cpu_samples >= 2 * CPU_SAMPLES:
            self._cpu_samples, self._cpu_ns = self._cpu_samples // 2, self._cpu_ns // 2
            self._work = [each // 2 for each in self._work]
        self._cpu_samples += 1
        self._cpu_ns += min(max(cpu_ns, works[-1]), works[0])
        self._work = [a + b for a, b in zip(self._work, works, strict=True)]

    def _by_cpu_time(self) -> int:
        """The place in the grid of the fraction that explains the CPU time, where one mean sample
        at PRIOR is added; that of PRIOR if no CPU time is known.
        """
        if not self._cpu_samples:
            return _PRIOR_AT
        n = self._cpu_samples
        used = lg(n * self._cpu_ns + self._work[_PRIOR_AT])
        return min(range(len(SERIALS)), key=lambda i: abs(lg((n + 1) * self._work[i]) - used))


class _Class:
    """The samples and estimates of one class.

    Attributes:
        running: how many of its leases have not ended.
        sizes: its histogram of work.
        serial: its serial fraction; None before the first end of an action with several degrees.
        merged: whether it stands for all names of its template.
    """

    __slots__ = ("merged", "running", "serial", "sizes")

    def __init__(self) -> None:
        self.running = 0
        self.sizes = Sizes()
        self.serial: Serial | None = None
        self.merged = False

    def merge(self, other: _Class) -> None:
        """Adds the samples of another class."""
        self.running += other.running
        self.sizes.merge(other.sizes)
        if other.serial is not None:
            self.serial = self.serial or Serial()
            self.serial.merge(other.serial)


Of = tuple[str, str]  # key and name


class Estimator:
    """The classes of actions, each with its samples and estimates. Memory is O(CLASSES_MAX +
    running).

    Attributes:
        used: how many leases were granted, by where the estimate of their run time came from.
    """

    def __init__(self) -> None:
        self.used = {"profile": 0, "learned": 0}
        self._classes: OrderedDict[Of, _Class] = OrderedDict()  # used longest ago first
        self._variants: dict[Of, dict[str, None]] = {}  # by template: classes not yet merged
        self._merged = 0  # classes that stand for a template
        # what the last call of `_open` was about and returned, as actions often come in bursts
        self._last: tuple[str, str, bool, _Class, Sizes] = "", "", False, _Class(), Sizes()
        self._parents: dict[tuple[str, bool], Sizes] = {}
        self._any = Sizes()
        self._memo: dict[tuple[str, str, bool, int], tuple[int, int]] = {}

    def estimate(self, action: Action) -> tuple[int, int]:
        """The serial fraction (1/1000) and the work (ns on one unit) of an action that has not run.
        O(1).
        """
        return self.serial(action), self.work(action)

    def work(self, action: Action) -> int:
        """The work (ns on one unit) of an action that has not run. O(1)."""
        if action.profile is not None:
            return action.profile.work_ns
        return self.mean(action.key, action.name, action.degrees)

    def seen(self, action: Action) -> bool:
        """Whether an action of the same class has ended."""
        return self.seen_class(action.key, action.name)

    def samples(self, action: Action) -> Sizes | None:
        """The works of those actions of the same class that have ended; None before the first."""
        known = self._find(action.key, action.name)
        return None if known is None or not known.sizes.n else known.sizes

    def seen_class(self, key: str, name: str) -> bool:
        """Whether an action of this class has ended."""
        known = self._find(key, name)
        return known is not None and known.sizes.n > 0

    def serial(self, action: Action) -> int:
        """The serial fraction of an action, in 1/1000; 0 if it can only run on one unit."""
        if action.degrees[-1] <= 1:
            return 0
        if action.profile is not None:
            return action.profile.serial_ppm // 1000
        known = self._find(action.key, action.name)
        return known.serial.best if known is not None and known.serial is not None else PRIOR

    def remaining(self, action: Action, done_ns: int) -> int:
        """The work that is expected to be left after `done_ns` of it was done, in ns on one unit;
        at least 1.
        """
        if action.profile is not None:
            return max(1, action.profile.work_ns - done_ns)
        return max(1, self.mean(action.key, action.name, action.degrees, done_ns) - done_ns)

    def mean(self, key: str, name: str, degrees: tuple[int, ...], done_ns: int = 0) -> int:
        """The mean work of those actions of a class that are larger than `done_ns`, shrunk towards
        the means of the parents. O(1).

        It is remembered by the bucket of `done_ns`, so it may be the mean for another amount of the
        same bucket.
        """
        bucket = octaves(done_ns) if done_ns > 0 else -1
        several = degrees[-1] > degrees[0]
        # the versions of `_levels`, which are listed only where no mean is remembered
        last, version = self._last, self._any.version
        if last[1] == name and last[0] == key and last[2] is several:
            version += last[4].version + last[3].sizes.version
        else:
            parent, known = self._parents.get((key, several)), self._find(key, name)
            if parent is not None:
                version += parent.version
            if known is not None:
                version += known.sizes.version
        of = key, name, several, bucket
        memo = self._memo.get(of)
        if memo is not None and memo[0] == version:
            return memo[1]
        if len(self._memo) >= _MEMO_MAX:
            self._memo.clear()
        found = _mean_beyond(self._levels(key, name, several), done_ns, bucket)
        self._memo[of] = version, found
        return found

    def _levels(self, key: str, name: str, several: bool) -> list[Sizes]:
        """The histograms of all actions, of the parent of a class, and of the class."""
        known, parent = self._find(key, name), self._parents.get((key, several))
        levels = [self._any]
        if parent is not None:
            levels.append(parent)
        if known is not None and known.sizes.n:
            levels.append(known.sizes)
        return levels

    # ---- called by the handlers of leases ----------------------------------------------------

    def began(self, action: Action) -> None:
        """Counts a lease of this action that was granted. O(1) amortised."""
        self._open(action)[0].running += 1
        self.used["learned" if action.profile is None else "profile"] += 1

    def note_running(self, action: Action, lease: RunningLease) -> None:
        """Notes that a lease of this action, which `began` was told of, does work from now on. O(1)
        amortised.
        """
        if counts_while_running(action):
            own, parent = self._open(action)
            known = action, lease
            for sizes in (self._any, parent, own.sizes):
                sizes.running[lease.lease] = known

    def without_learning(self) -> Estimator:
        """Returns one with the same estimates, which it shares, that learns nothing any more."""
        return _Settled(self)

    def ended(self, action: Action, spans: Spans, whole: bool, cpu_ns: int = 0, lease: int = 0,
              now: int = 0) -> None:
        """Learns from a lease of this action that ended. O(grid x spans).

        Args:
            action: the action.
            spans: the sizes that the lease had.
            whole: whether it ended by itself.
            cpu_ns: the CPU time that it used on its units; 0 if that is not known.
            lease: the number of the lease; 0 if `note_running` was not told of it.
            now: the present time, epoch ns.
        """
        own, parent = self._open(action)
        own.running -= 1
        levels = self._any, parent, own.sizes
        if lease in own.sizes.running:
            for sizes in levels:
                del sizes.running[lease]
        for units, ns in spans:
            if units and ns:
                break
        else:
            return
        work = max(1, work_of(spans, self.serial(action)))
        if not whole:
            # not `mean`: what it remembers depends on what planning has asked, and replays do not
            # plan
            several = action.degrees[-1] > action.degrees[0]
            known = self._levels(action.key, action.name, several)
            work = max(work, _mean_beyond(known, work, octaves(work)))
        elif action.degrees[-1] > 1:
            if own.serial is None:
                own.serial = Serial()
            own.serial.add(spans, own.running, cpu_ns)
        bucket, done = octaves(work), None
        for sizes in levels:
            if sizes.add(work, bucket):
                done = done or self._done_by(now)
                sizes.renew(done)

    def _done_by(self, now: int) -> Done:
        """Returns what tells the work that a running lease has done by now. It remembers answers,
        since a lease is in three histograms.
        """
        works: dict[int, int] = {}
        serials: dict[tuple[str, str, bool], int] = {}

        def done(action: Action, lease: RunningLease) -> int:
            work = works.get(lease.lease)
            if work is None:
                of = action.key, action.name, action.degrees[-1] > 1
                serial = serials.get(of)
                if serial is None:
                    serial = serials[of] = self.serial(action)
                work = works[lease.lease] = work_of(lease.spans(now), serial)
            return work
        return done

    # ---- which classes there are -------------------------------------------------------------

    def _find(self, key: str, name: str) -> _Class | None:
        """The class of a name, if anything is known of it. O(1)."""
        known = self._classes.get((key, name))
        if known is None and self._merged:
            known = self._classes.get((key, template(name)))
            if known is not None and not known.merged:
                return None
        return known

    def _open(self, action: Action) -> tuple[_Class, Sizes]:
        """The class of an action, marked as the one that was used last, and the histogram of its
        parent; made if there are none.
        """
        key, name, degrees, last = action.key, action.name, action.degrees, self._last
        several = degrees[-1] > degrees[0]
        if last[1] == name and last[0] == key and last[2] is several:
            return last[3], last[4]
        of, classes = (key, name), self._classes
        known = classes.get(of)
        if known is None:
            of = self._name(key, name)
            known = classes.get(of)
            if known is None:
                known = classes[of] = _Class()
                self._forget()
        classes.move_to_end(of)
        parent = self._parents.get((key, several))
        if parent is None:
            parent = self._parents[key, several] = Sizes()
        self._last = key, name, several, known, parent
        return known, parent

    def _name(self, key: str, name: str) -> Of:
        """The key and name under which a new name has its class: its own, or its template's."""
        general = key, template(name)
        if general[1] == name:
            return general
        known = self._classes.get(general)
        if known is not None and known.merged:
            return general
        variants = self._variants.setdefault(general, {})
        if len(variants) < VARIANTS:
            variants[name] = None
            return key, name
        del self._variants[general]
        if known is None:
            known = self._classes[general] = _Class()
        known.merged = True
        self._merged += 1
        for each in variants:
            known.merge(self._classes.pop((key, each)))
        self._memo.clear()
        return general

    def _forget(self) -> None:
        """Forgets the class that was used longest ago, if there are too many."""
        if len(self._classes) <= CLASSES_MAX:
            return
        of, oldest = next(iter(self._classes.items()))
        if oldest.running:  # moved back, so that another class comes first next time
            self._classes.move_to_end(of)
            return
        del self._classes[of]
        self._merged -= oldest.merged
        general = of[0], template(of[1])
        variants = self._variants.get(general)
        if variants is not None and of[1] in variants:
            del variants[of[1]]
            if not variants:
                del self._variants[general]
        self._memo.clear()


def _mean_beyond(levels: Sequence[Sizes], done_ns: int, bucket: int) -> int:
    """The mean of what lies above a bucket, each level shrunk towards the one before."""
    prior = n = SHRINK << WHOLE
    total = prior * max(UNKNOWN_NS, 2 * done_ns if bucket >= 0 else 0)
    for sizes in levels:
        k, more = sizes.beyond(bucket)
        n, total = prior + k, prior * total // n + more
    return total // n


class _Settled(Estimator):
    """An estimator that shares everything with another one, and learns nothing."""

    def __init__(self, of: Estimator) -> None:
        self.__dict__.update(of.__dict__)

    def __deepcopy__(self, memo: dict[int, object]) -> _Settled:
        return self

    def began(self, action: Action) -> None:
        """Learns nothing."""

    def note_running(self, action: Action, lease: RunningLease) -> None:
        """Learns nothing."""

    def ended(self, action: Action, spans: Spans, whole: bool, cpu_ns: int = 0, lease: int = 0,
              now: int = 0) -> None:
        """Learns nothing."""
