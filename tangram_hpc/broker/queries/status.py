"""Makes the views `info`, `nodes`, `services`, `sessions` and `pending` of a broker's state. Pure.

The views are plain values for JSON, and making them changes nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...domain.ids import client_of, parse, show
from ...domain.isolation import networks
from ...domain.service import MICRO
from ...domain.slurm import SlurmCalls
from ...domain.states import ActionState, NodeState
from ...scheduler.scheduler import Scheduler
from ...scheduler.state.ledger import ActionEntry, ClientEntry, Ledger, SessionEntry
from ...scheduler.state.rate_limit import EndpointEntry
from .wait_reasons import WaitReasons

PENDING_MAX = 1_000  # actions, and sessions, that one reply tells of


def info(scheduler: Scheduler, job: str, now: int) -> dict[str, Any]:
    """Returns the job at a glance: amounts held and free, and actions by state."""
    ledger = scheduler.ledger
    up = ledger.up_nodes()
    states = Counter(entry.state.value for entry in ledger.actions.values())
    return {
        "job": job,
        "placer": scheduler.state.placer.name,
        "nodes": len(up),
        "cpus": sum(len(n.cores.units) for n in up),
        "cpus_free": sum(n.cores.free for n in up),
        "gpus": sum(len(n.gpus.units) for n in up),
        "gpus_free": sum(n.gpus.free for n in up),
        "mem_mib": sum(n.spec.mem_mib for n in up),
        "mem_mib_free": sum(n.free_mem_mib for n in up),
        "clients": len(ledger.clients),
        "sessions": len(ledger.sessions),
        "sessions_waiting": len(ledger.session_queue),
        "sessions_ended": ledger.sessions_seen - len(ledger.sessions),
        "leases_granted": ledger.next_lease - 1,
        "actions": dict(sorted(states.items())),
        "endpoints": [endpoint_view(ledger, e, now) for e in ledger.endpoints.values()],
    }


def endpoint_view(ledger: Ledger, entry: EndpointEntry, now: int) -> dict[str, Any]:
    """Returns an endpoint's quota as declared and as it is now; rates are calls per second."""
    spec, shards = entry.spec, ledger.ready.shards("endpoint:" + entry.spec.name)
    return {
        "name": spec.name, "concurrency": spec.concurrency, "concurrency_now": entry.concurrency,
        "rate": spec.rate_micro / MICRO, "rate_now": entry.rate_micro / MICRO,
        "burst": spec.burst_micro / MICRO, "inside": entry.busy,
        "waiting": sum(len(queue) for shard in shards for queue in shard.queues.values()),
        "throttled_s": max(0, entry.closed_until - now) / 1e9,
        "calls": entry.calls, "cost": entry.cost_micro / MICRO,
    }


def slurm_calls(calls: SlurmCalls, now: int) -> dict[str, Any]:
    """Returns the counts of the broker's calls to Slurm; it makes none for the next `closed_s`
    seconds.
    """
    return {
        "filling": calls.adapter, "submits": calls.submits, "queries": calls.queries,
        "cancels": calls.cancels, "comments": calls.comments, "failed": calls.failed,
        "refused": calls.refused, "held_back": calls.held_back,
        "closed_s": max(0, calls.closed_until_ns - now) / 1e9, "last_error": calls.last_error,
    }


def nodes(scheduler: Scheduler, job: str, now: int) -> dict[str, Any]:
    """Returns every node that ever joined."""
    return {
        "nodes": [
            {
                "node": n.node, "name": n.spec.name, "host": n.spec.host, "state": n.state.value,
                "draining": n.draining, "ends_at_ns": n.spec.ends_at_ns,
                "component": n.spec.component, "cpus": len(n.cores.units),
                "cpus_free": n.cores.free if n.state is NodeState.UP else 0,
                "gpus": len(n.gpus.units), "devices": n.spec.devices, "mem_mib": n.spec.mem_mib,
                "sessions": len(n.sessions), "leases": len(n.leases),
                "enforcement": n.spec.enforcement,
                "backends": list(n.spec.backends), "untrusted": list(n.spec.untrusted),
                "image_root": n.spec.image_root, "networks": list(networks(n.spec.untrusted,
                                                                         n.spec.open_network)),
                "why_not_open": n.spec.why_not_open,
            }
            for n in scheduler.ledger.nodes.values()
        ]
    }


