"""Pure. Forecasts when a waiting action starts, by running a copy of the real scheduler ahead.

The copy is told that each lease ends at its expected time, plans as the broker would, and goes on
until the action starts. Invariants: the original ledger is never changed, and the work is bounded
(`OPEN_MAX`, `STEPS_MAX`). Nothing is guessed: a lease of unknown length never ends in a forecast,
and an action that then never starts gets a reason instead of a time. No new action arrives during a
forecast.
"""

from __future__ import annotations

import copy
import heapq
from collections import Counter
from dataclasses import dataclass, field

from ..domain import decision as de
from ..domain import event as ev
from ..domain.action import Action
from ..domain.allocation import AllocPolicy
from ..domain.outcome import Outcome
from ..domain.states import ActionState, LeaseState, SessionState
from .scheduler import Scheduler
from .state.estimator import work_of
from .state.ledger import LeaseEntry, Ledger
from .state.queue import CPU, GPU, pool_of
from .state.speed import run_ns
from .state.tenant_use import MEMORY

OPEN_MAX = 2_000  # no forecast is made while more actions wait or run
STEPS_MAX = 4_000  # how many events one forecast handles at most
OVERDUE_NS = 1_000_000  # after this time, a lease is expected to end that is overdue


@dataclass(slots=True)
class Forecast:
    """The start that is expected of an action.

    Attributes:
        at: when it starts, epoch ns; None if that is not known.
        why: why the start is not known; empty if it is known.
        node: the node on which it starts; 0 if its client carries it out.
        units: the units with which it starts.
        end: when it ends if it keeps these units, epoch ns; None if that is not known.
        steps: the number of events that the forecast took.
        rests_on: the number of running leases and earlier starts that hold something for which the
            action may have to wait, for each `source` of their run times.
    """

    at: int | None = None
    why: str = ""
    node: int = 0
    units: int = 0
    end: int | None = None
    steps: int = 0
    rests_on: Counter[str] = field(default_factory=Counter)


def source(ledger: Ledger, action: Action) -> str:
    """Where the estimate of an action's run time comes from: its `profile`, `learned` from actions
    of its class that have ended, or `unknown`.
    """
    if action.profile is not None:
        return "profile"
    return "learned" if ledger.estimator.seen(action) else "unknown"


def expected_end(ledger: Ledger, lease: LeaseEntry, now: int) -> int | None:
    """When a lease should end, from its earlier sizes and its present one; epoch ns, None if
    unknown.
    """
    action = ledger.actions[lease.action].action
    if not lease.units or source(ledger, action) == "unknown":
        return None
    if action.profile is None:
        estimator, spans = ledger.estimator, lease.spans(now)
        serial = estimator.serial(action)
        left = run_ns(estimator.remaining(action, work_of(spans, serial)), serial, lease.units)
        end = max(now, lease.granted_at + lease.restore_ns) + max(OVERDUE_NS, left)
        return at_most_its_limit(action, lease, now, end)
    ends = [*(since for since, _ in lease.grants[1:]), now]
    if len(lease.grants) == 1:
        end = lease.granted_at + lease.restore_ns + action.profile.duration_ns(lease.units)
        return end if end > now else now + OVERDUE_NS
    rest = 1.0
    for (since, units), until in zip(lease.grants, ends, strict=True):
        if units:
            rest -= max(0, until - since) / max(1, action.profile.duration_ns(units))
    return now + max(OVERDUE_NS, round(rest * action.profile.duration_ns(lease.units)))


def at_most_its_limit(action: Action, lease: LeaseEntry, now: int, end: int) -> int:
    """An expected end, or the end of the action's limit on its run time if that comes first."""
    if not action.timeout_ns:
        return end
    limit = lease.granted_at + lease.restore_ns + action.timeout_ns
    return min(end, max(now + OVERDUE_NS, limit))


