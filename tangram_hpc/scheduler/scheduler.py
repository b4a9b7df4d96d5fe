"""Pure. The one deterministic scheduler: events in, decisions out.

Law: `handle(event)` is the only thing that changes the ledger; it never plans. `plan(now)` only
reads; each of its decisions is an event that the driver journals and hands back to `handle`, so a
replay of the journal never plans and cannot diverge. `consequences(fact)` says which other facts a
fact entails (a node's loss ends its leases), so that every end of an action is an event of its own
and accounting is a plain fold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..domain import event as ev
from ..domain.action import Action
from ..domain.decision import Decision, KillLease, Reply, ResizeLease, StartLease
from ..domain.ids import client_of
from ..domain.outcome import Outcome
from ..domain.service import endpoint_of, service_of
from ..domain.states import ENDED, ActionState, LeaseState, SessionState
from .autoscale.elastic_allocs import ElasticAllocs
from .handlers.alloc_facts import found
from .handlers.restart import Restart
from .handlers.rollout_facts import deal, next_deal
from .handlers.rollout_prior import on_rollout_prior_loaded
from .handlers.service_facts import declare, load, restored
from .placement.ahead import PACE, ahead, is_short
from .placement.batches import batches, forget, note
from .placement.carry_out import Carrier
from .placement.placers.base import Placement, Placer
from .placement.snapshot import snapshot
from .policy.ending import ending
from .policy.session_life import lapsed, next_lapse, stalled
from .state.idle import Away
from .state.ledger import ActionEntry, ClientEntry, LeaseEntry, Ledger, NodeEntry
from .state.transitions import ACTION_MOVES, LEASE_MOVES, SESSION_MOVES, move

_WHOLE = (ActionState.COMPLETED, ActionState.FAILED)  # ends that an action came to by itself


class Scheduler(Restart):
    """One ledger and one placer. `margin_ns`: how long before its allocation ends a node lends no
    more."""

    def __init__(self, placer: Placer, margin_ns: int = 0) -> None:
        self.placer = placer
        self.ledger = Ledger(margin_ns=margin_ns, block_max=placer.block_max)
        self.dirty = False  # something happened since the last plan that may let someone start
        # When the placer asked to be called again, and when it was last called. No part of the
        # state: a restart plans at once.
        self._again_at = 0
        self._placed_at = 0
        self.elastic = ElasticAllocs()
        self._handlers = {
            **self._of_allocations(),
            ev.BrokerStarted: self._broker_started,
            ev.BrokerStalled: self._broker_stalled,
            ev.ClientJoined: self._client_joined,
            ev.ClientLeft: self._client_left,
            ev.ClientExpired: self._client_expired,
            ev.NodeJoined: self._node_joined,
            ev.NodeLost: self._node_lost,
            ev.NodeDraining: self._node_draining,
            ev.AllocationEndAsked: self._end_asked,
            ev.AllocationEndTold: self._end_told,
            ev.NodesComplete: self._nodes_complete,
            ev.ServiceDeclared: self._service_declared,
            ev.EndpointDeclared: self._endpoint_declared,
            ev.EndpointThrottled: self._endpoint_throttled,
            ev.ServiceLoaded: self._service_loaded,
            ev.RolloutsDeclared: self._rollouts_declared,
            ev.RolloutPriorLoaded: lambda event: on_rollout_prior_loaded(self.ledger, event),
            ev.TurnRouted: self._turn_routed,
            ev.RolloutServiceClosed: self._service_closed,
            ev.RolloutServiceTried: self._service_tried,
            ev.ToolReturned: self._tool_returned,
            ev.TrajectoryEnded: self._trajectory_ended,
            ev.SessionRequested: self._session_requested,
            ev.SessionPlaced: self._session_placed,
            ev.SessionReady: self._session_ready,
            ev.SessionRenewed: self._session_renewed,
            ev.SessionMoving: self._session_moving,
            ev.SessionPacked: self._session_packed,
            ev.SessionClosing: self._session_closing,
            ev.SessionClosed: self._session_closed,
            ev.ActionSubmitted: self._action_submitted,
            ev.ActionCancelled: self._action_cancelled,
            ev.ActionAcknowledged: self._action_acknowledged,
            ev.LeaseGranted: self._lease_granted,
            ev.LeaseStarted: self._lease_started,
            ev.LeaseResized: self._lease_resized,
            ev.LeaseFinished: self._lease_finished,
            ev.LeaseReleased: self._lease_released,
            ev.LeaseReturned: self._lease_returned,
        }

    # ---- the three verbs ---------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[Decision]:
        """Applies one fact to the ledger and returns the orders that follow from it. O(1)."""
        handler = self._handlers.get(type(event))
        return handler(event) if handler is not None else []  # type: ignore[operator]

    def plan(self, now: int) -> list[ev.Event]:
        """What to do now, as events to journal and handle in this order; to be called again until
        it has nothing to do. Changes nothing of the state."""
        events = lapsed(self.ledger, now) or ending(self.ledger, now) or deal(self.ledger, now)
        if events:
            return events
        if not (self.dirty or 0 < self._place_due() <= now):
            return self._follow(now)
        placement = self.placer.place(snapshot(self.ledger, now))
        if placement.openings:  # what waits in them competes in its turn where they stand at once
            placement = Placement(placement.openings)
        else:
            self._again_at = placement.again_at if placement.again_at > now else 0
            self._placed_at = now
        events = Carrier(self.ledger, now).events(placement)
        self.dirty = False
        return events or self._follow(now)

    def _follow(self, now: int) -> list[ev.Event]:
        """Leases behind others, on units that nobody else could have; when all is lent that can be:
        whether to hold more or less."""
        ledger = self.ledger
        events = ahead(ledger, now) if ledger.short else []
        events = events or (batches(ledger, now) if ledger.batching else events)
        return events or self.elastic.decide(ledger, now)

    def next_deadline(self) -> int:
        """When `plan` has something to do although nothing happens (epoch ns); 0 for never: a
        grace, a session's patience or a node's allocation ends, a token comes, a rollout service
        is to be tried again, the placer or `elastic` wants to look."""
        dues = (self._place_due(), next_lapse(self.ledger), self.ledger.next_end,
                self.elastic.due_at(self.ledger), next_deal(self.ledger))
        return min((at for at in dues if at), default=0)

    def _place_due(self) -> int:
        due, last = self._again_at, self._placed_at
        for name, endpoint in self.ledger.endpoints.items():
            if endpoint.free > 0 and self.ledger.ready.waits("endpoint:" + name):
                token_at = endpoint.next_token_at(last)
                if token_at > last and (not due or token_at < due):
                    due = token_at
        return due

    def consequences(self, fact: ev.Event) -> list[ev.Event]:
        """The fact, and all other facts that it entails, in the order in which to handle them."""
        entailed = _CONSEQUENCES.get(type(fact))
        return [fact] if entailed is None else entailed(self, fact)

    # ---- the broker ---------------------------------------------------------------------------

    def _broker_stalled(self, event: ev.BrokerStalled) -> list[Decision]:
        stalled(self.ledger, event)
        return []

    # ---- clients -----------------------------------------------------------------------------

    def _client_joined(self, event: ev.ClientJoined) -> list[Decision]:
        ledger = self.ledger
        entry = ledger.clients.get(event.client)
        if entry is None:
            ledger.clients[event.client] = ClientEntry(event.client, event.uid, event.name)
            ledger.by_uid[event.uid] = event.client
            ledger.next_client = max(ledger.next_client, event.client + 1)
        else:
            ledger.expiring.pop(event.client, None)
            self.dirty = True  # it can be granted calls again
        return []

    def _client_left(self, event: ev.ClientLeft) -> list[Decision]:
        self.ledger.expiring[event.client] = Away(event.at, event.expires_at, event.bye)
        return []

    def _client_expired(self, event: ev.ClientExpired) -> list[Decision]:
        entry = self.ledger.clients[event.client]
        self.ledger.expiring.pop(event.client, None)
        for pool in self.ledger.rollouts.values():
            pool.lost_client(event.client)
        del self.ledger.by_uid[entry.uid]
        for action in [a for a in entry.actions if self.ledger.actions[a].state in ENDED]:
            self._forget(action)
        if not entry.actions and not entry.sessions:
            del self.ledger.clients[event.client]
        else:
            entry.uid = ""  # nobody can come back as this one; it goes with its last lease
        return []

    def _forget(self, action: int) -> None:
        del self.ledger.actions[action]
        owner = self.ledger.clients[client_of(action)]
        del owner.actions[action]
        self._drop_if_gone(owner)

    # ---- services ----------------------------------------------------------------------------

    def _service_declared(self, event: ev.ServiceDeclared) -> list[Decision]:
        return declare(self.ledger, event.spec)

    def _service_loaded(self, event: ev.ServiceLoaded) -> list[Decision]:
        load(self.ledger, event)
        self.dirty = True
        return []

    # ---- actions -----------------------------------------------------------------------------

    def _action_submitted(self, event: ev.ActionSubmitted) -> list[Decision]:
        action = event.action
        assert action.id not in self.ledger.actions, f"{action} was submitted twice"
        entry = self.ledger.actions[action.id] = ActionEntry(action, event.at)
        owner = self.ledger.clients[client_of(action.id)]
        owner.actions[action.id] = None
        owner.active_at = event.at
        if action.once:
            self.ledger.once[action.once] = action.id
        elif not action.session:
            owner.loose[action.id] = None
        if service := service_of(action.key):
            declared = self.ledger.services.get(service)
            self.ledger.demand.came(action, event.at, declared.restore_ns if declared else 0,
                                    self.ledger.estimator)
        self._enqueue(entry)
        return []

    def _enqueue(self, entry: ActionEntry) -> None:
        action = entry.action
        if action.turn is not None:
            return self._want(entry)
        if not action.session:
            return self._push(entry, None)
        session = self.ledger.sessions[action.session]
        first = not session.waiting and not session.leases
        session.waiting[action.id] = None
        self._rest(session, entry.submitted_at)
        if first or session.parallel:  # a wait for its session to open counts as a wait
            entry.turn = self.ledger.ready.draw(action)
        if session.parallel and session.takes:
            self._push(entry, session)
        self._promote(session)

    def _dequeue(self, action: Action, now: int) -> None:
        if action.id in self.ledger.ready:
            self.ledger.ready.remove(action.id)
        session = self.ledger.sessions.get(action.session)
        if session is not None and action.id in session.waiting:
            del session.waiting[action.id]
            self._promote(session)
            self._rest(session, now)

    def _action_cancelled(self, event: ev.ActionCancelled) -> list[Decision]:
        entry = self.ledger.actions.get(event.action)
        if entry is None or entry.state in ENDED:
            return []
        if entry.state is ActionState.PENDING:
            self._dequeue(entry.action, event.at)
            outcome = Outcome(event.state, reason=event.reason)
            queue_ns = event.at - entry.submitted_at
            return self._end(entry, event.at, Reply(event.action, outcome, 0, (), entry.attempt,
                                                    queue_ns, 0))
        entry.doomed = Outcome(event.state, reason=event.reason)
        self.ledger.clients[client_of(event.action)].loose.pop(event.action, None)
        lease = self.ledger.leases[entry.lease]
        return [KillLease(lease.node, lease.lease, event.state, event.reason)]

    def _action_acknowledged(self, event: ev.ActionAcknowledged) -> list[Decision]:
        for action in event.actions:
            entry = self.ledger.actions.get(action)
            if entry is not None and entry.state in ENDED:
                self._forget(action)
        return []

    def _end(self, entry: ActionEntry, at: int, reply: Reply) -> list[Decision]:
        outcome = reply.outcome
        entry.state = move(ACTION_MOVES, entry.state, outcome.state, entry)
        entry.outcome, entry.lease = outcome, 0
        self.ledger.once.pop(entry.action.once, None)
        if entry.action.turn is not None or entry.action.trajectory:
            self._told(entry, outcome, at)
        owner = self.ledger.clients[client_of(entry.action.id)]
        owner.loose.pop(entry.action.id, None)
        if not owner.uid:
            self._forget(entry.action.id)
        return [reply.by(entry.route)]

    # ---- leases ------------------------------------------------------------------------------

    def _lease_granted(self, event: ev.LeaseGranted) -> list[Decision]:
        ledger = self.ledger
        entry, node = ledger.actions[event.action], ledger.place(event.node)
        session = ledger.sessions.get(entry.action.session)
        reserved = session is not None and bool(session.cores)
        action, key = entry.action, entry.action.key
        chain = ledger.leases[event.after].chain if event.after else {}
        chain[event.lease] = None
        lease = LeaseEntry(event.lease, event.action, event.node, event.cores, event.gpus,
                           action.mem_mib, action.session, reserved, event.at, chain, key,
                           ahead=bool(event.after), restore_ns=event.restore_ns)
        entry.counted = ledger.ready.take(event.action)
        if session is not None:
            head = next(iter(session.waiting))
            assert session.parallel or head == event.action, f"{event} jumps its session's queue"
            assert session.takes, f"{event}: {session} takes none now"
            del session.waiting[event.action]
            if not session.leases:
                session.state = move(SESSION_MOVES, session.state, SessionState.BUSY, event)
            session.leases[event.lease] = None
        ledger.leases[event.lease] = lease
        if not event.after:
            if not reserved:
                node.cores.take(event.cores)
            self._lend(lease, node)
            node.free_mem_mib -= lease.mem_mib
            assert node.free_mem_mib >= 0, f"{event} overdraws the memory of {node.spec.name}"
            self._begin(lease, node, event.at)
        else:
            ledger.ahead += 1
            if event.cores and 4 * len(chain) > 3 * node.ahead:
                ledger.short.pop((event.node, event.cores[0]), None)
        ledger.next_lease = event.lease + 1
        entry.state = move(ACTION_MOVES, entry.state, ActionState.CONFIGURING, event)
        entry.lease, entry.attempt = event.lease, event.attempt
        ledger.estimator.began(action)
        return [StartLease(event.node, event.lease, event.action, event.cores, event.gpus,
                           event.restore_ns, event.after)]

    def _begin(self, lease: LeaseEntry, node: NodeEntry, at: int) -> None:
        """A lease holds its units from now on."""
        units = 1 if endpoint_of(lease.key) else len(
            lease.gpus if service_of(lease.key) else lease.cores)
        lease.granted_at = at
        lease.grants.append((at, units))
        node.leases[lease.lease] = None
        session = self.ledger.sessions.get(lease.session)
        if session is not None and lease.cores:
            session.near = lease.cores
        note(self.ledger, lease, node)
        if 4 * len(lease.chain) <= 3 * node.ahead and not lease.reserved and is_short(
                self.ledger, self.ledger.actions[lease.action].action):
            self.ledger.short[lease.node, lease.cores[0]] = lease.lease
        elif node.ahead and lease.cores:
            self.ledger.short.pop((lease.node, lease.cores[0]), None)

    def _lend(self, lease: LeaseEntry, node: NodeEntry) -> None:
        """GPUs and quota of a lease that begins."""
        node.gpus.take(lease.gpus)
        service, endpoint = service_of(lease.key), endpoint_of(lease.key)
        if service:
            node.gpus.settle(service, lease.gpus, lease.granted_at)
        elif lease.gpus:
            node.gpus.evict(lease.gpus)
        if endpoint:
            self.ledger.endpoints[endpoint].draw(lease.granted_at)

    def _lease_started(self, event: ev.LeaseStarted) -> list[Decision]:
        lease = self.ledger.leases.get(event.lease)
        if lease is not None and lease.begun and lease.state is LeaseState.GRANTED:
            lease.state = move(LEASE_MOVES, lease.state, LeaseState.ACTIVE, event)
            entry = self.ledger.actions[lease.action]
            entry.state = move(ACTION_MOVES, entry.state, ActionState.RUNNING, event)
        return []

    def _lease_resized(self, event: ev.LeaseResized) -> list[Decision]:
        lease = self.ledger.leases[event.lease]
        node = self.ledger.nodes[lease.node]
        assert not lease.reserved, f"{event}: the cores are its session's own"
        node.cores.give(lease.cores)
        node.cores.take(event.cores)
        lease.cores = event.cores
        lease.grants.append((event.at, len(event.cores)))
        return [ResizeLease(lease.node, lease.lease, event.cores)]

    def _lease_finished(self, event: ev.LeaseFinished) -> list[Decision]:
        lease = self.ledger.leases.get(event.lease)
        if lease is None or lease.state not in (LeaseState.GRANTED, LeaseState.ACTIVE):
            return []  # fenced: a late word of an older attempt
        entry, outcome = self.ledger.actions[lease.action], event.outcome
        if outcome.restore_ns:
            restored(self.ledger, lease, outcome.restore_ns)
        begun = lease.begun
        spans = lease.work_spans(event.at, outcome.exec_ns, entry.submitted_at)
        if outcome.batch > 1:  # its share of what they took together
            spans = [(units, ns // outcome.batch) for units, ns in spans]
        # by its endpoint, or by a broker that was started again
        sent_back = (outcome.state is ActionState.PREEMPTED and entry.doomed is None
                     and not entry.action.session)
        self.ledger.estimator.ended(entry.action, () if sent_back else spans,
                                    outcome.state in _WHOLE)
        self._count_call(lease, event.at, outcome)
        if event.clean:
            self._release(lease, event.at)
        else:
            lease.state = move(LEASE_MOVES, lease.state, LeaseState.RELEASING, event)
        again = outcome.state is ActionState.NODE_FAIL and entry.doomed is None
        again = again and entry.attempt < entry.action.attempts_max and not entry.action.session
        if again or sent_back:
            entry.state = move(ACTION_MOVES, entry.state, ActionState.PENDING, event)
            entry.lease = 0
            entry.turn = entry.turn if sent_back else 0
            entry.counted = 0  # it had units: its next grant is another turn
            self._enqueue(entry)
            return []
        began_at = lease.granted_at if begun else event.at
        if lease.ahead:
            if lease.node:
                node = self.ledger.nodes[lease.node]
                node.pace_ns += (event.at - began_at - node.pace_ns) // PACE
            began_at = max(entry.submitted_at, min(began_at, event.at - outcome.exec_ns))
        if entry.doomed is not None:
            outcome = outcome.explained_by(entry.doomed)
        reply = Reply(lease.action, outcome, lease.node, lease.cores, entry.attempt,
                      began_at - entry.submitted_at, event.at - began_at,
                      tuple((max(0, at - began_at), units) for at, units in lease.grants))
        return self._end(entry, event.at, reply)

    def _lease_released(self, event: ev.LeaseReleased) -> list[Decision]:
        lease = self.ledger.leases.get(event.lease)
        if lease is not None and lease.state is LeaseState.RELEASING:
            self._release(lease, event.at)
        return []

    def _lease_returned(self, event: ev.LeaseReturned) -> list[Decision]:
        lease = self.ledger.leases.get(event.lease)
        if lease is None or lease.begun:
            return []
        entry = self.ledger.actions[lease.action]
        self.ledger.estimator.ended(entry.action, (), False)
        if lease.cores:
            self.ledger.short.pop((lease.node, lease.cores[0]), None)
        session = self.ledger.sessions.get(lease.session)
        if entry.doomed is not None:
            self._release(lease, event.at)
            return self._end(entry, event.at, Reply(
                lease.action, entry.doomed, 0, (), entry.attempt,
                event.at - entry.submitted_at, 0))
        entry.state = move(ACTION_MOVES, entry.state, ActionState.PENDING, event)
        entry.lease, entry.attempt = 0, entry.attempt - 1
        if session is None:
            self._push_again(entry)
        else:
            session.waiting[lease.action] = None
            session.waiting.move_to_end(lease.action, last=False)
            if session.parallel:
                self._push(entry, session)
        self._release(lease, event.at)
        return []

    def _release(self, lease: LeaseEntry, at: int) -> None:
        node, begun = self.ledger.place(lease.node), lease.begun
        lease.state = move(LEASE_MOVES, lease.state, LeaseState.RELEASED, lease)
        del lease.chain[lease.lease]
        del self.ledger.leases[lease.lease]
        if begun:
            del node.leases[lease.lease]
            self._pass_on(lease, node, at)
        else:
            self.ledger.ahead -= 1
        session = self.ledger.sessions.get(lease.session)
        if session is not None:
            session.leases.pop(lease.lease, None)
            if session.state is SessionState.BUSY and not session.leases:
                session.state = move(SESSION_MOVES, session.state, SessionState.IDLE, lease)
                self._promote(session)
                self._rest(session, at)

    def _pass_on(self, lease: LeaseEntry, node: NodeEntry, at: int) -> None:
        """What a lease held goes to the next of its chain, or is free."""
        forget(self.ledger, lease)
        if lease.chain:
            self.ledger.ahead -= 1
            self._begin(self.ledger.leases[next(iter(lease.chain))], node, at)
            return
        if not lease.reserved:
            node.cores.give(lease.cores)
        node.gpus.give(lease.gpus)
        if endpoint := endpoint_of(lease.key):
            self.ledger.endpoints[endpoint].done()
        node.free_mem_mib += lease.mem_mib
        self._drained(node)
        node.news += 1
        if node.ahead and lease.cores:
            self.ledger.short.pop((lease.node, lease.cores[0]), None)
        self.dirty = True


# What each kind of fact entails. The facts of an action's usual way entail nothing else.
_CONSEQUENCES: dict[type[ev.Event], Callable[[Scheduler, Any], list[ev.Event]]] = {
    ev.BrokerStarted: Scheduler._restarted,
    ev.NodeJoined: lambda scheduler, fact: [*found(scheduler.ledger, fact), fact],
    ev.NodeLost: Scheduler._loss_of_node,
    ev.NodesComplete: lambda scheduler, fact: [fact, *scheduler._never_feasible(fact.at)],
    ev.SessionClosing: Scheduler._end_of_session,
    ev.SessionClosed: Scheduler._closed,
    ev.ActionCancelled: Scheduler._end_of_grant,
}
