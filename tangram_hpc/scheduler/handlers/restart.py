"""Pure. Handlers of events about the broker itself: its starts and its stalls.

A broker that starts again continues an earlier one's journal. The nodes, sessions and clients of
the earlier broker end by events of their own, which `consequences` names. Estimates of run times
and the quotas of endpoints stay.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.decision import Decision
from ..policy.session_life import stalled
from ..state.scheduler_state import SchedulerState


def on_broker_started(state: SchedulerState, event: ev.BrokerStarted) -> list[Decision]:
    """Counts a start of the broker and takes over its job and settings."""
    ledger = state.ledger
    ledger.starts += 1
    ledger.block_max = event.block_max
    ledger.complete = False  # the nodes of the job have yet to join
    ledger.told_ends.clear()  # a requeued job ends at another time
    ledger.allocs.own = event.job
    state.dirty = True
    return []


def on_broker_stalled(state: SchedulerState, event: ev.BrokerStalled) -> list[Decision]:
    """Extends grace and idle times by the time in which the broker did not run."""
    stalled(state.ledger, event)
    return []
