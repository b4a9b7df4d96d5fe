"""Computes what each allocation held, and how much of it was lent to actions. Pure.

An allocation is held from Slurm's grant to its end. Where these times are not known, the allocation
counts as held from the time when its first worker joined to the time when its last worker left. The
broker's own job is held since Slurm granted it (`BrokerStarted`). Its end comes after the broker's,
so no journal has it; the caller passes it on if Slurm's accounting has told it.

Slurm may requeue a satellite that a user submitted, while the broker goes on. Its workers then join
under the same job id, and report another end of the time limit. Its time in the queue is not held,
and the nodes that it gets are in the place of those that it had.

Cores of an allocation that were lent to actions count as used. Amounts are in core-ns and GPU-ns.
An allocation that lost a node counts with all of its CPUs and GPUs until its end. Nothing is
guessed: an allocation that still runs is held until the last event. The fold takes one pass,
O(events).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..domain import event as ev
from ..domain.allocation import SatelliteShape
from ..domain.lease_queues import LeaseQueues
from ..domain.slurm import JobSpan
from .starts import without_gaps

_SECOND = 10**9


@dataclass(slots=True)
class HeldRow:
    """The core-hours and GPU-hours that one allocation held, and the core-hours that it used.

    Attributes:
        job: the Slurm job id, or `LEADER+N` for a het component.
        name: name of its shape; empty if the broker did not request it.
        own: whether it is the broker's own allocation.
        came: whether Slurm granted it.
        nodes: names of its nodes.
        cpus: CPUs of all its nodes.
        since: when it began, in ns since the epoch.
        until: when it ended, in ns since the epoch.
        used_ns: core-ns that were lent to actions.
        why: why it was given back, or how it ended.
        earlier_ns: how long earlier starts of the job held it, before a requeue.
        earlier_core_ns: core-ns that earlier starts of the job held.
        lent_until: when an action last held cores of it, in ns since the epoch.
        gpus: GPUs of all its nodes.
        earlier_gpu_ns: GPU-ns that earlier starts of the job held.
    """

    job: str
    name: str = ""
    own: bool = False
    came: bool = False
    nodes: list[str] = field(default_factory=list)
    cpus: int = 0
    since: int = 0
    until: int = 0
    used_ns: int = 0
    why: str = ""
    earlier_ns: int = 0
    earlier_core_ns: int = 0
    lent_until: int = 0
    gpus: int = 0
    earlier_gpu_ns: int = 0

    @property
    def span_ns(self) -> int:
        """How long it was held, in ns."""
        return self.earlier_ns + self._present_ns

    @property
    def held_ns(self) -> int:
        """How much was held, in core-ns: CPUs times time."""
        return self.earlier_core_ns + self.cpus * self._present_ns

    @property
    def gpu_held_ns(self) -> int:
        """How much was held, in GPU-ns: GPUs times time."""
        return self.earlier_gpu_ns + self.gpus * self._present_ns

    @property
    def _present_ns(self) -> int:
        """How long the job's present start has held it, in ns."""
        return max(0, self.until - self.since) if self.came else 0

    def fit(self, spans: Iterable[JobSpan], earlier_until: int,
            next_start: int | None = None) -> None:
        """Replaces its present times by those that Slurm's accounting has for them.

        Slurm cuts its times to whole seconds. Where cores were lent in the last second, which is
        cut off, they count as held for as long as they were lent.

        A job that lost a node, or was made smaller, and was then requeued has one span for both
        starts (seen with Slurm 22.05). Of such a span only the beginning counts for the first of
        them, and only the end for the last.

        Args:
            spans: when the job held nodes, by Slurm's accounting.
            earlier_until: when the job's start before this one ended, in ns since the epoch; 0 if
                this is the first.
            next_start: when the job's next start began, in ns since the epoch; None for no such
                start.
        """
        own = [span for span in spans if self.came and span.job == self.job
               and span.start_ns <= self.until and self.since < span.end_ns + _SECOND]
        if own:  # a requeued job may start again in the second in which it ended
            span = max(own, key=lambda one: min(one.end_ns, self.until)
                       - max(one.start_ns, self.since))
            if span.start_ns >= earlier_until:
                self.since = span.start_ns
            if next_start is None or span.end_ns <= next_start:
                self.until = max(span.end_ns, self.lent_until)

    def rest(self) -> None:
        """Ends the current holding because the job is requeued; it may later get other nodes."""
        self.earlier_ns, self.earlier_core_ns, self.earlier_gpu_ns = (
            self.span_ns, self.held_ns, self.gpu_held_ns)
        self.came, self.cpus, self.gpus, self.nodes = False, 0, 0, []


