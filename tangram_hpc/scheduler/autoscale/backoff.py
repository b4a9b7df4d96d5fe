"""Decides how long a satellite shape is not requested again after a rejection. Pure.

A shape is rejected when Slurm refuses a request for it, or when a request waits for too long in
Slurm's queue. The wait until the next request doubles with each rejection in a row, up to a bound.
A node that joins ends the row.
"""

from __future__ import annotations

from ...domain import event as ev
from ..state.ledger import Ledger


def backoff_until(ledger: Ledger, shape: str, now: int) -> int:
    """Returns when a shape may be requested again after one more rejection, in epoch ns."""
    policy, rejected = ledger.allocs.policy, ledger.allocs.rejected.get(shape)
    if rejected is not None and now < rejected.until:
        return rejected.until
    times = min(rejected.count if rejected is not None else 0, 40)
    return now + min(policy.backoff_ns << times, max(policy.backoff_ns, policy.backoff_max_ns))


def refused(ledger: Ledger, alloc: int, why: str, now: int) -> list[ev.Event]:
    """Returns the event of Slurm's final refusal of a satellite; none for an unknown satellite."""
    entry = ledger.allocs.entries.get(alloc)
    if entry is None or entry.shape is None:
        return []
    return [ev.AllocationRefused(now, alloc, why, backoff_until(ledger, entry.shape.name, now))]
