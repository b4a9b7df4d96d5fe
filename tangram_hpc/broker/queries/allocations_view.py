"""Pure. The view of allocations: held, requested and refused ones, and recent decisions with
reasons.
"""

from __future__ import annotations

from typing import Any

from ...scheduler.autoscale.alloc_demand import loads
from ...scheduler.scheduler import Scheduler
from ...scheduler.state.alloc_ledger import AllocEntry, AllocLedger
from ..satellites import Satellites

_S = 1e9


def allocations(scheduler: Scheduler, satellites: Satellites, now: int) -> dict[str, Any]:
    """Returns the view; empty if the user allows no satellites and no allocation has changed."""
    ledger = scheduler.ledger
    allocs, policy = ledger.allocs, ledger.allocs.policy
    if not (policy.max_nodes or policy.idle_ns or allocs.asks):
        return {}
    return {
        "max_nodes": policy.max_nodes, "nodes": allocs.nodes_live(),
        "max_core_h": policy.max_core_ns / 3600 / _S, "core_h": _used(allocs, now) / 3600 / _S,
        "promised_core_h": allocs.core_ns() / 3600 / _S,
        "target_s": policy.target_ns / _S, "idle_release_s": policy.idle_ns / _S,
        "min_nodes": policy.min_nodes, "verdict": scheduler.state.elastic.verdict,
        "trouble": satellites.troubles, "asked": allocs.asks, "ended": allocs.ended,
        "allocations": [_entry(scheduler, satellites, e, now) for e in allocs.entries.values()],
        "demand": [
            {"kind": kind, "component": component, "waiting": load.waiting, "bound": load.bound,
             "sessions": load.sessions, "mem_mib": load.mem_mib, "held": load.held,
             "needs_s": load.work_ns / max(1, load.held) / _S if load.held else None}
            for (kind, component), load in loads(ledger, now).items()
            if load.held or load.waiting or load.sessions],
        "left_alone": [
            {"name": name, "for_s": (r.until - now) / _S, "rejections": r.count, "why": r.why}
            for name, r in allocs.rejected.items() if now < r.until],
        "decisions": [{"ago_s": (now - at) / _S, "what": what} for at, what in allocs.told],
    }


def _used(allocs: AllocLedger, now: int) -> int:
    """Returns the core-ns that satellites have used up to now."""
    return allocs.ended_core_ns + sum(e.cpus * max(0, (e.empty_at or now) - e.since)
                                      for e in allocs.satellites() if e.since)


def _entry(scheduler: Scheduler, satellites: Satellites, e: AllocEntry, now: int
           ) -> dict[str, Any]:
    nodes = scheduler.ledger.nodes
    idle = [scheduler.state.elastic.idle_ns(n, now) for n in e.nodes]
    return {
        "alloc": e.alloc, "job": e.job, "own": e.own, "state": e.state.value,
        "name": e.shape.name if e.shape is not None else "",
        "partition": e.shape.partition if e.shape is not None else "",
        "nodes": [nodes[n].spec.name for n in e.nodes], "cpus": e.cpus,
        "for_s": (now - (e.since or e.asked_at)) / _S, "idle_s": min(idle, default=0) / _S,
        "slurm_reason": satellites.reasons.get(e.alloc, ""), "why": e.why,
    }
