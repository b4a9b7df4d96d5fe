"""Pure. The part of the scheduler that knows endpoints, and the grants that clients hold of them.

Law: as the scheduler's: facts in, orders out. A grant is the lease of an action of kind GRANT, held
by its client on no node (0); it ends when its client says how the call went, cancels it, or is
lost for good: nobody else has to confirm that. What its endpoint sent back (PREEMPTED) waits again
at its old turn.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.action import Action, Kind
from ...domain.decision import Decision
from ...domain.ids import client_of
from ...domain.outcome import Outcome
from ...domain.service import MICRO, EndpointSpec, endpoint_of
from ...domain.states import ENDED, ActionState
from ..state.ledger import LeaseEntry, Ledger
from ..state.rate_limit import declared_again, full
from .rollout_facts import faltered

_LONGEST_NS = 86_400 * 10**9  # an endpoint is closed for a day at most


class QuotaFacts:
    """Handlers of the facts of endpoints."""

    ledger: Ledger
    dirty: bool

    def _endpoint_declared(self, event: ev.EndpointDeclared) -> list[Decision]:
        spec, endpoints = event.spec, self.ledger.endpoints
        old = endpoints.get(spec.name)
        endpoints[spec.name] = (full(spec, event.at) if old is None
                                else declared_again(old, spec, event.at))
        self.dirty = self.dirty or self.ledger.ready.waits("endpoint:" + spec.name)
        return []

    def _endpoint_throttled(self, event: ev.EndpointThrottled) -> list[Decision]:
        self.ledger.endpoints[event.endpoint].pushed_back(
            event.granted_at, event.at, event.until, event.pushed)
        return []

    def _count_call(self, lease: LeaseEntry, at: int, outcome: Outcome) -> None:
        """The end of what may have been a call of an endpoint, and was not sent back."""
        endpoint = endpoint_of(lease.key)
        if endpoint and outcome.state is not ActionState.PREEMPTED:
            self.ledger.endpoints[endpoint].ended(
                lease.granted_at, at, outcome.state is ActionState.COMPLETED, outcome.cost_micro)

    def _end_of_grant(self, fact: ev.ActionCancelled) -> list[ev.Event]:
        """A cancelled grant is over with that: no worker has anything to end."""
        entry = self.ledger.actions.get(fact.action)
        lease = self.ledger.leases.get(entry.lease) if entry is not None else None
        if lease is None or lease.node:
            return [fact]
        outcome = Outcome(fact.state, reason=fact.reason)
        return [fact, ev.LeaseFinished(fact.at, lease.lease, outcome, True)]


def refusal_of_grant(ledger: Ledger, action: Action) -> str:
    """Why this grant can never be given, naming the field; empty when it can."""
    name = endpoint_of(action.key)
    if name not in ledger.endpoints:
        return (f"endpoint: none is declared as {name!r}; declare it by register_endpoint or "
                f"[endpoints.{name}] in the broker's config file")
    if action.degrees != (1,) or action.mem_mib or action.gpus or action.session:
        return "cpus, mem, gpus, session: a grant of an endpoint holds none"
    return ""


def declaration(ledger: Ledger, spec: EndpointSpec, now: int) -> tuple[list[ev.Event], str]:
    """What declaring an endpoint comes to: facts, or why it is refused. The same again is nothing.
    """
    if spec.concurrency < 1 or spec.rate_micro < 0 or spec.burst_micro < MICRO:
        return [], f"endpoint {spec.name}: concurrency and burst are at least 1, rate at least 0"
    known = ledger.endpoints.get(spec.name)
    if known is not None and known.spec == spec:
        return [], ""
    if known is not None and (known.busy or ledger.ready.waits("endpoint:" + spec.name)):
        return [], (f"endpoint {spec.name}: it is in use with {_shown(known.spec)}: declare it the "
                    "same, or when nothing of it waits or runs")
    return [ev.EndpointDeclared(now, spec)], ""


def _shown(spec: EndpointSpec) -> str:
    rate = f"rate {spec.rate_micro / MICRO:g}/s" if spec.rate_micro else "no rate"
    return f"concurrency {spec.concurrency}, {rate}, a bucket of {spec.burst_micro / MICRO:g}"


def held_by_client(ledger: Ledger, action: int) -> LeaseEntry | None:
    """The grant that an action holds now."""
    entry = ledger.actions.get(action)
    lease = ledger.leases.get(entry.lease) if entry is not None else None
    return lease if lease is not None and not lease.node else None


def told_by_client(ledger: Ledger, client: int, action: int, lease: int, outcome: Outcome,
                   now: int) -> list[ev.Event]:
    """The facts in a client's word about one of its grants; none if it is late, or not its own.
    With `lease` 0 it wants the action no more, granted or not."""
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
    """The end of a lease, and before it what its endpoint said if that pushed back. Only a trainer
    and its functions are asked: a sandbox's word closes no endpoint."""
    lease, outcome = ledger.leases[fact.lease], fact.outcome
    entry = ledger.actions.get(lease.action)
    endpoint = endpoint_of(lease.key)
    if not outcome.pushed or entry is None or entry.action.kind is Kind.EXEC:
        return [fact]
    if not endpoint:
        return faltered(ledger, fact)
    until = fact.at + min(_LONGEST_NS, max(0, outcome.retry_after_ns))
    return [ev.EndpointThrottled(fact.at, endpoint, until, lease.granted_at, outcome.pushed), fact]
