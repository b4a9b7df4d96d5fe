"""Pure. Handlers of events about leases: granted, started, resized, finished, released, returned.

A lease that is granted behind another one of the same unit (prefetched) holds nothing until the
lease in front of it is gone. The leases of one unit are in one queue (`LeaseEntry.lease_queue`),
whose first lease holds the unit.

Invariants: a lease takes its units in `_begin` or where it is granted, gives them back in
`_pass_on`, and takes or gives single cores in `on_lease_resized`, nowhere else. Reports on a lease
that is no longer in the ledger are ignored: the lease id is the fencing key.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.action import Action, Kind
from ...domain.decision import Decision, ReplyToClient, ResizeLease, StartLease
from ...domain.ids import client_of
from ...domain.outcome import Outcome
from ...domain.retry import is_retried, is_sent_back
from ...domain.service import FALTERED, endpoint_of, service_of
from ...domain.states import ENDED_BY_ITSELF, ActionState, LeaseState, SessionState
from ..placement.batches import forget, note
from ..placement.placers.cpus.resize_cost import MOST_NS
from ..placement.prefetch import PACE, is_short
from ..state.estimator import cpu_to_learn
from ..state.ledger import ActionEntry, LeaseEntry, Ledger, NodeEntry, SessionEntry
from ..state.queue import CPU, pool_of
from ..state.scheduler_state import SchedulerState
from ..state.transitions import ACTION_MOVES, LEASE_MOVES, SESSION_MOVES, move
from .action_events import end_action
from .background_events import displace_background, forced_end, lend_background
from .node_events import mark_drained
from .queueing import enqueue, promote, push, push_again, update_idle
from .quota_events import count_call
from .service_events import note_restore

RESIZE_PACE = 8  # the mean is exponential: the last 8 leases have about two thirds of the weight


def on_lease_granted(state: SchedulerState, event: ev.LeaseGranted) -> list[Decision]:
    """Takes an action out of the queue and gives it units, at once or behind another lease."""
    ledger = state.ledger
    entry, node = ledger.actions[event.action], ledger.place(event.node)
    session = ledger.sessions.get(entry.action.session)
    reserved = session is not None and bool(session.cores)
    action, key = entry.action, entry.action.key
    lease_queue = ledger.leases[event.after].lease_queue if event.after else {}
    lease_queue[event.lease] = None
    lease = LeaseEntry(event.lease, event.action, event.node, event.cores, event.gpus,
                       action.mem_mib, action.session, reserved, event.at, lease_queue, key,
                       prefetched=bool(event.after), restore_ns=event.restore_ns,
                       tenant=ledger.tenants.tenant_of(client_of(event.action)),
                       pool=pool_of(key, action.degrees[-1]),
                       wide=key == "cpu" and action.degrees[-1] > 1)
    entry.counted = ledger.ready.take(event.action)
    decisions: list[Decision] = []
    background = action.kind is Kind.BACKGROUND
    if background:
        lend_background(ledger, lease)
    elif session is not None:
        if session.background:
            decisions = displace_background(state, session, action.kind)
        _start_in_session(session, event)
    ledger.leases[event.lease] = lease
    if not event.after:
        if not reserved:
            node.cores.take(event.cores)
        _lend(ledger, lease, node)
        node.free_mem_mib -= lease.mem_mib
        assert node.free_mem_mib >= 0, f"{event} overdraws the memory of {node.spec.name}"
        _begin(ledger, lease, node, event.at)
        _count(ledger, lease, 1)
    else:
        ledger.prefetched += 1
        if event.cores and 4 * len(lease_queue) > 3 * node.prefetch_max:
            ledger.short.pop((event.node, event.cores[0]), None)
    ledger.next_lease = event.lease + 1
    entry.state = move(ACTION_MOVES, entry.state, ActionState.CONFIGURING, event)
    entry.lease, entry.attempt = event.lease, event.attempt
    decisions.append(StartLease(event.node, event.lease, event.action, event.cores, event.gpus,
                                event.restore_ns, event.after))
    if background:  # slices tell nothing about run times
        return decisions + forced_end(entry, lease)
    ledger.estimator.began(action)
    if lease.begun:
        ledger.estimator.note_running(action, lease)
    return decisions


def on_lease_started(state: SchedulerState, event: ev.LeaseStarted) -> list[Decision]:
    """Marks an attempt as running."""
    ledger = state.ledger
    lease = ledger.leases.get(event.lease)
    if lease is not None and lease.begun and lease.state is LeaseState.GRANTED:
        lease.state = move(LEASE_MOVES, lease.state, LeaseState.ACTIVE, event)
        entry = ledger.actions[lease.action]
        entry.state = move(ACTION_MOVES, entry.state, ActionState.RUNNING, event)
    return []


def on_lease_resized(state: SchedulerState, event: ev.LeaseResized) -> list[Decision]:
    """Changes the cores of a lease that runs."""
    lease = state.ledger.leases[event.lease]
    node = state.ledger.nodes[lease.node]
    assert not lease.reserved, f"{event}: the cores are its session's own"
    node.cores.give(lease.cores)
    node.cores.take(event.cores)
    state.ledger.tenants.use(CPU).take(lease.tenant, len(event.cores) - lease.units)
    lease.cores = event.cores
    lease.grants.append((event.at, len(event.cores)))
    return [ResizeLease(lease.node, lease.lease, event.cores)]


def on_lease_finished(state: SchedulerState, event: ev.LeaseFinished) -> list[Decision]:
    """Ends an attempt: its action ends with it, or waits again where another attempt may help."""
    ledger = state.ledger
    lease = ledger.leases.get(event.lease)
    if lease is None or lease.state not in (LeaseState.GRANTED, LeaseState.ACTIVE):
        return []  # a late report of an older attempt
    entry, outcome = ledger.actions[lease.action], event.outcome
    if outcome.restore_ns:
        note_restore(ledger, lease, outcome.restore_ns)
    if outcome.resize_ns:
        _note_resizes(ledger, lease, outcome.resize_ns)
    begun = lease.begun
    spans = lease.work_spans(event.at, outcome.exec_ns, entry.submitted_at)
    if service_of(lease.key):
        spans = _alone(ledger, lease, entry.action, outcome, spans)
    forced = entry.forced_outcome is not None
    sent_back = not forced and is_sent_back(entry.action, outcome)
    if entry.action.kind is not Kind.BACKGROUND:
        several = lease.key == "cpu" and entry.action.degrees[-1] > 1
        ledger.estimator.ended(entry.action, () if sent_back else spans,
                               outcome.state in ENDED_BY_ITSELF,
                               cpu_to_learn(outcome, spans) if several else 0,
                               event.lease, event.at)
    if lease.key != "cpu":
        count_call(ledger, lease, event.at, outcome)
    if event.clean:
        _release(state, lease, event.at)
        if outcome.pushed == FALTERED and service_of(lease.key):
            _note_absent(ledger, lease)
    else:
        lease.state = move(LEASE_MOVES, lease.state, LeaseState.RELEASING, event)
    if sent_back or (not forced and is_retried(entry.action, outcome, entry.attempt)):
        entry.state = move(ACTION_MOVES, entry.state, ActionState.PENDING, event)
        entry.lease = 0
        entry.order_tag = entry.order_tag if sent_back else 0
        entry.counted = 0  # it has used its units: its next grant counts again
        enqueue(state, entry)
        return []
    began_at = lease.granted_at if begun else event.at
    if lease.prefetched and lease.node:
        node = ledger.nodes[lease.node]
        node.short_lease_gap_ns += (event.at - began_at - node.short_lease_gap_ns) // PACE
    return end_action(state, entry, event.at, _reply(entry, lease, began_at, event))


def _alone(ledger: Ledger, lease: LeaseEntry, action: Action, outcome: Outcome,
           spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the spans that a service's call would have had alone, and learns from them what calls
    add to a batch. A call that was ended from outside, perhaps before it ran, tells nothing.
    """
    demand, kind = ledger.demand, (service_of(lease.key), action.degrees)
    if kind not in demand.kinds:  # what only a worker takes for a call
        return spans
    found = [(units, demand.alone(kind[0], outcome.batch, ns)) for units, ns in spans]
    if outcome.state in ENDED_BY_ITSELF and outcome.exec_ns:
        for units, ns in spans:
            demand.ran(kind, outcome.batch, ns, units)
    return found


