"""Pure. Handlers of events about allocations: requested, granted and given back.

Whether more or less should be held is decided in `scheduler/autoscale`; this module handles what
follows from that decision, and what Slurm reports about an allocation.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.decision import AskAllocation, Decision, EndAllocation
from ...domain.states import AllocState
from ..state.alloc_ledger import AllocEntry, AllocLedger, Rejections
from ..state.ledger import Ledger
from ..state.scheduler_state import SchedulerState
from ..state.transitions import ALLOC_MOVES, move


def on_allocations_allowed(state: SchedulerState, event: ev.AllocationsAllowed) -> list[Decision]:
    """Sets the user's policy: how many nodes and core-hours, of which shapes."""
    state.ledger.allocs.policy = event.policy
    return []


def on_allocation_asked(state: SchedulerState, event: ev.AllocationAsked) -> list[Decision]:
    """Adds a satellite and lets the driver request it from Slurm."""
    allocs, shape = state.ledger.allocs, event.shape
    assert allocs.room(shape) >= 1, f"{event} is beyond what the user allows"
    allocs.entries[event.alloc] = AllocEntry(event.alloc, shape, event.at, why=event.reason)
    allocs.next_alloc = event.alloc + 1
    allocs.asks += 1
    _note(allocs, event.at, f"asked for {shape.name} (satellite {event.alloc}): {event.reason}")
    return [AskAllocation(event.alloc, shape)]


def on_allocation_queued(state: SchedulerState, event: ev.AllocationQueued) -> list[Decision]:
    """Takes over the job id under which Slurm accepted a satellite."""
    allocs = state.ledger.allocs
    entry = allocs.entries.get(event.alloc)
    if entry is None:
        return []
    known = allocs.by_job.get(event.job)
    if known is not None:  # its worker joined before sbatch had answered
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
    return [_end_order(entry)]  # the request was withdrawn before its job was known


def on_allocation_refused(state: SchedulerState, event: ev.AllocationRefused) -> list[Decision]:
    """Removes a satellite that Slurm did not accept. Its shape is not requested again for a while.
    """
    allocs = state.ledger.allocs
    entry = allocs.entries.get(event.alloc)
    if entry is None:
        return []
    assert entry.shape is not None
    _reject(allocs, entry.shape.name, event.reason, event.until)
    _note(allocs, event.at, f"satellite {event.alloc} ({entry.shape.name}) was refused: "
                             f"{event.reason}")
    _forget(allocs, entry, event.at)
    return []


def on_allocation_held(state: SchedulerState, event: ev.AllocationHeld) -> list[Decision]:
    """Marks an allocation as granted; adds one that the broker did not request."""
    allocs = state.ledger.allocs
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


def on_allocation_released(state: SchedulerState, event: ev.AllocationReleased) -> list[Decision]:
    """Lets the driver end an allocation, or withdraw its request."""
    allocs = state.ledger.allocs
    entry = allocs.entries.get(event.alloc)
    if entry is None:
        return []
    what = "gave back" if entry.joined else "withdrew"
    name = f"satellite {entry.alloc} ({entry.shape.name})" if entry.shape else entry.job
    _note(allocs, event.at, f"{what} {name}: {event.reason}")
    entry.state = move(ALLOC_MOVES, entry.state, AllocState.ENDING, event)
    entry.why = event.reason
    if event.until and entry.shape is not None:
        _reject(allocs, entry.shape.name, event.reason, event.until)
    return [_end_order(entry)]


def on_allocation_ended(state: SchedulerState, event: ev.AllocationEnded) -> list[Decision]:
    """Removes an allocation that is over in Slurm."""
    allocs = state.ledger.allocs
    entry = allocs.entries.get(event.alloc)
    if entry is None:
        return []
    if entry.shape is not None and event.reason:
        _note(allocs, event.at, f"satellite {event.alloc} ({entry.shape.name}) ended: "
                             f"{event.reason}")
    _forget(allocs, entry, event.ended or event.at)
    state.ledger.told_ends.pop(entry.job, None)
    return []


def node_came(ledger: Ledger, event: ev.NodeJoined) -> None:
    """Adds a node that joined to its allocation, if the allocation is known."""
    allocs = ledger.allocs
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


def node_left(ledger: Ledger, event: ev.NodeLost) -> None:
    """Takes a lost node from its allocation."""
    allocs = ledger.allocs
    number = allocs.by_job.get(ledger.nodes[event.node].spec.allocation)
    entry = allocs.entries.get(number or 0)
    if entry is None or event.node not in entry.nodes:
        return
    del entry.nodes[event.node]
    if not entry.nodes:
        entry.empty_at = event.at


def _end_order(entry: AllocEntry) -> EndAllocation:
    return EndAllocation(entry.alloc, entry.job, tuple(entry.nodes), entry.why)


def _forget(allocs: AllocLedger, entry: AllocEntry, at: int) -> None:
    entry.state = move(ALLOC_MOVES, entry.state, AllocState.ENDED, entry)
    entry.ended_at = at
    if entry.shape is not None:
        allocs.ended += 1
        allocs.ended_core_ns += entry.core_ns
    del allocs.entries[entry.alloc]
    allocs.by_job.pop(entry.job, None)


def _reject(allocs: AllocLedger, shape: str, why: str, until: int) -> None:
    rejected = allocs.rejected.setdefault(shape, Rejections())
    rejected.count += until > rejected.until  # rejections at the same time count once
    rejected.until, rejected.why = until, why
    allocs.taken.pop(shape, None)


def _note(allocs: AllocLedger, at: int, what: str) -> None:
    allocs.told.append((at, what))
