"""Pure. The part of the scheduler that applies facts about allocations, and what drivers ask of it.

Law: as the scheduler's: facts in, orders out, and only `handle` calls the handlers. The functions
below make facts of what Slurm says; they change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...domain import event as ev
from ...domain.decision import AskAllocation, Decision, EndAllocation
from ...domain.states import AllocState
from ..state.alloc_ledger import AllocEntry, Rejections
from ..state.ledger import Ledger
from ..state.transitions import ALLOC_MOVES, move


class AllocFacts:
    """Handlers of the facts of allocations."""

    ledger: Ledger
    dirty: bool

    def _of_allocations(self) -> dict[type, Callable[[Any], list[Decision]]]:
        return {
            ev.BrokerStarted: self._broker_started,
            ev.AllocationsAllowed: self._allocations_allowed,
            ev.AllocationAsked: self._allocation_asked,
            ev.AllocationQueued: self._allocation_queued,
            ev.AllocationRefused: self._allocation_refused,
            ev.AllocationHeld: self._allocation_held,
            ev.AllocationReleased: self._allocation_released,
            ev.AllocationEnded: self._allocation_ended,
        }

    def _broker_started(self, event: ev.BrokerStarted) -> list[Decision]:
        self.ledger.allocs.own = event.job
        return []

    def _allocations_allowed(self, event: ev.AllocationsAllowed) -> list[Decision]:
        self.ledger.allocs.policy = event.policy
        return []

    def _allocation_asked(self, event: ev.AllocationAsked) -> list[Decision]:
        allocs, shape = self.ledger.allocs, event.shape
        assert allocs.room(shape) >= 1, f"{event} is beyond what the user allows"
        allocs.entries[event.alloc] = AllocEntry(event.alloc, shape, event.at, why=event.reason)
        allocs.next_alloc = event.alloc + 1
        allocs.asks += 1
        self._tell(event.at, f"asked for {shape.name} (satellite {event.alloc}): {event.reason}")
        return [AskAllocation(event.alloc, shape)]

    def _allocation_queued(self, event: ev.AllocationQueued) -> list[Decision]:
        allocs = self.ledger.allocs
        entry = allocs.entries.get(event.alloc)
        if entry is None:
            return []
        known = allocs.by_job.get(event.job)
        if known is not None:  # its worker was faster than sbatch's answer
            found = allocs.entries.pop(known)
            entry.nodes, entry.cpus, entry.joined = found.nodes, found.cpus, found.joined
            entry.since, entry.held_at, entry.empty_at = found.since, found.held_at, found.empty_at
        entry.job, allocs.by_job[event.job] = event.job, event.alloc
        assert entry.shape is not None
        allocs.taken[entry.shape.name] = None
        if entry.state is AllocState.ASKED:
            to = AllocState.PENDING if known is None else AllocState.RUNNING
            entry.state = move(ALLOC_MOVES, entry.state, to, event)
            return []
        return [self._end_order(entry)]  # it was withdrawn before its job was known

    def _allocation_refused(self, event: ev.AllocationRefused) -> list[Decision]:
        entry = self.ledger.allocs.entries.get(event.alloc)
        if entry is None:
            return []
        assert entry.shape is not None
        self._reject(entry.shape.name, event.reason, event.until)
        self._tell(event.at, f"satellite {event.alloc} ({entry.shape.name}) was refused: "
                             f"{event.reason}")
        self._forget_alloc(entry, event.at)
        return []

    def _allocation_held(self, event: ev.AllocationHeld) -> list[Decision]:
        allocs = self.ledger.allocs
        entry = allocs.entries.get(event.alloc)
        if entry is None and event.job:
            entry = allocs.entries[event.alloc] = AllocEntry(
                event.alloc, None, event.at, event.job, event.own, AllocState.RUNNING, event.at)
            allocs.by_job[event.job] = event.alloc
            allocs.next_alloc = max(allocs.next_alloc, event.alloc + 1)
        if entry is None:
            return []
        if entry.state in (AllocState.ASKED, AllocState.PENDING):
            entry.state = move(ALLOC_MOVES, entry.state, AllocState.RUNNING, event)
            entry.held_at = event.at
        shape = entry.shape
        entry.since = event.since or entry.since or event.at
        entry.cpus = max(entry.cpus, event.cpus, shape.cpus * shape.nodes if shape else 0)
        return []

    def _allocation_released(self, event: ev.AllocationReleased) -> list[Decision]:
        allocs = self.ledger.allocs
        entry = allocs.entries.get(event.alloc)
        if entry is None:
            return []
        what = "gave back" if entry.joined else "withdrew"
        name = f"satellite {entry.alloc} ({entry.shape.name})" if entry.shape else entry.job
        self._tell(event.at, f"{what} {name}: {event.reason}")
        entry.state = move(ALLOC_MOVES, entry.state, AllocState.ENDING, event)
        entry.why, allocs.released_at = event.reason, event.at
        if event.until and entry.shape is not None:
            self._reject(entry.shape.name, event.reason, event.until)
        return [self._end_order(entry)]

    def _allocation_ended(self, event: ev.AllocationEnded) -> list[Decision]:
        entry = self.ledger.allocs.entries.get(event.alloc)
        if entry is None:
            return []
        if entry.shape is not None and event.reason:
            self._tell(event.at, f"satellite {event.alloc} ({entry.shape.name}) ended: "
                                 f"{event.reason}")
        self._forget_alloc(entry, event.ended or event.at)
        return []

    def _alloc_joined(self, event: ev.NodeJoined) -> None:
        """A node of an allocation is here."""
        allocs = self.ledger.allocs
        number = allocs.by_job.get(event.spec.allocation)
        if number is None:
            return
        entry = allocs.entries[number]
        entry.nodes[event.node] = None
        entry.empty_at = 0
        shape = entry.shape
        if shape is None:
            entry.cpus += len(event.spec.cores)
        elif not entry.joined:
            took, before = event.at - entry.asked_at, allocs.arrive_ns.get(shape.name)
            allocs.arrive_ns[shape.name] = took if before is None else (3 * before + took) // 4
            allocs.rejected.pop(shape.name, None)
        entry.joined = True

    def _alloc_left(self, event: ev.NodeLost) -> None:
        """A node of an allocation is gone."""
        allocs = self.ledger.allocs
        number = allocs.by_job.get(self.ledger.nodes[event.node].spec.allocation)
        entry = allocs.entries.get(number or 0)
        if entry is None or event.node not in entry.nodes:
            return
        del entry.nodes[event.node]
        if not entry.nodes:
            entry.empty_at = event.at

    def _end_order(self, entry: AllocEntry) -> EndAllocation:
        return EndAllocation(entry.alloc, entry.job, tuple(entry.nodes), entry.why)

    def _forget_alloc(self, entry: AllocEntry, at: int) -> None:
        allocs = self.ledger.allocs
        entry.state = move(ALLOC_MOVES, entry.state, AllocState.ENDED, entry)
        entry.ended_at = at
        if entry.shape is not None:
            allocs.ended += 1
            allocs.ended_core_ns += entry.core_ns
        del allocs.entries[entry.alloc]
        allocs.by_job.pop(entry.job, None)

    def _reject(self, shape: str, why: str, until: int) -> None:
        rejected = self.ledger.allocs.rejected.setdefault(shape, Rejections())
        rejected.count += until > rejected.until  # several at once are one
        rejected.until, rejected.why = until, why
        self.ledger.allocs.taken.pop(shape, None)

    def _tell(self, at: int, what: str) -> None:
        self.ledger.allocs.told.append((at, what))


def backoff_until(ledger: Ledger, shape: str, now: int) -> int:
    """Until when a shape is left alone after one more rejection."""
    policy, rejected = ledger.allocs.policy, ledger.allocs.rejected.get(shape)
    if rejected is not None and now < rejected.until:
        return rejected.until
    times = min(rejected.count if rejected is not None else 0, 40)
    return now + min(policy.backoff_ns << times, max(policy.backoff_ns, policy.backoff_max_ns))


def refused(ledger: Ledger, alloc: int, why: str, now: int) -> list[ev.Event]:
    """Slurm will never take this request as it is."""
    entry = ledger.allocs.entries.get(alloc)
    if entry is None or entry.shape is None:
        return []
    return [ev.AllocationRefused(now, alloc, why, backoff_until(ledger, entry.shape.name, now))]


def found(ledger: Ledger, fact: ev.NodeJoined) -> list[ev.Event]:
    """What a node's joining says of its allocation."""
    allocs, name = ledger.allocs, fact.spec.allocation
    number = allocs.by_job.get(name)
    if not name:
        return []
    if number is None:
        ours = name in (allocs.own, f"{allocs.own}+0")
        return [ev.AllocationHeld(fact.at, allocs.next_alloc, 0, job=name, own=ours)]
    if allocs.entries[number].state in (AllocState.ASKED, AllocState.PENDING):
        return [ev.AllocationHeld(fact.at, number, 0)]
    return []
