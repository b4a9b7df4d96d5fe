"""Pure. The view `top`: what a job does now, in one small reply, as `tangram top` shows it.

`tangram top` asks every second, so this view must cost next to nothing. It counts waiting actions
by their queues and not one by one, and lists only what fits on a screen: `ROWS_MAX` nodes, running
actions, services and endpoints, with the number of all.
"""

from __future__ import annotations

import heapq
from typing import Any

from ...domain.ids import client_of, show
from ...domain.service import endpoint_of
from ...domain.states import NodeState
from ...scheduler.scheduler import Scheduler
from ...scheduler.state.ledger import LeaseEntry, NodeEntry
from .recent_actions import RecentActions
from .rollouts_view import rollouts
from .status import endpoint_view, services
from .wait_reasons import WaitReasons

ROWS_MAX = 50


def top(scheduler: Scheduler, recent: RecentActions, job: str, now: int) -> dict[str, Any]:
    """Returns the view.

    Args:
        recent: the actions that ended lately.
        now: the broker's time in epoch ns.
    """
    ledger = scheduler.ledger
    up, held = ledger.up_nodes(), ledger.held_nodes()
    running = [lease for lease in ledger.leases.values() if lease.begun]
    return {
        "job": job, "placer": scheduler.state.placer.name, "now_ns": now,
        "cpus": sum(len(n.cores.units) for n in up), "cpus_free": sum(n.cores.free for n in up),
        "gpus": sum(len(n.gpus.units) for n in up), "gpus_free": sum(n.gpus.free for n in up),
        "mem_mib": sum(n.spec.mem_mib for n in up), "mem_mib_free": sum(n.free_mem_mib for n in up),
        "clients": len(ledger.clients), "sessions": len(ledger.sessions),
        "sessions_waiting": len(ledger.session_queue), "running": len(running),
        "calls": sum(1 for lease in running if endpoint_of(lease.key)),
        "reasons": dict(WaitReasons(scheduler, now).counts().most_common(ROWS_MAX)),
        "recent": recent.view(now),
        "nodes": len(held), "node_rows": [_node(n) for n in _fullest(held)],
        "running_rows": [_running(scheduler, lease, now) for lease in
                         heapq.nsmallest(ROWS_MAX, running, key=_most_first)],
        "services": services(scheduler, job, now)["services"][:ROWS_MAX],
        "endpoints": [endpoint_view(ledger, e, now)
                      for e in list(ledger.endpoints.values())[:ROWS_MAX]],
        "rollouts": [_pool(p) for p in rollouts(scheduler, job, now)["rollouts"][:ROWS_MAX]],
    }


def _fullest(nodes: list[NodeEntry]) -> list[NodeEntry]:
    """Returns the nodes with the smallest share of free cores."""
    return heapq.nsmallest(ROWS_MAX, nodes,
                           key=lambda n: (n.cores.free / max(1, len(n.cores.units)), n.node))


def _node(n: NodeEntry) -> dict[str, Any]:
    return {"name": n.spec.name, "state": n.state.value, "component": n.spec.component,
            "cpus": len(n.cores.units),
            "cpus_free": n.cores.free if n.state is NodeState.UP else 0,
            "gpus": len(n.gpus.units), "gpus_free": n.gpus.free, "mem_mib": n.spec.mem_mib,
            "mem_mib_free": n.free_mem_mib, "sessions": len(n.sessions), "leases": len(n.leases)}


def _most_first(lease: LeaseEntry) -> tuple[int, int, int]:
    """The order of running actions: most units first, then those that began first."""
    return (-max(lease.units, len(lease.gpus)), lease.granted_at, lease.lease)


def _running(scheduler: Scheduler, lease: LeaseEntry, now: int) -> dict[str, Any]:
    ledger = scheduler.ledger
    entry = ledger.actions.get(lease.action)  # None while an ended one is cleaned up
    client = ledger.clients.get(client_of(lease.action))
    return {"action": show(lease.action), "name": entry.action.name if entry else "",
            "state": entry.state.value if entry else lease.state.value,
            "client_name": client.name if client is not None else "",
            "key": lease.key, "ncpus": len(lease.cores), "gpus": len(lease.gpus),
            "node": ledger.place(lease.node).spec.name,
            "elapsed_ns": now - lease.granted_at}


def _pool(pool: dict[str, Any]) -> dict[str, Any]:
    """What a screen has room for of a rollout pool."""
    return {"name": pool["name"], "waiting": pool["waiting"], "turns": pool["turns"],
            "trajectories": pool["trajectories"],
            "loads": [[s["name"], s["load"], s["running_max"] + s["queue_max"]]
                      for s in pool["services"]]}