def copied(scheduler: Scheduler, learns: bool = True) -> Scheduler:
    """A copy of the scheduler that goes on independently. Values that never change are shared.

    Args:
        scheduler: the scheduler.
        learns: whether the copy learns from the leases that end in it. Without that it shares what
            has been learned, whose copy can take a tenth of a second.
    """
    ledger = scheduler.ledger
    shared: list[object] = [e.action for e in ledger.actions.values()]
    shared += [n.spec for n in ledger.nodes.values()]
    shared += [s.spec for s in ledger.sessions.values()]
    memo = {id(one): one for one in shared}
    if not learns:
        memo[id(ledger.estimator)] = ledger.estimator.without_learning()
    return copy.deepcopy(scheduler, memo)


def forecast(scheduler: Scheduler, action: int, now: int) -> Forecast:
    """Forecasts when a pending action starts."""
    ledger = scheduler.ledger
    waiting = sum(e.state is ActionState.PENDING for e in ledger.actions.values())
    if waiting + len(ledger.leases) > OPEN_MAX:
        return Forecast(why=f"more than {OPEN_MAX} actions wait or run")
    return ForecastRun(copied(scheduler), action, now).run()


def _wants(ledger: Ledger, action: Action) -> set[str]:
    """The resources that an action waits for itself, as `LeaseEntry.holds` names them."""
    found = {pool_of(action.key, action.degrees[-1])}
    if action.gpus or action.turn is not None:  # a turn's instances hold GPUs
        found.add(GPU)
    if action.mem_mib:
        found.add(MEMORY)
    session = ledger.sessions.get(action.session)
    if session is not None and session.state is SessionState.WAITING:
        found |= {CPU, MEMORY}
    return found


def _needed(ledger: Ledger, action: Action) -> set[str]:
    """The resources whose release may decide when an action starts: those that it waits for, and
    those that other waiting actions want beside one of them, since these may start before it.
    O(actions).
    """
    found = _wants(ledger, action)
    others = {frozenset(_wants(ledger, entry.action)) for entry in ledger.actions.values()
              if entry.state is ActionState.PENDING}  # a few different ones
    size = 0
    while len(found) > size:
        size = len(found)
        for wants in others:
            if not found.isdisjoint(wants):
                found |= wants
    return found