def services(scheduler: Scheduler, job: str, now: int) -> dict[str, Any]:
    """Returns every declared service, and the blocks on which it is resident."""
    ledger = scheduler.ledger
    standing: dict[str, list[str]] = {}
    for node in ledger.up_nodes():
        for there in dict.fromkeys(node.gpus.resident.values()):
            block = ",".join(map(str, there.gpus))
            standing.setdefault(there.service, []).append(f"{node.spec.name}:{block}")
    return {
        "services": [
            {"name": s.name, "backend": s.backend, "degrees": list(s.degrees), "batch": s.batch,
             "parked_mib": s.weights_mib, "restore_s": s.restore_ns / 1e9,
             "stands_on": standing.get(s.name, [])}
            for s in ledger.services.values()
        ]
    }


def sessions(scheduler: Scheduler, job: str, now: int) -> dict[str, Any]:
    """Returns every shared session that is not closed, and which clients are attached to it."""
    ledger = scheduler.ledger
    return {"shared_sessions": [shared_session(ledger, ledger.sessions[number], now)
                                for number in ledger.shared.values()]}


def shared_session(ledger: Ledger, session: SessionEntry, now: int) -> dict[str, Any]:
    """Returns one shared session: whose it is, who is attached, and when it ends by itself."""
    spec = session.spec
    owner = ledger.clients[client_of(spec.id)]
    since = session.opened_at or session.requested_at
    return {
        "id": show(spec.id), "name": spec.name, "state": session.state.value,
        "node": ledger.nodes[session.node].spec.name if session.node else "",
        "owner": _client(owner), "owner_gone": not owner.uid,
        "attached": [_client(ledger.clients[number]) | {"may_close": held.may_close,
                                                        "hold": held.hold}
                     for number, held in session.attached.items()],
        "outlives": spec.outlives, "idle_s": spec.idle_ns / 1e9,
        "ttl_left_s": max(0, since + spec.ttl_ns - now) / 1e9 if spec.ttl_ns else None,
    }


def _client(entry: ClientEntry) -> dict[str, Any]:
    return {"client": entry.client, "name": entry.name}


def pending(scheduler: Scheduler, job: str, now: int) -> dict[str, Any]:
    """Returns the actions and sessions that wait, with the reason and the time for which each has
    waited: the first `PENDING_MAX` of each. Where there are more, `pending_more` and
    `pending_sessions_more` say how many. The view `queue` has more of them.
    """
    ledger, reasons = scheduler.ledger, WaitReasons(scheduler, now)
    waiting = [e for e in ledger.actions.values() if e.state is ActionState.PENDING]
    sessions = list(ledger.session_queue)
    more = {"pending_more": len(waiting) - PENDING_MAX,
            "pending_sessions_more": len(sessions) - PENDING_MAX}
    return {
        "pending": [_pending_action(e, reasons.of(e), now) for e in waiting[:PENDING_MAX]],
        "pending_sessions": [
            {"id": show(s.spec.id), "name": s.spec.name, "mem_mib": s.spec.mem_mib,
             "reason": reasons.of_session(s), "waited_s": (now - s.requested_at) / 1e9}
            for s in map(ledger.sessions.__getitem__, sessions[:PENDING_MAX])
        ],
    } | {key: count for key, count in more.items() if count > 0}


def pending_one(scheduler: Scheduler, argument: str, now: int) -> dict[str, Any]:
    """Returns what `pending` says of one action, given as people write it; nothing if it does not
    wait. O(1), unlike `explain`, which makes a forecast.
    """
    try:
        entry = scheduler.ledger.actions.get(parse(argument))
    except ValueError:
        return {"error": f"{argument!r} is no action id; write CLIENT.NUMBER, such as 2.17"}
    if entry is None or entry.state is not ActionState.PENDING:
        return {"pending": []}
    return {"pending": [_pending_action(entry, WaitReasons(scheduler, now).of(entry), now)]}


def _pending_action(entry: ActionEntry, reason: str, now: int) -> dict[str, Any]:
    return {"id": show(entry.action.id), "name": entry.action.name, "reason": reason,
            "waited_s": (now - entry.submitted_at) / 1e9, "cpus": entry.action.degrees[0]}
