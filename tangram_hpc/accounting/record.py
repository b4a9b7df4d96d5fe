"""Folds the journal's events into one record for each action, and into the usage of the job. Pure.

Nothing is guessed: a field stays empty if no event tells it. The fold takes one pass, O(events).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..domain import event as ev
from ..domain.action import Action, Kind
from ..domain.ids import client_of
from ..domain.lease_queues import LeaseQueues
from ..domain.node import NodeSpec
from ..domain.outcome import Outcome
from ..domain.retry import is_retried, is_sent_back
from ..domain.rollouts import Routed
from ..domain.session import why_ended
from ..domain.states import ENDED, ActionState
from ..domain.tenant import DEFAULT_TENANT
from .act_parts import ActParts, act_parts
from .starts import without_gaps


@dataclass(slots=True)
class ActionRecord:
    """The history of one action. Times are in ns since the epoch, by the broker's clock.

    Attributes:
        job: the Slurm job.
        user: the user who ran the job.
        action: the action as it was submitted, or a turn as it was routed.
        submit_ns: when it was submitted.
        rank: MPI rank of its client; -1 for none.
        client_name: the name of its client.
        session_name: the name of its session; empty for none.
        start_ns: when its last attempt began; 0 if none did.
        end_ns: when its result was known; 0 if it is not.
        node: the node of its last attempt; None if there was none, or if its client makes the call.
        attempt: how often it was started. A prefetched lease that was lost with its node counts,
            since the node may have started the action.
        outcome: how its last attempt ended; None if it did not.
        state: its state.
        grants: for each size that its last lease had: since when, and the CPUs.
        gpus: the GPUs of its last attempt.
        route: where a turn was routed to last; None for other actions.
        lost_ahead: whether the journal is one of an earlier release that did not count such a
            lease, so that `attempt` is a lower bound.
        image: digest of the image that its session had; empty for none.
        tenant: the tenant of its client.
        account: the Slurm account of the job; empty for none.
        earlier: the attempts before the last one, oldest first, those that were sent back included.
        last: whether this is the last attempt of its action.
    """

    job: str
    user: str
    action: Action
    submit_ns: int
    rank: int = -1
    start_ns: int = 0  # of the last attempt
    end_ns: int = 0
    node: NodeSpec | None = None
    attempt: int = 0
    outcome: Outcome | None = None
    state: ActionState = ActionState.PENDING
    grants: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    gpus: tuple[int, ...] = ()
    route: Routed | None = None  # the last route of a rollout's turn
    lost_ahead: bool = False
    client_name: str = ""
    session_name: str = ""
    image: str = ""
    tenant: str = DEFAULT_TENANT
    account: str = ""
    earlier: tuple[ActionRecord, ...] = ()
    last: bool = True

    @property
    def attempts(self) -> tuple[ActionRecord, ...]:
        """All attempts of the action, oldest first; the last one is this record itself."""
        return (*self.earlier, self)

    @property
    def client(self) -> int:
        """The number of the client that submitted it."""
        return client_of(self.action.id)

    @property
    def elapsed_ns(self) -> int:
        """Time from the last grant to the result; 0 if either is missing."""
        return self.end_ns - self.start_ns if self.start_ns and self.end_ns else 0

    @property
    def planned_ns(self) -> int:
        """Time from submission to the last grant, or to the end of an action that never started."""
        return (self.start_ns or self.end_ns or self.submit_ns) - self.submit_ns

    @property
    def parts(self) -> ActParts | None:
        """What the ACT was spent on; None if the action has not ended."""
        o = self.outcome
        if o is None or not self.end_ns:
            return None
        return act_parts(self.end_ns - self.submit_ns, self.planned_ns, o.restore_ns, o.setup_ns,
                         o.exec_ns)

    @property
    def cpus(self) -> int:
        """The most CPUs that it held at one time."""
        return max((len(cores) for _, cores in self.grants), default=0)

    @property
    def cpu_held_ns(self) -> int:
        """Core-ns that it held, with all changes of its size."""
        if len(self.grants) == 1:
            at, cores = self.grants[0]
            return len(cores) * max(0, self.end_ns - at)
        ends = [*(at for at, _ in self.grants[1:]), self.end_ns]
        return sum(len(cores) * max(0, end - at)
                   for (at, cores), end in zip(self.grants, ends, strict=False))

    @property
    def gpu_held_ns(self) -> int:
        """GPU-ns that it held.

        The calls of a batch share the time of the batch equally. A restore counts for the call that
        needed it.
        """
        if self.outcome is None or not self.gpus:
            return 0
        if self.action.kind is not Kind.CALL:
            return len(self.gpus) * self.elapsed_ns
        shared = self.outcome.exec_ns // self.outcome.batch
        return len(self.gpus) * (self.outcome.restore_ns + shared)


@dataclass(slots=True)
class JobUsage:
    """The usage of a whole job, in core-ns.

    Attributes:
        held_ns: CPUs of its nodes, while they had joined.
        reserved_ns: CPUs that sessions reserved.
        lent_ns: CPUs that were lent to actions.
        burnt_ns: CPU time that the processes of actions used.
    """

    held_ns: int = 0
    reserved_ns: int = 0
    lent_ns: int = 0
    burnt_ns: int = 0


class Fold:
    """Folds events into `records`, by action id in the order of submission. Events must come in
    order.
    """

    def __init__(self) -> None:
        self.records: dict[int, ActionRecord] = {}
        self.job = ""
        self.placer = ""
        self.sync = ""
        self.usage = JobUsage()
        self._user = self._account = ""
        self._ranks: dict[int, int] = {}
        self._client_names: dict[int, str] = {}
        self._tenants: dict[int, str] = {}  # of clients that named one
        self._session_names: dict[int, str] = {}  # of sessions that have a name and are not closed
        self._nodes: dict[int, tuple[NodeSpec, int]] = {}
        self._gone: set[int] = set()
        self._reserved: dict[int, tuple[int, int]] = {}  # session -> (since, cores)
        self._images: dict[int, str] = {}  # of open sessions that have one
        self._by_lease: dict[int, ActionRecord] = {}
        self._prefetched = LeaseQueues[ev.LeaseGranted]()
        self._forced: dict[int, Outcome] = {}  # how actions will end when their leases do
        self._stopped: str | None = None  # why the broker ended, and was not started again
        self.last_ns = 0

    def add(self, event: ev.Event) -> None:
        """Takes one event."""
        self.last_ns = event.at
        on = _HANDLERS.get(type(event))
        if on is not None:
            on(self, event)

    def close(self, served: bool = True) -> None:
        """Ends the fold: everything that is still held ends at the time of the last event.

        Actions without an idempotency key that are still open count as cancelled if the broker
        stopped, and as NODE_FAIL if it was killed. A broker that is started again within its grace
        goes on with them; what it writes then tells how they really end.

        Args:
            served: whether a broker serves the job now, if the journal has no end.
        """
        for node in self._nodes:
            if node not in self._gone:
                self._leave(node, self.last_ns)
        for since, cores in self._reserved.values():
            self.usage.reserved_ns += cores * (self.last_ns - since)
        self._reserved.clear()
        if self._stopped is not None:
            self._end_open(ActionState.CANCELLED, f"its broker ended ({self._stopped})")
        elif not served:
            self._end_open(ActionState.NODE_FAIL, "its broker was killed")
        self.usage.lent_ns += sum(replace(record, end_ns=self.last_ns).cpu_held_ns
                                  for record in self.records.values()
                                  if record.grants and not record.end_ns)

    def _end_open(self, state: ActionState, reason: str) -> None:
        for record in self.records.values():
            if record.state not in ENDED and not record.action.once:
                record.state, record.end_ns = state, self.last_ns
                record.outcome = Outcome(state, reason=reason)
                self.usage.lent_ns += record.cpu_held_ns

    def _broker_started(self, event: ev.BrokerStarted) -> None:
        if event.account != self._account:  # the last one counts for the whole job
            for record in self.records.values():
                for attempt in (record, *record.earlier):
                    attempt.account = event.account
        self.job, self._user, self._account = event.job, event.user, event.account
        self.placer, self.sync = event.placer, event.sync
        self._stopped = None

    def _broker_stopped(self, event: ev.BrokerStopped) -> None:
        self._stopped = event.reason

    def _client_joined(self, event: ev.ClientJoined) -> None:
        self._ranks[event.client] = event.rank
        self._client_names[event.client] = event.name

    def _tenant_named(self, event: ev.TenantNamed) -> None:
        self._tenants[event.client] = event.tenant

    def _node_joined(self, event: ev.NodeJoined) -> None:
        self._nodes[event.node] = (event.spec, event.at)

    def _node_lost(self, event: ev.NodeLost) -> None:
        self._leave(event.node, event.at)

    def _leave(self, node: int, at: int) -> None:
        spec, since = self._nodes[node]
        self._gone.add(node)
        self.usage.held_ns += len(spec.cores) * (at - since)

    def _session_requested(self, event: ev.SessionRequested) -> None:
        if event.spec.name:
            self._session_names[event.spec.id] = event.spec.name

    def _session_placed(self, event: ev.SessionPlaced) -> None:
        self._reserved[event.session] = (event.at, len(event.cores))

    def _session_ready(self, event: ev.SessionReady) -> None:
        if event.image:
            self._images[event.session] = event.image

    def _session_closing(self, event: ev.SessionClosing) -> None:
        end = Outcome(ActionState.CANCELLED, reason=why_ended(event.session, event.reason))
        for record in self._by_lease.values():
            if record.action.session == event.session:
                self._forced.setdefault(record.action.id, end)

    def _session_off(self, event: ev.SessionClosed | ev.SessionPacked) -> None:
        self._images.pop(event.session, None)
        since, cores = self._reserved.pop(event.session, (event.at, 0))
        self.usage.reserved_ns += cores * (event.at - since)
        if isinstance(event, ev.SessionClosed):
            self._session_names.pop(event.session, None)

    def _submitted(self, event: ev.ActionSubmitted) -> None:
        action = event.action
        client = client_of(action.id)
        self.records[action.id] = ActionRecord(
            self.job, self._user, action, event.at, self._ranks.get(client, -1),
            client_name=self._client_names.get(client, ""),
            session_name=self._session_names.get(action.session, ""),
            tenant=self._tenants.get(client, DEFAULT_TENANT), account=self._account)

    def _routed(self, event: ev.TurnRouted) -> None:
        record = self.records[event.action]
        turn = record.action.turn
        assert turn is not None
        record.route = Routed(turn.pool, event.service, event.wanted, event.bucket, event.how,
                              event.move_ns)
        record.action = record.action.routed_to(event.service, record.action.degrees)

    def _cancelled(self, event: ev.ActionCancelled) -> None:
        record = self.records.get(event.action)
        if record is not None and record.state is ActionState.PENDING:
            record.state, record.end_ns = event.state, event.at
            record.outcome = Outcome(event.state, reason=event.reason)
        elif record is not None and record.state not in ENDED:
            self._forced[event.action] = Outcome(event.state, reason=event.reason)
        elif record is not None and record.outcome is not None \
                and event.state is ActionState.NODE_FAIL:  # its result was lost
            record.state, record.outcome = event.state, record.outcome.lost(event.reason)

    def _granted(self, event: ev.LeaseGranted) -> None:
        record = self.records[event.action]
        record.state = ActionState.CONFIGURING
        record.image = self._images.get(record.action.session, "")
        self._by_lease[event.lease] = record
        if event.after:
            record.start_ns, record.grants = 0, []
            self._prefetched.add(event.lease, event.after, event)
        else:
            self._begin(record, event, event.at)

    def _begin(self, record: ActionRecord, event: ev.LeaseGranted, at: int) -> None:
        record.start_ns, record.attempt = at, event.attempt
        # None if its client makes the call.
        record.node = self._nodes[event.node][0] if event.node else None
        record.gpus = event.gpus
        record.grants = [(at, event.cores)]

    def _started(self, event: ev.LeaseStarted) -> None:
        if event.lease in self._by_lease:
            self._by_lease[event.lease].state = ActionState.RUNNING

    def _resized(self, event: ev.LeaseResized) -> None:
        if event.lease in self._by_lease:
            self._by_lease[event.lease].grants.append((event.at, event.cores))

    def _released(self, event: ev.LeaseReleased) -> None:
        self._off(event.lease, event.at)

    def _off(self, lease: int, at: int) -> None:
        """Takes a lease off its units. The lease behind it, if there is one, begins, unless it has
        ended already: a call of a batch may be cancelled, and be cleaned up after its batch.
        """
        grant = self._prefetched.remove(lease)
        record = self._by_lease.get(grant.lease) if grant is not None else None
        if grant is not None and record is not None:
            self._begin(record, grant, at)

    def _returned(self, event: ev.LeaseReturned) -> None:
        record = self._by_lease.pop(event.lease)
        granted = self._prefetched.get(event.lease)
        if granted is not None and granted.node in self._gone:  # lost, not returned
            record.lost_ahead = True
        elif granted is None:  # the lease never reached its worker, so it was no attempt
            record.attempt, record.start_ns, record.grants = record.attempt - 1, 0, []
        self._off(event.lease, event.at)
        forced = self._forced.pop(record.action.id, None)
        record.state = ActionState.PENDING
        if forced is not None:
            record.end_ns, record.outcome, record.state = event.at, forced, forced.state

    def _finished(self, event: ev.LeaseFinished) -> None:
        record = self._by_lease.pop(event.lease, None)
        if record is None:
            return
        granted = self._prefetched.get(event.lease)
        if granted is not None and event.outcome.state is ActionState.NODE_FAIL:
            # the action may have begun before the node was lost
            record.attempt, record.node = granted.attempt, self._nodes[granted.node][0]
        if event.clean:
            self._off(event.lease, event.at)
        forced = self._forced.pop(record.action.id, None)
        record.outcome = event.outcome.explained_by(forced)
        record.end_ns, record.state = event.at, event.outcome.state
        if event.outcome.batch > 1 and record.start_ns:  # the call began with its batch
            record.start_ns = max(record.submit_ns, min(record.start_ns,
                                                        event.at - event.outcome.exec_ns))
        self.usage.lent_ns += record.cpu_held_ns
        self.usage.burnt_ns += event.outcome.cpu_ns
        if forced is None and (is_sent_back(record.action, event.outcome)
                               or is_retried(record.action, event.outcome, record.attempt)):
            _wait_again(record)


def _wait_again(record: ActionRecord) -> None:
    """Keeps the attempt that has ended among the earlier ones; its action waits for another."""
    record.earlier = (*record.earlier, replace(record, earlier=(), last=False))
    record.state, record.outcome, record.node = ActionState.PENDING, None, None
    record.start_ns, record.end_ns, record.grants, record.gpus = 0, 0, [], ()


_HANDLERS: dict[type[ev.Event], Callable[[Fold, Any], None]] = {
    ev.BrokerStarted: Fold._broker_started, ev.BrokerStopped: Fold._broker_stopped,
    ev.ClientJoined: Fold._client_joined, ev.TenantNamed: Fold._tenant_named,
    ev.NodeJoined: Fold._node_joined,
    ev.NodeLost: Fold._node_lost, ev.SessionRequested: Fold._session_requested,
    ev.SessionPlaced: Fold._session_placed, ev.SessionReady: Fold._session_ready,
    ev.SessionClosing: Fold._session_closing, ev.SessionClosed: Fold._session_off,
    ev.SessionPacked: Fold._session_off, ev.ActionSubmitted: Fold._submitted,
    ev.TurnRouted: Fold._routed, ev.ActionCancelled: Fold._cancelled,
    ev.LeaseGranted: Fold._granted, ev.LeaseStarted: Fold._started,
    ev.LeaseResized: Fold._resized, ev.LeaseFinished: Fold._finished,
    ev.LeaseReleased: Fold._released, ev.LeaseReturned: Fold._returned,
}


def fold(events: Iterable[ev.Event], served: bool = True) -> Fold:
    """Returns the fold of all events; see `Fold.close`."""
    result = Fold()
    for event in without_gaps(events):
        result.add(event)
    result.close(served)
    return result
