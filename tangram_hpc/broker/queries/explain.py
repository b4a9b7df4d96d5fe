"""Pure. `tangram explain`: why an action or session waits, what is in front of it, and its
forecast.

Nothing here changes the state. Lists are cut to a length that a person can read, and their full
lengths are given, too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...domain.action import Kind
from ...domain.ids import client_of, parse, show
from ...domain.states import ENDED, ActionState, SessionState
from ...scheduler.forecast import expected_end, forecast, source
from ...scheduler.intervals import LEVEL, Interval, end_interval, start_interval
from ...scheduler.placement.eligible_nodes import eligible_nodes, session_reason
from ...scheduler.policy.admission import could_run, ending_reason, reason
from ...scheduler.scheduler import Scheduler
from ...scheduler.state.ledger import ActionEntry, LeaseEntry, SessionEntry
from ...scheduler.state.queue import GPU, pool_of
from ...scheduler.state.tenant_use import MEMORY
from .rollouts_view import turn_view
from .status import shared_session

_LIST_MAX = 8


def explain(scheduler: Scheduler, now: int, argument: str) -> dict[str, Any]:
    """Returns all that is known of an action or session; `{"error": ...}` if none has this id.

    Args:
        now: the broker's time in epoch ns.
        argument: the id as people write it, such as `2.17`.
    """
    try:
        number = parse(argument)
    except ValueError:
        return {"error": f"{argument!r} is no action id; write CLIENT.NUMBER, such as 2.17"}
    if (session := scheduler.ledger.sessions.get(number)) is not None:
        return _session(scheduler, session, now)
    entry = scheduler.ledger.actions.get(number)
    if entry is None:
        return {"error": f"no action {argument} is waiting or running"}
    told: dict[str, Any] = {
        "id": show(entry.action.id), "name": entry.action.name, "state": entry.state.value,
        "key": entry.action.key, "degrees": list(entry.action.degrees),
        "session": show(entry.action.session), "attempt": entry.attempt,
    } | turn_view(scheduler, entry, now)
    if entry.state in ENDED:
        assert entry.outcome is not None
        return told | {"exit_code": entry.outcome.exit_status, "signal": entry.outcome.signal,
                       "exec_s": entry.outcome.exec_ns / 1e9, "why": entry.outcome.reason}
    if entry.state is ActionState.PENDING:
        return told | _waits(scheduler, entry, now)
    return told | _runs(scheduler, scheduler.ledger.leases[entry.lease], now)


def _session(scheduler: Scheduler, session: SessionEntry, now: int) -> dict[str, Any]:
    ledger, spec = scheduler.ledger, session.spec
    told: dict[str, Any] = {
        "id": show(spec.id), "name": spec.name, "session_state": session.state.value,
        "mem_mib": spec.mem_mib, "origin": show(spec.origin) if spec.origin else "",
        "actions_waiting": len(session.waiting), "actions_running": len(session.leases),
    }
    if spec.shared:
        told["shared"] = shared_session(ledger, session, now)
    if session.state is not SessionState.WAITING:
        return told | {"node": ledger.nodes[session.node].spec.name}
    nodes = eligible_nodes(ledger, spec)
    return told | {
        "reason": session_reason(ledger, session, scheduler.state.placer.reserve),
        "waited_s": (now - session.requested_at) / 1e9,
        "ahead": _sessions_ahead(scheduler, spec.id, now), "nodes": len(nodes),
        "most_free_mib": max((n.free_mem_mib for n in nodes), default=0),
    }


def _sessions_ahead(scheduler: Scheduler, session: int, now: int) -> int:
    """Returns how many sessions placers look at before one; all that wait if its tenant's limits
    leave it out.
    """
    ledger = scheduler.ledger
    turns = ledger.tenants.turns(MEMORY, now)
    walk = ledger.session_queue.walk(turns, lambda e: ledger.sessions[e].spec.mem_mib)
    for ahead, each in enumerate(walk):
        if each == session:
            return ahead
    return len(ledger.session_queue) - 1


def _runs(scheduler: Scheduler, lease: LeaseEntry, now: int) -> dict[str, Any]:
    action = scheduler.ledger.actions[lease.action].action
    end = expected_end(scheduler.ledger, lease, now)
    return {
        "node": scheduler.ledger.place(lease.node).spec.name, "units": lease.units,
        "cores": list(lease.cores), "gpus": list(lease.gpus),
        "runs_s": (now - lease.granted_at) / 1e9, "resizes": len(lease.grants) - 1,
        "ends_in_s": _seconds(end, now),
        "ends_between_s": _between(end_interval(scheduler.ledger, lease, now), now),
        "level": LEVEL, "rests_on": source(scheduler.ledger, action),
    }


def _seconds(at: int | None, now: int) -> float | None:
    return None if at is None else (at - now) / 1e9


def _between(bounds: Interval | None, now: int) -> list[float] | None:
    return None if bounds is None else [(at - now) / 1e9 for at in bounds]


def _waits(scheduler: Scheduler, entry: ActionEntry, now: int) -> dict[str, Any]:
    ledger, action = scheduler.ledger, entry.action
    told = forecast(scheduler, action.id, now)
    if told.at is None:
        start: dict[str, Any] = {"in_s": None, "why": told.why}
    else:
        start = {"in_s": (told.at - now) / 1e9, "units": told.units,
                 "node": ledger.place(told.node).spec.name}
    bounds = start_interval(scheduler, action.id, now, told)
    start |= {"between_s": _between(bounds.start, now), "why_no_interval": bounds.why,
              "rests_on": dict(sorted(told.rests_on.items()))}
    ahead = _ahead(scheduler, entry, now)
    holders = _holders(scheduler, entry, now)
    return {
        "reason": reason(ledger, entry, scheduler.state.placer.reserve, now),
        "ending": ending_reason(ledger, entry, now),
        "waited_s": (now - entry.submitted_at) / 1e9,
        "ahead": len(ahead), "ahead_sessions": len({e.action.session for e in ahead} - {0}),
        "ahead_shapes": [{"name": name, "key": key, "degrees": list(degrees), "count": count}
                         for (name, key, degrees), count in _shapes(ahead)],
        "holders": len(holders), "held_by": holders[:_LIST_MAX], "start": start,
        "end": {"in_s": _seconds(told.end, now), "between_s": _between(bounds.end, now)},
        "level": LEVEL,
    }


def _shapes(ahead: list[ActionEntry]) -> list[tuple[tuple[str, str, tuple[int, ...]], int]]:
    shapes = Counter((e.action.name, e.action.key, e.action.degrees) for e in ahead)
    return shapes.most_common(_LIST_MAX)


def _ahead(scheduler: Scheduler, entry: ActionEntry, now: int) -> list[ActionEntry]:
    """Returns the actions in front: those of the same session while it is busy or not open, else
    those in the same pool of units.
    """
    ledger, action = scheduler.ledger, entry.action
    session = ledger.sessions.get(action.session)
    if action.id not in ledger.ready:
        earlier = []
        for other in session.waiting if session is not None else ():
            if other == action.id:
                break
            earlier.append(ledger.actions[other])
        return earlier
    pool = pool_of(action.key, action.degrees[-1])
    turns = ledger.tenants.turns(pool, now)
    walk, before = ledger.ready.walk(pool, turns), []
    while (head := walk.head()) is not None and head[0] != action.id:
        before.append(ledger.actions[head[0]])
        if turns is not None:
            turns.charge(turns.tenant_of(client_of(head[0])), head[1].degrees[0])
        walk.next()
    return before


def _holders(scheduler: Scheduler, entry: ActionEntry, now: int) -> list[dict[str, Any]]:
    """Returns the leases on units that the action could run on, ordered by their expected end."""
    ledger, action = scheduler.ledger, entry.action
    pool = pool_of(action.key, action.degrees[-1])
    of_gpus = pool == GPU or action.gpus > 0
    found: list[tuple[float, int, dict[str, Any]]] = []
    for lease in ledger.leases.values():
        if lease.action not in ledger.actions:
            continue  # it has ended and is forgotten, while its node still cleans up
        node, of = ledger.place(lease.node), ledger.actions[lease.action].action
        # calls of services and commands with `gpus` are in two pools, and hold the same GPUs
        if pool_of(of.key, of.degrees[-1]) != pool and not (of_gpus and lease.gpus):
            continue
        if action.kind is not Kind.GRANT and not could_run(ledger, node, action):
            continue
        if node.draining and not action.session:
            continue  # nothing new is lent there
        if action.id not in ledger.ready and lease.session != action.session:
            continue  # the action waits for its own session, not for units
        end = expected_end(ledger, lease, now)
        found.append((end if end is not None else float("inf"), lease.lease, {
            "id": show(lease.action), "name": of.name, "session": show(lease.session),
            "node": node.spec.name, "units": lease.units, "ends_in_s": _seconds(end, now)}))
    return [told for _, _, told in sorted(found, key=lambda x: x[:2])]
