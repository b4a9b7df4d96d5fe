"""Pure. Turns a client's or worker's report on a lease into events.

A report that comes late, or from a client that does not own the action, becomes no event. If an
endpoint or service refused a call, it is closed for a while, and the call is tried again where that
may help.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.action import Kind
from ...domain.ids import client_of
from ...domain.outcome import Outcome
from ...domain.service import endpoint_of, service_of
from ...domain.states import ENDED, ActionState
from ..state.ledger import LeaseEntry, Ledger

_LONGEST_NS = 86_400 * 10**9  # how long a report can close an endpoint at most


def held_by_client(ledger: Ledger, action: int) -> LeaseEntry | None:
    """The endpoint grant that an action holds now; None if it holds none."""
    entry = ledger.actions.get(action)
    lease = ledger.leases.get(entry.lease) if entry is not None else None
    return lease if lease is not None and not lease.node else None


def reported_by_client(ledger: Ledger, client: int, action: int, lease: int, outcome: Outcome,
                   now: int) -> list[ev.Event]:
    """The events of a client's report on one of its endpoint grants; none if the report is late, or
    if the action is another client's. `lease` 0 means that the client gives the action up, granted
    or not.
    """
    entry = ledger.actions.get(action)
    if (entry is None or client_of(action) != client or entry.action.kind is not Kind.GRANT
            or entry.state in ENDED):
        return []
    if outcome.state not in ENDED:
        outcome = Outcome(ActionState.FAILED, reason=f"{outcome.state.value} is no end")
    if not lease:
        state = outcome.state if outcome.state is ActionState.TIMEOUT else ActionState.CANCELLED
        return [ev.ActionCancelled(now, action, outcome.reason, state)]
    if entry.lease != lease:
        return []
    return finished(ledger, ev.LeaseFinished(now, lease, outcome, True))


def finished(ledger: Ledger, fact: ev.LeaseFinished) -> list[ev.Event]:
    """The events of a lease's end. If its endpoint or service refused the call, the event of the
    refusal comes first. Only trainers and their functions can report a refusal; a sandbox's report
    closes no endpoint.
    """
    lease, outcome = ledger.leases[fact.lease], fact.outcome
    entry = ledger.actions.get(lease.action)
    endpoint = endpoint_of(lease.key)
    if not outcome.pushed or entry is None or entry.action.kind is Kind.EXEC:
        return [fact]
    if not endpoint:
        return restore_failed(ledger, fact)
    until = fact.at + min(_LONGEST_NS, max(0, outcome.retry_after_ns))
    return [ev.EndpointThrottled(fact.at, endpoint, until, lease.granted_at, outcome.pushed), fact]


def restore_failed(ledger: Ledger, fact: ev.LeaseFinished) -> list[ev.Event]:
    """The end of a call whose service could not be brought to its GPUs.

    If the pool has another service for the call, the failed one is closed for a while, because as
    the least loaded service it would get every turn. A turn that has attempts left is routed again.
    """
    lease = ledger.leases[fact.lease]
    entry, name = ledger.actions[lease.action], service_of(lease.key)
    turn = entry.action.turn
    if turn is None:
        return [fact]
    pool = ledger.rollouts[turn.pool]
    if not pool.others(name, turn.context):
        return [fact]
    events: list[ev.Event] = []
    if pool.load(name) >= 0:
        events.append(ev.RolloutServiceClosed(fact.at, turn.pool, name,
                                              fact.at + pool.pause_ns(name)))
    if entry.forced_outcome is not None or entry.attempt >= entry.action.attempts_max:
        return [*events, fact]
    back = Outcome(ActionState.PREEMPTED, reason=fact.outcome.reason, pushed=fact.outcome.pushed)
    return [*events, ev.LeaseFinished(fact.at, fact.lease, back, fact.clean)]
