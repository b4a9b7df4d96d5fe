"""Pure. Estimates how often each kind of call to a service comes, the work of such calls, and what
a call adds to a batch.

A kind is a service and the degrees of its calls. A rate is a count that fades as x * h / (h + dt)
between calls, so no exponential is needed and whole numbers suffice. Each kind has two such counts:
one with the horizon as h, for the calls that are expected soon, and one with the window as h, for
the load. Only the ledger's events change them, so a replay learns the same.
"""

from __future__ import annotations

from ...domain.action import Action
from ...domain.service import service_of
from .estimator import Estimator, work_of
from .speed import run_ns

ONE = 1 << 20
HORIZON = 4  # how far ahead calls are expected, in restores of the service
YOUNG = 8  # a rate is taken over at least 1/8 of a horizon or window
WINDOW = 8  # the load is taken over at least 8 runs of a call on the fewest GPUs
HORIZON_MIN_NS = 1_000_000_000
ADDED = 500  # what is assumed of a service before it has run a batch; see `Demand.added`
PACE = 32  # each call of a batch counts for 1/32 of what is learned

CallKind = tuple[str, tuple[int, ...]]  # service, degrees


def horizon_ns(restore_ns: int) -> int:
    """Returns how far ahead calls of a service with this restore time are expected, in ns."""
    return max(HORIZON_MIN_NS, HORIZON * restore_ns)


class Calls:
    """The calls of one kind.

    Attributes:
        horizon: how far ahead calls are expected, in ns.
        window: over how long a time their load is taken, in ns. It is at least a horizon, and it
            follows the work of the calls: one long call is not yet a load.
        serial: the estimated serial fraction of a call, in 1/1000.
        work_ns: the moving mean of the estimated work of a call, on one unit.
        alone_ns: the moving mean of the work of calls that ran alone, on one unit; 0 before one
            has.
    """

    __slots__ = ("_at", "_first", "_gpus_min", "_in_window", "_x", "alone_ns", "horizon", "serial",
                 "window", "work_ns")

    def __init__(self, horizon: int, gpus_min: int, serial: int, work_ns: int) -> None:
        self.horizon, self._x, self._at, self._first = horizon, 0, 0, 0
        self.window, self._in_window, self._gpus_min = horizon, 0, gpus_min
        self.serial, self.work_ns, self.alone_ns = serial, work_ns, 0

    def expected(self, now: int) -> int:
        """How many calls are expected within the horizon, in 1/ONE; changes nothing."""
        return self._faded(self._x, self.horizon, now)

    def _faded(self, count: int, over: int, now: int) -> int:
        """Returns what is left now of a count that fades over `over` ns."""
        since = now - self._at
        return count * over // (over + since) if since > 0 else count

    def in_window(self, now: int, scaled: bool) -> int:
        """How many calls come within a window, in 1/ONE; changes nothing.

        At a steady rate the count has reached 1 - exp(-y) of its final value when y windows have
        passed since the first call. For exp(-y) this takes 1 / (1 + y + y^2 / 2), which is a little
        more. `steady` scales its count more coarsely, and is too low around one horizon.

        Args:
            now: the time, in epoch ns.
            scaled: whether to return the final value in place of the count itself.
        """
        count, w = self._faded(self._in_window, self.window, now), self.window
        if not scaled:
            return count
        seen = max(now - self._first, w // YOUNG)
        filled = seen * (2 * w + seen)
        return count * (2 * w * w + filled) // filled

    def steady(self, now: int) -> int:
        """How many calls are expected within the horizon at the rate seen since the first call, in
        1/ONE. The count is scaled up while less than one horizon has passed since then.
        """
        seen = max(now - self._first, self.horizon // YOUNG)
        return self.expected(now) * self.horizon // min(seen, self.horizon)

    def is_young(self, now: int) -> bool:
        """Whether the first call came less than a horizon ago, so that the rate is a guess."""
        return now - self._first < self.horizon

    def clock_set(self, now: int) -> None:
        """Goes on at `now`, which may be earlier than the last call."""
        self._at, self._first = min(self._at, now), min(self._first, now)

    def came(self, now: int, serial: int, work_ns: int) -> None:
        """Counts one more call, with its estimated serial fraction and work."""
        self._first = self._first or now
        self._in_window = self.in_window(now, scaled=False) + ONE
        self._x, self._at = self.expected(now) + ONE, now
        self.serial, self.work_ns = serial, self.work_ns + (work_ns - self.work_ns) // 8
        run = run_ns(self.work_ns, serial, self._gpus_min)
        self.window = max(self.horizon, WINDOW * run)


class Demand:
    """Every kind of call that ever came, in the order of their first calls.

    Attributes:
        kinds: the calls of each kind.
        of_service: the kinds of each service.
    """

    def __init__(self) -> None:
        self.kinds: dict[CallKind, Calls] = {}
        self.of_service: dict[str, list[CallKind]] = {}
        self._added: dict[str, int] = {}  # by service, see `added`

    def clock_set(self, now: int) -> None:
        """Goes on at `now`, which may be earlier than the last call. O(kinds)."""
        for calls in self.kinds.values():
            calls.clock_set(now)

    def added(self, service: str) -> int:
        """Returns what each call but the first adds to the run time of a batch, in 1/1000 of the
        run time of a call alone.
        """
        return self._added.get(service, ADDED)

    def alone(self, service: str, calls: int, ns: int) -> int:
        """Returns how long one call of a batch would have run alone.

        Args:
            service: the service.
            calls: how many calls the batch had.
            ns: its run time.
        """
        return ns * 1000 // (1000 + self.added(service) * (calls - 1))

    def share(self, service: str, batch: int, ns: int) -> int:
        """Returns the part of one call in the run time of a batch.

        Args:
            service: the service.
            batch: how many calls the batch has.
            ns: the run time of a call alone.
        """
        return ns * (1000 + self.added(service) * (batch - 1)) // (1000 * batch)

    def ran(self, kind: CallKind, calls: int, ns: int, units: int) -> None:
        """Learns from a call that has ended. What it adds to a batch is told by the calls that ran
        alone and by those that did not: neither of them tells it by itself.

        Args:
            kind: its kind, which has come before.
            calls: how many calls its batch had.
            ns: the run time of the batch.
            units: on how many GPUs it ran.
        """
        known = self.kinds[kind]
        if calls == 1:
            work = work_of([(units, ns)], known.serial)
            known.alone_ns += (work - known.alone_ns) // 8 if known.alone_ns else work
            return
        alone = run_ns(known.alone_ns or known.work_ns, known.serial, units)
        sample = (ns * 1000 // max(1, alone) - 1000) // (calls - 1)
        added = self.added(kind[0])
        self._added[kind[0]] = added + (max(0, min(sample, 1000)) - added) // PACE

    def came(self, action: Action, now: int, restore_ns: int, estimator: Estimator) -> None:
        """Counts a call that was submitted. O(1)."""
        service = service_of(action.key)
        kind = (service, action.degrees)
        serial, work = estimator.estimate(action)
        if kind not in self.kinds:
            self.of_service.setdefault(service, []).append(kind)
            self.kinds[kind] = Calls(horizon_ns(restore_ns), action.degrees[0], serial, work)
        self.kinds[kind].came(now, serial, work)