class HeldUsage:
    """Folds events into rows, one for each job id. Events must come in order.

    Args:
        spans: when the broker's own job held nodes, by Slurm's accounting, as far as that is known.
    """

    def __init__(self, spans: Sequence[JobSpan] = ()) -> None:
        self._spans = spans
        self._own, self._granted_at = "", 0  # the broker's own job, and when Slurm granted it
        self.rows: dict[str, HeldRow] = {}
        self._rested: dict[str, int] = {}  # job -> when its last start before a requeue ended
        self._shapes: dict[int, SatelliteShape] = {}  # of allocations that the broker requested
        self._job_of: dict[int, str] = {}  # alloc -> job
        self._since: dict[int, int] = {}  # when allocations began whose job is not known yet
        self._nodes: dict[int, str] = {}  # node -> job
        self._up: dict[str, set[int]] = {}
        self._ends_at: dict[str, int] = {}  # job -> its end, as its last worker reported it
        self._lent: dict[int, tuple[str, int, int]] = {}  # lease -> job, since, cores
        self._prefetched = LeaseQueues[ev.LeaseGranted]()
        self.last_ns = 0

    def add(self, event: ev.Event) -> None:
        """Takes one event."""
        before, self.last_ns = self.last_ns, event.at
        on = _HANDLERS.get(type(event))
        if on is not None:
            on(self, event)
        elif isinstance(event, ev.BrokerStarted):
            again = event.granted_at and event.granted_at == self._granted_at
            if not (event.await_until or again):  # else Slurm has not taken the nodes meanwhile
                self._begin_again(before, event.granted_at or event.at)
            self._own, self._granted_at = event.job, event.granted_at

    def close(self) -> None:
        """Ends the fold: everything that is still held or lent ends at the time of the last event.
        """
        for lease in list(self._lent):
            self._take(lease, self.last_ns)
        for job, up in self._up.items():
            if up:
                self.rows[job].until = self.last_ns
        for row in self.rows.values():
            row.fit(self._spans, self._rested.get(row.job, 0))

    @property
    def present(self) -> tuple[int, int]:
        """CPUs and GPUs of the allocations that have a worker now."""
        rows = [self.rows[job] for job, up in self._up.items() if up]
        return sum(row.cpus for row in rows), sum(row.gpus for row in rows)

    def _begin_again(self, before: int, since: int) -> None:
        """Handles a start of the broker. Allocations other than satellites were held until
        `before`, the time of the last event before the start; the job holds nodes again from
        `since` on.
        """
        for row in self.rows.values():
            if row.came and not row.name:
                row.until = before if self._up.get(row.job) else row.until
                row.fit(self._spans, self._rested.get(row.job, 0), since)
                self._rested[row.job] = row.until
                row.rest()

    def _asked(self, event: ev.AllocationAsked) -> None:
        self._shapes[event.alloc] = event.shape

    def _queued(self, event: ev.AllocationQueued) -> None:
        self._named(event.alloc, event.job)

    def _alloc_released(self, event: ev.AllocationReleased) -> None:
        self._ended(event.alloc, 0, event.reason)

    def _alloc_ended(self, event: ev.AllocationEnded) -> None:
        self._ended(event.alloc, event.ended or event.at, event.reason)

    def _node_lost(self, event: ev.NodeLost) -> None:
        job = self._nodes.pop(event.node)
        self._up[job].discard(event.node)
        if not self._up[job]:
            self.rows[job].until = event.at

    def _granted(self, event: ev.LeaseGranted) -> None:
        if event.after:
            self._prefetched.add(event.lease, event.after, event)
        else:
            self._lend(event.lease, event.node, len(event.cores), event.at)

    def _resized(self, event: ev.LeaseResized) -> None:
        if event.lease in self._lent:
            job = self._take(event.lease, event.at)
            self._lent[event.lease] = (job, event.at, len(event.cores))

    def _finished(self, event: ev.LeaseFinished) -> None:
        if event.clean:
            self._off(event.lease, event.at)

    def _lease_ended(self, event: ev.LeaseReleased | ev.LeaseReturned) -> None:
        self._off(event.lease, event.at)

    def _row(self, job: str) -> HeldRow:
        return self.rows.setdefault(job, HeldRow(job))

    def _named(self, alloc: int, job: str) -> None:
        self._job_of[alloc] = job
        row = self._row(job)
        shape = self._shapes.get(alloc)
        if shape is None:
            row.name = ""
        else:
            row.name = shape.name
            row.cpus, row.gpus = shape.nodes * shape.cpus, shape.nodes * shape.gpus

    def _held(self, event: ev.AllocationHeld) -> None:
        if event.job:
            self._job_of[event.alloc] = event.job
            self._row(event.job).own = event.own
        job = self._job_of.get(event.alloc)
        if job is not None:
            row = self._row(job)
            row.since = event.since or (row.since if row.came else self._began(row.job, event.at))
            row.came = True
            row.cpus = max(row.cpus, event.cpus)

    def _ended(self, alloc: int, at: int, reason: str) -> None:
        job = self._job_of.get(alloc)
        if job is not None:
            row = self.rows[job]
            row.why = reason or row.why
            row.until = at or row.until

    def _joined(self, event: ev.NodeJoined) -> None:
        job = event.spec.allocation
        row = self._row(job)
        ends_at = event.spec.ends_at_ns
        if (self._ends_at.get(job, ends_at) != ends_at and not self._up.get(job)
                and not row.name and not self._is_own(job)):  # a worker that died reports the same
            row.rest()
        self._ends_at[job] = ends_at
        row.since, row.came = (row.since if row.came else self._began(job, event.at)), True
        if event.spec.name not in row.nodes:
            row.nodes.append(event.spec.name)
            if not row.name:
                row.cpus += len(event.spec.cores)
                row.gpus += len(event.spec.gpus)
        self._nodes[event.node] = job
        self._up.setdefault(job, set()).add(event.node)

    def _began(self, job: str, at: int) -> int:
        """Returns when an allocation began of which the first sign came at `at`."""
        own = bool(self._granted_at) and self._is_own(job)
        return min(self._granted_at, at) if own else at

    def _is_own(self, job: str) -> bool:
        """Returns whether this is the broker's own job, or a het component of it."""
        return job.partition("+")[0] == self._own

    def _lend(self, lease: int, node: int, cores: int, at: int) -> None:
        job = self._nodes.get(node)
        if job is not None:
            self._lent[lease] = (job, at, cores)

    def _take(self, lease: int, at: int) -> str:
        job, since, cores = self._lent.pop(lease)
        row = self.rows[job]
        row.used_ns += cores * (at - since)
        row.lent_until = max(row.lent_until, at) if cores else row.lent_until
        return job

    def _off(self, lease: int, at: int) -> None:
        """Ends a lease. The lease that was prefetched behind it, if there is one, begins."""
        if lease in self._lent:
            self._take(lease, at)
        grant = self._prefetched.remove(lease)
        if grant is not None:
            self._lend(grant.lease, grant.node, len(grant.cores), at)