class ForecastRun:
    """One run of a copied scheduler, of at most `steps` events."""

    def __init__(self, scheduler: Scheduler, action: int, now: int, steps: int = STEPS_MAX) -> None:
        self._scheduler, self._ledger = scheduler, scheduler.ledger
        self._action, self._now = action, now
        asked = self._ledger.actions[action].action
        session = self._ledger.sessions.get(asked.session)
        self._needs = _needed(self._ledger, asked)
        self._sessions = () if session is None else (asked.session, session.spec.origin)
        self._found = Forecast(at=None)
        self._ends: list[tuple[int, int]] = []  # (when, lease)
        self._end_of: dict[int, int] = {}
        self._steps, self._steps_max = 0, steps

    def run(self) -> Forecast:
        """Runs until the action starts, nothing moves any more, or the bound is reached."""
        self._settle()
        for lease in list(self._ledger.leases.values()):
            self._expect(lease, new=True)
        self._scheduler.state.dirty = True
        self._plan()
        while self._found.at is None:
            at = self._next()
            if at is None:
                self._found.why = self._why_stuck()
                break
            if self._steps > self._steps_max:
                self._found.why = f"it lies more than {self._steps_max} events ahead"
                break
            self._now = at
            self._end_leases()
            self._plan()
        self._found.steps = self._steps
        return self._found

    def _settle(self) -> None:
        """Treats everything that is under way as done: sandboxes that open, move or close, units
        that are being cleaned, and clients that are disconnected and may come back.
        """
        now = self._now
        self._ledger.disconnected.clear()
        self._ledger.allocs.policy = AllocPolicy()  # no allocation is requested or given back
        for node in self._ledger.nodes.values():
            node.prefetch_max = 0  # no lease is prefetched
        self._ledger.batching.clear()
        self._ledger.short.clear()
        for lease in [x for x in self._ledger.leases.values() if not x.begun][::-1]:
            self._handle(ev.LeaseReturned(now, lease.lease))
        for lease in [x for x in self._ledger.leases.values() if x.state is LeaseState.RELEASING]:
            self._handle(ev.LeaseReleased(now, lease.lease))
        for session in list(self._ledger.sessions.values()):
            if session.state is SessionState.OPENING:
                self._handle(ev.SessionReady(now, session.spec.id))
            elif session.state is SessionState.MOVING:
                self._handle(ev.SessionPacked(now, session.spec.id, "packed"))
            elif session.state is SessionState.CLOSING and not session.leases:
                self._handle(ev.SessionClosed(now, session.spec.id, ""))

    def _next(self) -> int | None:
        """The time of the next event; None if no event will come."""
        while self._ends and self._end_of.get(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)  # the lease was resized meanwhile, or is over
        end = self._ends[0][0] if self._ends else None
        deadline = self._scheduler.next_deadline()
        if deadline and (end is None or deadline < end):
            self._steps += 1
            return max(deadline, self._now + 1)
        return end

    def _end_leases(self) -> None:
        while self._ends and self._ends[0][0] <= self._now:
            at, lease = heapq.heappop(self._ends)
            if self._end_of.get(lease) == at:
                del self._end_of[lease]
                outcome = Outcome(ActionState.COMPLETED)
                self._handle(ev.LeaseFinished(self._now, lease, outcome, True))

    def _plan(self) -> None:
        scheduler = self._scheduler
        while (self._found.at is None and self._steps <= self._steps_max
               and (events := scheduler.plan(self._now))):
            for event in events:
                self._handle(event)
            self._settle()

    def _handle(self, fact: ev.Event) -> None:
        for event in self._scheduler.consequences(fact):
            self._steps += 1
            for decision in self._scheduler.handle(event):
                if isinstance(decision, de.StartLease | de.ResizeLease):
                    lease = self._ledger.leases[decision.lease]
                    self._expect(lease, isinstance(decision, de.StartLease))
                    self._note(decision, lease)
                elif isinstance(decision, de.KillLease):  # it ends at once
                    end = Outcome(decision.state, reason=decision.reason)
                    self._handle(ev.LeaseFinished(self._now, decision.lease, end, True))

    def _note(self, decision: de.Decision, lease: LeaseEntry) -> None:
        if isinstance(decision, de.StartLease) and decision.action == self._action:
            found = self._found
            found.at, found.node, found.units = self._now, decision.node, lease.units
            found.end = self._end_of.get(lease.lease)

    def _expect(self, lease: LeaseEntry, new: bool) -> None:
        if new and lease.action != self._action and lease.units and self._may_free(lease):
            action = self._ledger.actions[lease.action].action
            self._found.rests_on[source(self._ledger, action)] += 1
        end = self._end_of_lease(lease)
        if end is None:
            self._end_of.pop(lease.lease, None)
        else:
            self._end_of[lease.lease] = end
            heapq.heappush(self._ends, (end, lease.lease))

    def _may_free(self, lease: LeaseEntry) -> bool:
        """Whether the end of a lease may free something for which the action waits."""
        return ((lease.session != 0 and lease.session in self._sessions)
                or (lease.reserved and CPU in self._needs)  # its session may close afterwards
                or any(resource in self._needs for resource, _ in lease.holds()))

    def _end_of_lease(self, lease: LeaseEntry) -> int | None:
        """When a lease ends that has begun or was resized just now; None if that is not known."""
        return expected_end(self._ledger, lease, self._now)

    def _why_stuck(self) -> str:
        """Why the forecast ends although the action still waits."""
        unknown = self._found.rests_on["unknown"]
        session = self._ledger.sessions.get(self._ledger.actions[self._action].action.session)
        if session is not None and session.state is SessionState.WAITING:
            return "its session waits for others to close, and nobody knows when they will"
        if unknown:
            return f"the run times of {unknown} action{'s' * (unknown > 1)} before it are unknown"
        return "nothing that runs now would free what it needs"