def _note_absent(ledger: Ledger, lease: LeaseEntry) -> None:
    """Notes that a service could not be brought to the GPUs of a lease, unless its next call is
    already being tried there. A service that counts as resident keeps its GPUs from others for its
    minimum residency.
    """
    gpus = ledger.place(lease.node).gpus
    if gpus.mask(lease.gpus) & ~gpus.free_mask == 0:
        gpus.evict(lease.gpus)


def _note_resizes(ledger: Ledger, lease: LeaseEntry, ns: int) -> None:
    """Learns from a lease that ended what a resize costs on its node. Late samples count more."""
    resizes = len(lease.grants) - 1
    if resizes > 0 and lease.node:
        node, each = ledger.nodes[lease.node], min(ns // resizes, MOST_NS)
        node.resize_ns += (each - node.resize_ns) // RESIZE_PACE if node.resize_ns else each


def on_lease_released(state: SchedulerState, event: ev.LeaseReleased) -> list[Decision]:
    """Frees the units of a lease, after its worker has removed the processes and files of the
    attempt.
    """
    lease = state.ledger.leases.get(event.lease)
    if lease is not None and lease.state is LeaseState.RELEASING:
        _release(state, lease, event.at)
    return []


def on_lease_returned(state: SchedulerState, event: ev.LeaseReturned) -> list[Decision]:
    """Takes back a prefetched lease that did not begin, or one that its worker has never seen; its
    action waits again in its old place.
    """
    ledger = state.ledger
    lease = ledger.leases.get(event.lease)
    if lease is None or not (lease.may_return or event.undelivered):
        return []
    entry = ledger.actions[lease.action]
    ledger.estimator.ended(entry.action, (), False, lease=event.lease, now=event.at)
    if lease.cores:
        ledger.short.pop((lease.node, lease.cores[0]), None)
    session = ledger.sessions.get(lease.session)
    if entry.forced_outcome is not None:
        _release(state, lease, event.at)
        return end_action(state, entry, event.at, ReplyToClient(
            lease.action, entry.forced_outcome, 0, (), entry.attempt,
            event.at - entry.submitted_at, 0))
    entry.state = move(ACTION_MOVES, entry.state, ActionState.PENDING, event)
    entry.lease, entry.attempt = 0, entry.attempt - 1
    if session is None:
        push_again(state, entry)
    else:
        session.waiting.put_back(lease.action)
        if session.parallel:
            push(state, entry, session)
    _release(state, lease, event.at)
    return []


def _start_in_session(session: SessionEntry, event: ev.LeaseGranted) -> None:
    head = session.waiting.head
    assert session.parallel or head == event.action, f"{event} jumps its session's queue"
    assert session.takes, f"{event}: {session} starts no action now"
    session.waiting.start(event.action)
    if not session.leases:
        session.state = move(SESSION_MOVES, session.state, SessionState.BUSY, event)
    session.leases[event.lease] = None


def _lend(ledger: Ledger, lease: LeaseEntry, node: NodeEntry) -> None:
    """Marks the GPUs and the quota of a lease as used."""
    node.gpus.take(lease.gpus)
    service, endpoint = service_of(lease.key), endpoint_of(lease.key)
    if service:
        node.gpus.settle(service, lease.gpus, lease.granted_at)
    elif lease.gpus:
        node.gpus.evict(lease.gpus)
    if endpoint:
        ledger.endpoints[endpoint].draw(lease.granted_at)


def _begin(ledger: Ledger, lease: LeaseEntry, node: NodeEntry, at: int) -> None:
    """Lets a lease hold its units from now on."""
    if lease.key == "cpu":
        units = len(lease.cores)
    else:
        units = len(lease.gpus) if service_of(lease.key) else 1
    lease.granted_at = at
    lease.grants.append((at, units))
    node.leases[lease.lease] = None
    node.wide += lease.wide
    session = ledger.sessions.get(lease.session)
    if session is not None and lease.cores:
        session.last_cores = lease.cores
    if lease.gpus:
        note(ledger, lease, node)
    entry = ledger.actions.get(lease.action)  # None: it has ended already, and is forgotten
    if (4 * len(lease.lease_queue) <= 3 * node.prefetch_max and not lease.reserved
            and entry is not None and is_short(ledger, entry.action)):
        ledger.short[lease.node, lease.cores[0]] = lease.lease
    elif node.prefetch_max and lease.cores:
        ledger.short.pop((lease.node, lease.cores[0]), None)


def _count(ledger: Ledger, lease: LeaseEntry, sign: int) -> None:
    """Counts what a lease holds for its tenant, when it begins (1) and when it ends (-1). A call of
    an endpoint counts for as long as the rate leaves for each call, if it was shorter.
    """
    for resource, units in lease.holds():
        ledger.tenants.use(resource).take(lease.tenant, sign * units)
    if sign < 0 and (endpoint := endpoint_of(lease.key)):
        held_ns = max(0, ledger.tenants.now - lease.granted_at)
        more_ns = ledger.endpoints[endpoint].least_ns - held_ns
        if more_ns > 0:
            ledger.tenants.use(lease.key).add(lease.tenant, more_ns)


def _reply(entry: ActionEntry, lease: LeaseEntry, began_at: int,
           event: ev.LeaseFinished) -> ReplyToClient:
    """The reply of an action that ends with this lease. The broker learns late when a prefetched
    lease began, so the run time of such a lease is the worker's `exec_ns`.
    """
    outcome = event.outcome
    if lease.prefetched:
        if event.at - outcome.exec_ns < began_at:
            began_at = event.at - outcome.exec_ns
        if began_at < entry.submitted_at:
            began_at = entry.submitted_at
    if entry.forced_outcome is not None:
        outcome = outcome.explained_by(entry.forced_outcome)
    grants = tuple([(at - began_at if at > began_at else 0, units) for at, units in lease.grants])
    return ReplyToClient(lease.action, outcome, lease.node, lease.cores, entry.attempt,
                         began_at - entry.submitted_at, event.at - began_at, grants)


def _release(state: SchedulerState, lease: LeaseEntry, at: int) -> None:
    """Removes a lease; its units pass to the next lease of its queue or become free."""
    ledger = state.ledger
    node, begun = ledger.place(lease.node), lease.begun
    lease.state = move(LEASE_MOVES, lease.state, LeaseState.RELEASED, lease)
    del lease.lease_queue[lease.lease]
    del ledger.leases[lease.lease]
    if begun:
        del node.leases[lease.lease]
        node.wide -= lease.wide
        _pass_on(state, lease, node, at)
    else:
        ledger.prefetched -= 1
    if ledger.background:
        ledger.background.pop(lease.lease, None)
    session = ledger.sessions.get(lease.session)
    if session is not None:
        session.leases.pop(lease.lease, None)
        if session.state is SessionState.BUSY and not session.leases:
            session.state = move(SESSION_MOVES, session.state, SessionState.IDLE, lease)
            promote(state, session)
            update_idle(ledger, session, at)


def _pass_on(state: SchedulerState, lease: LeaseEntry, node: NodeEntry, at: int) -> None:
    ledger = state.ledger
    if lease.gpus:
        forget(ledger, lease)
    if lease.lease_queue:
        ledger.prefetched -= 1
        following = ledger.leases[next(iter(lease.lease_queue))]
        _begin(ledger, following, node, at)
        if following.state is not LeaseState.RELEASING:  # else its action may be forgotten already
            ledger.estimator.note_running(ledger.actions[following.action].action, following)
        # while there is one tenant, a unit that passes on changes nothing of what it holds
        if ledger.tenants.compared or not following.holds_like(lease):
            _count(ledger, lease, -1)
            _count(ledger, following, 1)
        return
    _count(ledger, lease, -1)
    if not lease.reserved:
        node.cores.give(lease.cores)
    node.gpus.leave(lease.gpus, lease.tenant, at)
    if endpoint := endpoint_of(lease.key):
        ledger.endpoints[endpoint].done()
    node.free_mem_mib += lease.mem_mib
    mark_drained(node)
    node.revision += 1
    if ledger.tenants.limited:  # an action of its tenant may start now on any node
        ledger.revision += 1
    if node.prefetch_max and lease.cores:
        ledger.short.pop((lease.node, lease.cores[0]), None)
    state.dirty = True
