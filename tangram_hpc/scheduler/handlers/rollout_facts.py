"""Pure. The part of the scheduler that applies facts about rollout pools: who turns out to be whose
turn, what tools returned, which services stand.

Law: as the scheduler's: facts in, and only `handle` calls them; `deal` reads and plans. A turn that
was dealt is a call of its service until that is gone; then it is asked for again.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...domain import event as ev
from ...domain.action import Action, Kind
from ...domain.decision import Decision
from ...domain.ids import client_of
from ...domain.outcome import Outcome
from ...domain.rollouts import (
    CONTEXT_MAX,
    NAME_MAX,
    RolloutService,
    RolloutsSpec,
    Routed,
    wrong_number,
)
from ...domain.service import service_of
from ...domain.states import ActionState
from ...errors import InvalidInput
from ..routing.cmlfq import FAILURE, SUCCESS, TIMEOUT, Signal
from ..routing.rollout_pools import RolloutPool, shape_of
from ..state.ledger import ActionEntry, Ledger, NodeEntry, SessionEntry

# What a service is taken to cost that says nothing: a model of some 14 B weights on one GPU, and
# 0.65 of a step for twice the GPUs.
_STEP_NS = {1: 30_000_000, 2: 19_500_000, 4: 12_700_000, 8: 8_200_000}
_REQUEST_NS, _PREFILL_NS = 300_000, 200_000  # on one GPU
_STATUS = {ActionState.COMPLETED: SUCCESS, ActionState.TIMEOUT: TIMEOUT}


class RolloutFacts:
    """Handlers of the facts of rollout pools."""

    ledger: Ledger
    dirty: bool

    def _push(self, entry: ActionEntry, session: SessionEntry | None) -> None:
        raise NotImplementedError  # SessionFacts

    def _rollouts_declared(self, event: ev.RolloutsDeclared) -> list[Decision]:
        """A pool, or one of an earlier start that is now declared in another way: who waits in it
        is asked for again."""
        pools, spec = self.ledger.rollouts, event.spec
        old = pools.get(spec.name)
        if old is not None and old.spec == spec:
            return []
        pools[spec.name] = pool = RolloutPool(spec)
        self._look_at_services()
        for action, turn in old.open_turns.items() if old is not None else ():
            entry = self.ledger.actions[action]
            if action in self.ledger.ready:
                self.ledger.ready.remove(action)
            entry.action, entry.route = entry.action.undealt(), None
            pool.wanted(action, client_of(action), turn, event.at)
        return []

    def _turn_routed(self, event: ev.TurnRouted) -> list[Decision]:
        entry, ledger = self.ledger.actions[event.action], self.ledger
        turn = entry.action.turn
        assert turn is not None and not service_of(entry.action.key), f"{event}: {entry}"
        pool, service = ledger.rollouts[turn.pool], ledger.services[event.service]
        entry.route = Routed(turn.pool, event.service, event.wanted, event.bucket, event.how,
                             event.move_ns)
        pool.dealt(event.action, entry.route)
        entry.action = entry.action.dealt(event.service, (pool.degree(event.service),))
        ledger.demand.came(entry.action, event.at, service.restore_ns, ledger.estimator)
        self._push(entry, None)
        return []

    def _want(self, entry: ActionEntry) -> None:
        """A turn is to be dealt, for the first time or again."""
        turn = entry.action.turn
        assert turn is not None
        entry.action, entry.route = entry.action.undealt(), None
        self.ledger.rollouts[turn.pool].wanted(entry.action.id, client_of(entry.action.id), turn,
                                               entry.submitted_at)

    def _push_again(self, entry: ActionEntry) -> None:
        """A lease of it was given back: it waits for the same service, if that still stands."""
        turn = entry.action.turn
        if turn is not None and not self.ledger.rollouts[turn.pool].placed(entry.action.id):
            return self._want(entry)
        return self._push(entry, None)

    def _told(self, entry: ActionEntry, outcome: Outcome, at: int) -> None:
        """An action has ended: a turn is over, or a tool has returned to a trajectory. What was
        cancelled returned nothing."""
        action = entry.action
        if action.turn is not None:
            pool = self.ledger.rollouts[action.turn.pool]
            pool.over(action.id, at)
            if entry.route is not None and outcome.state is ActionState.COMPLETED:
                pool.served(entry.route.service)
        elif outcome.state is not ActionState.CANCELLED:
            self._returned(self.ledger.rollouts.values(), client_of(action.id), action.trajectory,
                           action.name, outcome.returned, _STATUS.get(outcome.state, FAILURE), at)

    def _returned(self, pools: Iterable[RolloutPool], client: int, trajectory: str, tool: str,
                  size: int, status: int, at: int) -> None:
        for pool in pools:
            small, large = pool.spec.payload_edges
            signal = Signal(tool, (size >= small) + (size >= large), status)
            pool.signal(client, trajectory, signal, at)

    def _tool_returned(self, event: ev.ToolReturned) -> list[Decision]:
        pool = self.ledger.rollouts.get(event.pool)
        self._returned([pool] if pool is not None else [], event.client, event.trajectory,
                       event.tool, event.characters, event.status, event.at)
        return []

    def _trajectory_ended(self, event: ev.TrajectoryEnded) -> list[Decision]:
        pool = self.ledger.rollouts.get(event.pool)
        if pool is not None:
            pool.ended(event.client, event.trajectory, event.tokens, event.epoch)
        return []

    def _service_closed(self, event: ev.RolloutServiceClosed) -> list[Decision]:
        self.ledger.rollouts[event.pool].close(event.service, event.at, event.until)
        self._look_at_services()
        return []

    def _service_tried(self, event: ev.RolloutServiceTried) -> list[Decision]:
        self.ledger.rollouts[event.pool].reopen(event.service)
        self._look_at_services()
        return []

    def _look_at_services(self, lost: NodeEntry | None = None) -> None:
        """Nodes came or went: which services of pools can be called now. What stood on a lost node
        and nowhere else has lost its KV. O(pools x services x blocks)."""
        ledger = self.ledger
        if not ledger.rollouts:
            return
        up = ledger.up_nodes()
        there = {one.service for node in up for one in node.gpus.resident.values()}
        gone = {one.service for one in lost.gpus.resident.values()} - there if lost else set()
        for pool in ledger.rollouts.values():
            for each in pool.spec.services:
                service = ledger.services[each.name]
                stands = not pool.closed(each.name) and (not ledger.complete or any(
                    service.may_stand(n.spec.name, block)
                    for n in up for block, _ in n.gpus.blocks.get(each.degree, ())
                    if each.degree <= ledger.block_max))
                for action in pool.stands(each.name, stands, each.name in gone):
                    if action in ledger.ready:
                        ledger.ready.remove(action)
                        self._want(ledger.actions[action])


def deal(ledger: Ledger, now: int) -> list[ev.Event]:
    """The next turn that can go somewhere, or service that is to be tried again, as an event. Where
    turns wait and none stands, those that are left alone are tried at once."""
    for pool in ledger.rollouts.values():
        closed = pool.next_reopening()
        if closed is not None and (closed[0] <= now or pool.stranded):
            return [ev.RolloutServiceTried(now, pool.spec.name, closed[1])]
        found = pool.next()
        if found is not None:
            action, route = found
            to = pool.routed(route)
            return [ev.TurnRouted(now, action, to.service, to.wanted, to.bucket, to.how,
                                  to.move_ns)]
    return []


def next_deal(ledger: Ledger) -> int:
    """When `deal` has something to do although nothing happens (epoch ns); 0 for never."""
    return min((found[0] for pool in ledger.rollouts.values()
                if (found := pool.next_reopening()) is not None), default=0)


def faltered(ledger: Ledger, fact: ev.LeaseFinished) -> list[ev.Event]:
    """The end of a call whose service could not be brought to its GPUs. If there is another one,
    this one is left alone for a while, as it would be the least loaded for ever, and a turn that
    has attempts left goes elsewhere."""
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
    if entry.doomed is not None or entry.attempt >= entry.action.attempts_max:
        return [*events, fact]
    back = Outcome(ActionState.PREEMPTED, reason=fact.outcome.reason)
    return [*events, ev.LeaseFinished(fact.at, fact.lease, back, fact.clean)]


def refusal_of_turn(ledger: Ledger, action: Action) -> str:
    """Why this turn can never be dealt, naming the field; empty when it can."""
    turn = action.turn
    assert turn is not None
    pool = ledger.rollouts.get(turn.pool)
    if pool is None:
        return (f"pool: no rollout pool {turn.pool!r} is declared; declare it by register_rollouts "
                f"or [rollouts.{turn.pool}] in the broker's config file")
    if action.kind is not Kind.CALL or action.session or action.mem_mib or action.gpus:
        return "turn: only a call of a service is one, without session, mem and gpus"
    if action.component:
        return "component: a turn goes where its pool's services stand; leave it out"
    if not turn.trajectory or len(turn.trajectory.encode()) > NAME_MAX:
        return f"trajectory: {turn.trajectory[:40]!r} is not a name of 1 to {NAME_MAX} bytes"
    if min(turn.context, turn.generated) < 0:
        return "context, generated: none may be negative"
    most = max(s.context_max for s in pool.spec.services)
    if turn.context > most:
        return (f"context: {turn.context} tokens fit on no service of pool {turn.pool!r}, the "
                f"largest takes {most}; serve the model on a larger degree or cut the context")
    return ""


def declaration_of_rollouts(ledger: Ledger, told: RolloutsSpec, now: int, changed: bool = False
                            ) -> tuple[list[ev.Event], str]:
    """What declaring a pool comes to: facts, or why it is refused. The same again is nothing;
    another one only where it may have `changed`, because nobody is under way in it."""
    spec, why = _resolved(ledger, told)
    known = ledger.rollouts.get(told.name)
    same = known is not None and known.spec == spec
    if not why and known is not None and not same and not changed:
        why = "name: it is declared already, and not like this; take another name"
    if why:
        return [], f"rollouts {told.name}: {why}"
    return ([] if same else [ev.RolloutsDeclared(now, spec)]), ""


def _resolved(ledger: Ledger, told: RolloutsSpec) -> tuple[RolloutsSpec, str]:
    """The pool with what its services say where it says nothing; or what is wrong with it."""
    services, names = list[RolloutService](), [s.name for s in told.services]
    if why := wrong_number(told):
        return told, why
    if list(told.edges) != sorted(set(told.edges)) or any(e < 1 for e in told.edges):
        return told, f"upto: {list(told.edges)} must ascend from 1"
    if sorted({s.bucket for s in told.services}) != list(range(len(told.edges) + 1)):
        return told, "buckets: each needs a service"
    for each in told.services:
        service = ledger.services.get(each.name)
        if service is None:
            return told, f"services: no service {each.name!r} is declared; register it first"
        if names.count(each.name) > 1:
            return told, f"services: {each.name!r} is there twice"
        degree = each.degree or service.degrees[-1]
        if degree not in service.degrees:
            return told, (f"degree: service {each.name!r} runs on {list(service.degrees)} GPUs, "
                          f"not on {degree}")
        running = each.running_max or max(1, service.batch)
        services.append(RolloutService(
            each.name, each.bucket, degree, running,
            each.queue_max if each.queue_max >= 0 else running, each.context_max or CONTEXT_MAX,
            each.step_ns or _STEP_NS[degree], each.request_ns or _REQUEST_NS // degree,
            each.prefill_ns or _PREFILL_NS // degree, service.node))
    spec = told.with_services(tuple(services))
    try:
        shape_of(spec)
    except InvalidInput as error:
        return told, str(error).removeprefix("cmlfq: ")
    return spec, ""
