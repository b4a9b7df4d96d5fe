"""Pure. Handlers of events about rollout pools: routed turns, tool results, closed services.

A turn waits in its pool until it is routed to a service. From then on it waits for units like a
call of that service. If no block can hold the service any more, the turn goes back to its pool.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...domain import event as ev
from ...domain.decision import Decision
from ...domain.ids import client_of
from ...domain.outcome import Outcome
from ...domain.rollouts import Routed
from ...domain.service import service_of
from ...domain.states import ActionState
from ..routing.cmlfq import FAILURE, SUCCESS, TIMEOUT, ToolSignal
from ..routing.rollout_pools import RolloutPool
from ..state.ledger import ActionEntry, Ledger, NodeEntry
from ..state.scheduler_state import SchedulerState
from .queueing import push, want_route

_STATUS = {ActionState.COMPLETED: SUCCESS, ActionState.TIMEOUT: TIMEOUT}


def on_rollouts_declared(state: SchedulerState, event: ev.RolloutsDeclared) -> list[Decision]:
    """Adds a rollout pool. If an earlier start of the broker declared the pool with other values,
    it is replaced, and its waiting turns are routed anew.
    """
    ledger, spec = state.ledger, event.spec
    pools = ledger.rollouts
    old = pools.get(spec.name)
    if old is not None and old.spec == spec:
        return []
    pools[spec.name] = pool = RolloutPool(spec)
    update_services(ledger)
    if old is None:
        return []
    runs = set[int]()
    for action in old.open_turns:
        entry = ledger.actions[action]
        if entry.state is not ActionState.PENDING:
            runs.add(action)
            continue
        if action in ledger.ready:
            ledger.ready.remove(action)
        entry.action, entry.route = entry.action.unrouted(), None
    pool.take_over(old, runs, event.at)
    return []


def on_turn_routed(state: SchedulerState, event: ev.TurnRouted) -> list[Decision]:
    """Makes a turn a call of the service that was chosen for it, and queues that call."""
    ledger = state.ledger
    entry = ledger.actions[event.action]
    turn = entry.action.turn
    assert turn is not None and not service_of(entry.action.key), f"{event}: {entry}"
    pool, service = ledger.rollouts[turn.pool], ledger.services[event.service]
    entry.route = Routed(turn.pool, event.service, event.wanted, event.bucket, event.how,
                         event.move_ns)
    pool.note_routed(event.action, entry.route)
    entry.action = entry.action.routed_to(event.service, (pool.degree(event.service),))
    ledger.demand.came(entry.action, event.at, service.restore_ns, ledger.estimator)
    push(state, entry, None)
    return []


def note_end(ledger: Ledger, entry: ActionEntry, outcome: Outcome, at: int) -> None:
    """Tells the pools about an action that ended: a turn is over, or a tool returned to its
    trajectory. A cancelled tool returned nothing."""
    action = entry.action
    if action.turn is not None:
        pool = ledger.rollouts[action.turn.pool]
        pool.over(action.id, at)
        if entry.route is not None and outcome.state is ActionState.COMPLETED:
            pool.served(entry.route.service)
    elif outcome.state is not ActionState.CANCELLED:
        _note_tool(ledger.rollouts.values(), client_of(action.id), action.trajectory,
                   action.name, outcome.returned, _STATUS.get(outcome.state, FAILURE), at)


def _note_tool(pools: Iterable[RolloutPool], client: int, trajectory: str, tool: str,
               size: int, status: int, at: int) -> None:
    for pool in pools:
        small, large = pool.spec.payload_edges
        signal = ToolSignal(tool, (size >= small) + (size >= large), status)
        pool.signal(client, trajectory, signal, at)


def on_tool_returned(state: SchedulerState, event: ev.ToolReturned) -> list[Decision]:
    """Tells a pool the return of a tool that ran elsewhere than in an action."""
    pool = state.ledger.rollouts.get(event.pool)
    _note_tool([pool] if pool is not None else [], event.client, event.trajectory,
               event.tool, event.characters, event.status, event.at)
    return []


def on_trajectory_ended(state: SchedulerState, event: ev.TrajectoryEnded) -> list[Decision]:
    """Tells a pool the length of a trajectory that ended."""
    pool = state.ledger.rollouts.get(event.pool)
    if pool is not None:
        pool.ended(event.client, event.trajectory, event.tokens, event.epoch)
    return []


def on_rollout_service_closed(state: SchedulerState, event: ev.RolloutServiceClosed
                              ) -> list[Decision]:
    """Closes a service to turns for a while, because it could not be brought to its GPUs."""
    state.ledger.rollouts[event.pool].close(event.service, event.at, event.until)
    update_services(state.ledger)
    return []


def on_rollout_service_tried(state: SchedulerState, event: ev.RolloutServiceTried
                             ) -> list[Decision]:
    """Routes turns again to a service that was closed."""
    state.ledger.rollouts[event.pool].reopen(event.service)
    update_services(state.ledger)
    return []


def update_services(ledger: Ledger, lost: NodeEntry | None = None) -> None:
    """Finds out which services of rollout pools can be called now, after nodes came or went.

    A service whose only copies were on the lost node has lost its KV cache.
    O(pools x services x blocks).
    """
    if not ledger.rollouts:
        return
    up = ledger.up_nodes()
    there = {one.service for node in up for one in node.gpus.resident.values()}
    gone = {one.service for one in lost.gpus.resident.values()} - there if lost else set()
    for pool in ledger.rollouts.values():
        for each in pool.spec.services:
            service = ledger.services[each.name]
            available = not pool.closed(each.name) and (not ledger.complete or any(
                service.may_stand(n.spec.name, block)
                for n in up for block, _ in n.gpus.blocks.get(each.degree, ())
                if each.degree <= ledger.block_max))
            for action in pool.set_callable(each.name, available, each.name in gone):
                entry = ledger.actions[action]
                if action in ledger.ready:
                    ledger.ready.remove(action)
                if entry.state is ActionState.PENDING:  # a withheld turn is not in the ready queue
                    want_route(ledger, entry)
