"""Pure. Handlers of events about endpoints, and of the ends of their calls.

A grant of an endpoint is the lease of an action of kind GRANT. Its client holds it, on no node (0).
It ends when the client reports how the call went, cancels it, or expires: no worker has to
confirm that. A call that its endpoint sent back (PREEMPTED) waits again under its old order tag.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.decision import Decision
from ...domain.outcome import Outcome
from ...domain.service import endpoint_of
from ...domain.states import ActionState
from ..state.ledger import LeaseEntry, Ledger
from ..state.rate_limit import declared_again, full
from ..state.scheduler_state import SchedulerState
from ..state.tenant_use import LAG_NS

# Where the rate is the limit few calls run at once, and what these hold in LAG_NS is less than one
# call costs. So a tenant may be owed what all concurrent calls hold in LAG_NS, or so many calls.
_LAG_CALLS = 8


def on_endpoint_declared(state: SchedulerState, event: ev.EndpointDeclared) -> list[Decision]:
    """Adds an endpoint, or changes the quota of an endpoint that no call uses now."""
    spec, endpoints = event.spec, state.ledger.endpoints
    old = endpoints.get(spec.name)
    endpoints[spec.name] = (full(spec, event.at) if old is None
                            else declared_again(old, spec, event.at))
    use = state.ledger.tenants.use("endpoint:" + spec.name)
    use.lag_ns = max(LAG_NS * spec.concurrency, _LAG_CALLS * endpoints[spec.name].least_ns)
    state.dirty = state.dirty or state.ledger.ready.waits("endpoint:" + spec.name)
    return []


def on_endpoint_throttled(state: SchedulerState, event: ev.EndpointThrottled) -> list[Decision]:
    """Stops granting calls of an endpoint for a while, because it refused one."""
    state.ledger.endpoints[event.endpoint].pushed_back(
        event.granted_at, event.at, event.until, event.pushed)
    return []


def count_call(ledger: Ledger, lease: LeaseEntry, at: int, outcome: Outcome) -> None:
    """Counts the end of a lease if it was an endpoint call that the endpoint had carried out."""
    endpoint = endpoint_of(lease.key)
    if endpoint and outcome.state is not ActionState.PREEMPTED:
        ledger.endpoints[endpoint].ended(
            lease.granted_at, at, outcome.state is ActionState.COMPLETED, outcome.cost_micro)