_HANDLERS: dict[type[ev.Event], Callable[[HeldUsage, Any], None]] = {
    ev.AllocationAsked: HeldUsage._asked, ev.AllocationQueued: HeldUsage._queued,
    ev.AllocationHeld: HeldUsage._held, ev.AllocationReleased: HeldUsage._alloc_released,
    ev.AllocationEnded: HeldUsage._alloc_ended, ev.NodeJoined: HeldUsage._joined,
    ev.NodeLost: HeldUsage._node_lost, ev.LeaseGranted: HeldUsage._granted,
    ev.LeaseResized: HeldUsage._resized, ev.LeaseFinished: HeldUsage._finished,
    ev.LeaseReleased: HeldUsage._lease_ended, ev.LeaseReturned: HeldUsage._lease_ended,
}


def held(events: Iterable[ev.Event], spans: Sequence[JobSpan] = ()) -> list[HeldRow]:
    """Returns a row for each allocation that was granted, in the order of the grants; see
    `HeldUsage`.
    """
    fold = HeldUsage(spans)
    for event in without_gaps(events):
        fold.add(event)
    fold.close()
    return [row for row in fold.rows.values() if row.came or row.span_ns]


def total(rows: Iterable[HeldRow]) -> Iterator[int]:
    """Yields two sums over the rows: core-ns held, and core-ns used."""
    known = list(rows)
    yield sum(row.held_ns for row in known)
    yield sum(row.used_ns for row in known)
