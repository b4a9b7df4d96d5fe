"""Pure. The view `queue`: a row for each action that runs or waits, as `tangram queue` prints them.

The client says what it wants in the query's argument, in the form of a URL's query string
(`limit=100&state=PENDING&name=x`). The reply has at most `ROWS_MAX` rows and says how many more
there are, so that a queue of any length costs the broker one look at each action and some 20
microseconds for each row. Keys that `tangram acct --json` has, too, mean the same here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from ...domain.action import Action
from ...domain.ids import client_of, parse, show
from ...domain.service import service_of
from ...domain.states import ENDED, ActionState
from ...scheduler.scheduler import Scheduler
from ...scheduler.state.ledger import ActionEntry, Ledger, NodeEntry
from .wait_reasons import WaitReasons

ROWS_MAX = 10_000
_ASK_MAX = 1_000  # values of one field
_FIELDS = ("limit", "state", "name", "session", "action", "client", "node", "partition")


@dataclass(frozen=True)
class QueueAsk:
    """Which actions a client asks for. An empty set stands for all.

    Attributes:
        limit: the most rows that it wants.
        states: names of states.
        names: classes of actions.
        sessions: ids of sessions; the actions in them are chosen.
        actions: ids of actions.
        clients: numbers of clients.
        nodes: names of nodes; an action that waits is on none.
        partitions: components of the nodes, or those for which an action waits.
    """

    limit: int
    states: frozenset[str]
    names: frozenset[str]
    sessions: frozenset[int]
    actions: frozenset[int]
    clients: frozenset[int]
    nodes: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()

    def wants(self, entry: ActionEntry) -> bool:
        """Returns whether the client asks for this action."""
        action = entry.action
        return ((not self.states or entry.state.value in self.states)
                and (not self.names or action.name in self.names)
                and (not self.sessions or action.session in self.sessions)
                and (not self.actions or action.id in self.actions)
                and (not self.clients or client_of(action.id) in self.clients))


def parse_ask(argument: str) -> QueueAsk:
    """Parses the argument of the query.

    Raises:
        ValueError: a field is unknown or has a wrong value.
    """
    given = parse_qs(argument, keep_blank_values=True, strict_parsing=bool(argument),
                     max_num_fields=_ASK_MAX)
    if unknown := set(given) - set(_FIELDS):
        raise ValueError(f"{min(unknown)!r} is not a field")
    limit = int(given.get("limit", ["1000"])[-1])
    if limit < 0:
        raise ValueError("limit is negative")
    return QueueAsk(min(limit, ROWS_MAX), frozenset(given.get("state", ())),
                    frozenset(given.get("name", ())),
                    frozenset(map(parse, given.get("session", ()))),
                    frozenset(map(parse, given.get("action", ()))),
                    frozenset(map(int, given.get("client", ()))), frozenset(given.get("node", ())),
                    frozenset(given.get("partition", ())))


def queue(scheduler: Scheduler, argument: str, now: int) -> dict[str, Any]:
    """Returns the rows that a client asks for: what has units, in the order in which they were
    granted, then what waits, in the order of submission.

    Args:
        argument: what the client asks for; see `parse_ask`.
        now: the broker's time in epoch ns.
    """
    try:
        ask = parse_ask(argument)
    except ValueError as error:
        return {"error": f"queue: {error}"}
    rows: list[dict[str, Any]] = []
    reasons, found = WaitReasons(scheduler, now), 0
    for entry in _open_actions(scheduler, ask):
        if (ask.nodes or ask.partitions) and not _is_there(scheduler, entry, ask):
            continue
        found += 1
        if len(rows) < ask.limit:
            rows.append(_row(scheduler, entry, reasons, now))
    return {"queue": rows, "more": found - len(rows)}


def _open_actions(scheduler: Scheduler, ask: QueueAsk) -> Iterator[ActionEntry]:
    ledger = scheduler.ledger
    if ask.actions:
        named = [ledger.actions[a] for a in sorted(ask.actions) if a in ledger.actions]
        yield from (e for e in named if e.state not in ENDED and ask.wants(e))
        return
    for lease in ledger.leases.values():
        running = ledger.actions.get(lease.action)  # None while an ended one is cleaned up
        if running is not None and running.lease == lease.lease and ask.wants(running):
            yield running
    if ask.states and ActionState.PENDING.value not in ask.states:
        return
    for entry in ledger.actions.values():
        if entry.state is ActionState.PENDING and ask.wants(entry):
            yield entry


def _is_there(scheduler: Scheduler, entry: ActionEntry, ask: QueueAsk) -> bool:
    """Returns whether an action is on one of the nodes and components that are asked for."""
    node = _node_of(scheduler.ledger, entry)
    return ((not ask.nodes or (node is not None and node.spec.name in ask.nodes))
            and (not ask.partitions
                 or _component_of(scheduler.ledger, entry, node) in ask.partitions))


def _gpus_asked(action: Action) -> int:
    """Returns the fewest GPUs that an action asks for: a call needs a block of its service."""
    return action.degrees[0] if service_of(action.key) else action.gpus


def _node_of(ledger: Ledger, entry: ActionEntry) -> NodeEntry | None:
    """Returns the node on which an action is; None while it waits."""
    lease = ledger.leases.get(entry.lease)
    return ledger.nodes.get(lease.node) if lease is not None else None


def _component_of(ledger: Ledger, entry: ActionEntry, node: NodeEntry | None) -> str:
    """Returns the component of an action's node, or of the one for which it or its session waits;
    empty for any."""
    session = ledger.sessions.get(entry.action.session)
    if node is None and session is not None:
        node = ledger.nodes.get(session.node)
        if node is None:
            return session.spec.component
    return node.spec.component if node is not None else entry.action.component


def _row(scheduler: Scheduler, entry: ActionEntry, reasons: WaitReasons, now: int
         ) -> dict[str, Any]:
    ledger, action = scheduler.ledger, entry.action
    lease = ledger.leases.get(entry.lease)
    client = ledger.clients.get(client_of(action.id))
    session = ledger.sessions.get(action.session)
    start = lease.granted_at if lease is not None and lease.begun else 0
    node = _node_of(ledger, entry)
    return {
        "action": show(action.id), "name": action.name, "kind": action.kind.value,
        "key": action.key, "state": entry.state.value, "client": client_of(action.id),
        "client_name": client.name if client is not None else "",
        "session": show(action.session),
        "session_name": session.spec.name if session is not None else "",
        "trajectory": action.trajectory_name,
        "node": node.spec.name if node is not None else "",
        "component": _component_of(ledger, entry, node),
        "submit_ns": entry.submitted_at, "start_ns": start,
        "planned_ns": (start or now) - entry.submitted_at,
        "elapsed_ns": now - start if start else 0, "timeout_ns": action.timeout_ns,
        "req_cpus": action.degrees[0] if action.key == "cpu" else 0,
        "ncpus": len(lease.cores) if lease is not None else 0,
        "gpus": len(lease.gpus) if lease is not None else _gpus_asked(action),
        "mem_mib": action.mem_mib, "attempt": entry.attempt,
        "reason": reasons.of(entry) if entry.state is ActionState.PENDING else "",
    }
