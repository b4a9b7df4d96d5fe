"""Pure. `Scheduler`: the one deterministic scheduler. Events go in, decisions come out.

The state is one struct (`SchedulerState`). Handlers are free functions `on_<event>(state, event)`
in `handlers/`, and `_HANDLERS` says which event type goes to which of them.

Invariants: `handle(event)` is the only thing that changes the ledger, and it never plans.
`plan(now)` only reads the ledger. Each of its decisions is an event that the driver journals and
then hands back to `handle`, so that a replay of the journal never plans and cannot diverge.
`consequences(event)` names the further events that an event entails (the loss of a node ends its
leases), so that every end of an action is an event of its own and accounting is a plain fold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..domain import event as ev
from ..domain.decision import Decision
from .handlers import (
    action_events,
    allocation_events,
    attachment_events,
    client_events,
    lease_events,
    node_events,
    quota_events,
    restart,
    rollout_events,
    rollout_prior,
    service_events,
    session_events,
)
from .handlers.consequences import CONSEQUENCES
from .placement.batches import batches
from .placement.carry_out import Carrier
from .placement.placers.base import Placement, Placer
from .placement.prefetch import prefetch
from .placement.snapshot import snapshot
from .policy.background import next_slice_end, slices_over
from .policy.ending import ending
from .policy.rejoining import given_up, next_given_up
from .policy.session_life import expired, next_expiry
from .routing.turn_routing import next_retry, route_next
from .state.ledger import Ledger
from .state.scheduler_state import SchedulerState


def _no_change(state: SchedulerState, event: ev.Event) -> list[Decision]:
    """Handles an event that is in the journal for accounting alone."""
    return []


_HANDLERS: dict[type[ev.Event], Callable[[SchedulerState, Any], list[Decision]]] = {
    ev.BrokerStarted: restart.on_broker_started,
    ev.BrokerStalled: restart.on_broker_stalled,
    ev.ClientJoined: client_events.on_client_joined,
    ev.ClientLeft: client_events.on_client_left,
    ev.ClientExpired: client_events.on_client_expired,
    ev.TenantDeclared: client_events.on_tenant_declared,
    ev.TenantNamed: client_events.on_tenant_named,
    ev.NodeJoined: node_events.on_node_joined,
    ev.NodeRejoined: node_events.on_node_rejoined,
    ev.NodeLost: node_events.on_node_lost,
    ev.NodeDraining: node_events.on_node_draining,
    ev.NodesComplete: node_events.on_nodes_complete,
    ev.AllocationEndAsked: node_events.on_allocation_end_asked,
    ev.AllocationEndTold: node_events.on_allocation_end_told,
    ev.AllocationsAllowed: allocation_events.on_allocations_allowed,
    ev.AllocationAsked: allocation_events.on_allocation_asked,
    ev.AllocationQueued: allocation_events.on_allocation_queued,
    ev.AllocationRefused: allocation_events.on_allocation_refused,
    ev.AllocationHeld: allocation_events.on_allocation_held,
    ev.AllocationReleased: allocation_events.on_allocation_released,
    ev.AllocationEnded: allocation_events.on_allocation_ended,
    ev.ServiceDeclared: service_events.on_service_declared,
    ev.ServiceLoaded: service_events.on_service_loaded,
    ev.EndpointDeclared: quota_events.on_endpoint_declared,
    ev.EndpointThrottled: quota_events.on_endpoint_throttled,
    ev.RolloutsDeclared: rollout_events.on_rollouts_declared,
    ev.RolloutPriorLoaded: rollout_prior.on_rollout_prior_loaded,
    ev.TurnRouted: rollout_events.on_turn_routed,
    ev.RolloutServiceClosed: rollout_events.on_rollout_service_closed,
    ev.RolloutServiceTried: rollout_events.on_rollout_service_tried,
    ev.ToolReturned: rollout_events.on_tool_returned,
    ev.TrajectoryEnded: rollout_events.on_trajectory_ended,
    ev.SessionRequested: session_events.on_session_requested,
    ev.SessionPlaced: session_events.on_session_placed,
    ev.SessionReady: session_events.on_session_ready,
    ev.SessionRenewed: session_events.on_session_renewed,
    ev.SessionAttached: attachment_events.on_session_attached,
    ev.SessionDetached: attachment_events.on_session_detached,
    ev.SessionMoving: session_events.on_session_moving,
    ev.SessionPacked: session_events.on_session_packed,
    ev.SessionClosing: session_events.on_session_closing,
    ev.SessionClosed: session_events.on_session_closed,
    ev.ActionSubmitted: action_events.on_action_submitted,
    ev.ActionResubmitted: action_events.on_action_resubmitted,
    ev.ActionCancelled: action_events.on_action_cancelled,
    ev.ActionAcknowledged: action_events.on_action_acknowledged,
    ev.LeaseGranted: lease_events.on_lease_granted,
    ev.LeaseStarted: lease_events.on_lease_started,
    ev.LeaseResized: lease_events.on_lease_resized,
    ev.LeaseFinished: lease_events.on_lease_finished,
    ev.LeaseReleased: lease_events.on_lease_released,
    ev.LeaseReturned: lease_events.on_lease_returned,
}


class Scheduler:
    """The scheduler of one job: its state, and the functions that a driver calls.

    Attributes:
        state: everything that the scheduler holds.
        ledger: the ledger of that state, for readers; only `resume` replaces it.
    """

    def __init__(self, placer: Placer, margin_ns: int = 0) -> None:
        """Begins with an empty ledger.

        Args:
            placer: the rule that says which action starts where.
            margin_ns: how long before its allocation ends a node lends nothing more.
        """
        self.ledger = Ledger(margin_ns=margin_ns, block_max=placer.block_max)
        self.state = SchedulerState(self.ledger, placer)

    def resume(self, ledger: Ledger) -> None:
        """Goes on from a ledger that a checkpoint kept, as if all its events had been handled here;
        called before anything else.

        Args:
            ledger: it belongs to this scheduler from now on.
        """
        ledger.margin_ns = self.ledger.margin_ns
        self.ledger = self.state.ledger = ledger

    def handle(self, event: ev.Event) -> list[Decision]:
        """Applies one event to the ledger and returns the decisions that follow from it. O(1), but
        O(tenants that wait) where a further one begins to wait.
        """
        self.ledger.tenants.now = event.at
        return _HANDLERS.get(type(event), _no_change)(self.state, event)

    def consequences(self, event: ev.Event) -> list[ev.Event]:
        """The event and all others that it entails, in the order in which to handle them."""
        entailed = CONSEQUENCES.get(type(event))
        return [event] if entailed is None else entailed(self.state, event)

    def plan(self, now: int) -> list[ev.Event]:
        """Decides what to do at `now`, without a change of the ledger.

        Args:
            now: epoch ns.

        Returns:
            Events to journal and to handle in this order. The driver calls `plan` again until there
                are none.
        """
        state, ledger = self.state, self.ledger
        events = (given_up(ledger, now) or expired(ledger, now) or ending(ledger, now)
                  or route_next(ledger, now))
        if events:
            return events
        if not (state.dirty or 0 < _place_due(state) <= now):
            return _follow_up(state, now)
        if not (ledger.ready or ledger.leases or ledger.session_queue):
            state.dirty, state.place_again_at, state.placed_at = False, 0, now
            return _follow_up(state, now)  # nothing to start, to resize or to open
        placement = state.placer.place(snapshot(ledger, now))
        if placement.openings:  # the actions that wait in these sessions compete in the next pass
            placement = Placement(placement.openings)
        else:
            state.place_again_at = placement.again_at if placement.again_at > now else 0
            state.placed_at, state.drained = now, placement.drained
        carrier = Carrier(ledger, now)
        events = carrier.events(placement)
        state.dirty = carrier.left_out
        return events or _follow_up(state, now)

    def next_deadline(self) -> int:
        """When `plan` has work although no event comes (epoch ns); 0 for never.

        Such times are: the end of a wait for a node that is away; the end of a grace, of a
        session's idle time or of a node's allocation; the next token of an endpoint; another try of
        a closed rollout service; the end of a slice of background processes; and the times at which
        the placer or the rules for allocations want to be called again.
        """
        ledger, planned_at = self.ledger, self.state.planned_at
        dues = (_place_due(self.state), next_given_up(ledger), next_expiry(ledger, planned_at),
                ledger.next_end, self.state.elastic.due_at(ledger), next_retry(ledger),
                next_slice_end(ledger, planned_at))
        return min(filter(None, dues), default=0)


def _follow_up(state: SchedulerState, now: int) -> list[ev.Event]:
    """Events to plan once the placer has nothing more to place: leases that are prefetched behind
    others, and requests or returns of allocations.
    """
    ledger = state.ledger
    state.planned_at = now
    if ledger.background and (events := slices_over(ledger, now)):
        return events
    events = prefetch(ledger, now) if ledger.short else []
    events = events or (batches(ledger, now, state.drained) if ledger.batching else events)
    return events or state.elastic.decide(ledger, now)


def _place_due(state: SchedulerState) -> int:
    """When the placer must be called although no event comes (epoch ns); 0 for never."""
    due, last = state.place_again_at, state.placed_at
    for endpoint in state.ledger.called_endpoints():
        if endpoint.free > 0:
            token_at = endpoint.next_token_at(last)
            if token_at > last and (not due or token_at < due):
                due = token_at
    return due
