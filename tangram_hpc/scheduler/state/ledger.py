"""Pure. The broker's whole state: clients, nodes, sessions, actions, leases and estimates.

Invariants: only `Scheduler.handle` changes the ledger. On every node, the lent and the free units
add up to its capacity; `Ledger.check` proves this and the other invariants. Every table is a dict
in order of insertion whose keys are numbers or names, so that the same events give the same state,
and the same order of iteration, on every machine. All times are epoch ns.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ...domain.action import Action, Kind
from ...domain.decision import ReplyToClient
from ...domain.ids import client_of
from ...domain.node import NodeSpec
from ...domain.outcome import Outcome
from ...domain.rollouts import Routed
from ...domain.service import ServiceSpec, endpoint_of, service_of
from ...domain.session import SessionSpec
from ...domain.states import ENDED, ActionState, LeaseState, NodeState, SessionState
from ...domain.tenant import DEFAULT_TENANT
from ..routing.rollout_pools import RolloutPool
from .alloc_ledger import AllocLedger
from .core_sets import CoreSet
from .demand import Demand
from .estimator import Estimator
from .gpu_blocks import GpuSet
from .idle import DisconnectedClient, SessionTimeouts
from .queue import CPU, GPU, ReadyQueue
from .rate_limit import EndpointEntry
from .session_queue import SessionQueue
from .session_turns import SessionTurns
from .tenant_use import MEMORY, Tenants

RESIZE_GAP_NS = 20_000_000  # least time for which a lease keeps a size
LOST_MAX = 64  # lost nodes that are remembered


@dataclass(slots=True)
class ClientEntry:
    """A client, connected or disconnected (`Ledger.disconnected`).

    Attributes:
        client: its number; it is part of the ids of its actions and sessions.
        uid: the random name by which it shows that it is the same client; empty once it has
            expired.
        name: its name for people.
        actions: its actions whose results it has not acknowledged.
        open_actions: how many of its actions have not ended.
        sessions: its sessions that are not closed.
        last_session: the highest session id that it has requested.
        ends_with_client: its actions that are cancelled when it is gone and have neither ended nor
            been cancelled: those outside sessions, and those in sessions that do not end with it.
            Actions with an idempotency key are left out, because they outlive their client.
        active_at: when it last submitted an action.
        attached: the sessions of other clients that it is attached to.
        background_actions: how many ids the broker has given to background actions of its sessions.
    """

    client: int
    uid: str
    name: str
    actions: dict[int, None] = field(default_factory=dict)
    open_actions: int = 0
    sessions: dict[int, None] = field(default_factory=dict)
    last_session: int = 0
    ends_with_client: dict[int, None] = field(default_factory=dict)
    active_at: int = 0
    attached: dict[int, None] = field(default_factory=dict)
    background_actions: int = 0


@dataclass(slots=True)
class NodeEntry:
    """A node, with its free units and memory.

    Attributes:
        node: its number.
        spec: what its worker reported when it joined; Slurm may have moved its end since.
        cores: its CPU cores, and which of them are free.
        gpus: its GPUs, which of them are free, and the service copies on them.
        free_mem_mib: memory that neither sessions nor leases hold.
        prefetch_max: how many leases its worker takes behind the first of one unit; 0 for none.
        short_lease_gap_ns: mean time between the ends of prefetched leases of one unit, lately.
        parked_mib: how much of its memory parked services take.
        state: whether it can be lent from.
        sessions: the sessions that are on it.
        leases: its leases that have begun.
        wide: how many of these may hold more than one CPU.
        revision: grows when an action comes to wait for this node, when units come free, or when
            the end of its allocation moves. A placer compares it to see whether to look at the node
            again.
        joined_at: when it joined.
        lends_until: when it stops lending; 0 if its allocation has no known end.
        drain_at: `lends_until`, or later while Slurm is asked whether the end has moved.
        draining: why nothing more is lent of it; empty while it lends.
        for_end: whether it is drained for its allocation's end alone, so that a later end undoes
            it.
        said_end: when its allocation ends, as its worker said when it joined.
        uid: the random name by which its worker shows that it is the same worker; empty for none.
        resize_ns: how long its worker takes for a resize, an exponential mean over the leases that
            ended; 0 before the first report.
    """

    node: int
    spec: NodeSpec
    cores: CoreSet
    gpus: GpuSet
    free_mem_mib: int
    prefetch_max: int = 0
    short_lease_gap_ns: int = 0
    parked_mib: int = 0
    state: NodeState = NodeState.UP
    sessions: dict[int, None] = field(default_factory=dict)
    leases: dict[int, None] = field(default_factory=dict)
    wide: int = 0
    revision: int = 0
    joined_at: int = 0
    lends_until: int = 0
    drain_at: int = 0
    draining: str = ""
    for_end: bool = False
    said_end: int = 0
    uid: str = ""
    resize_ns: int = 0

    @property
    def room_mib(self) -> int:
        """Memory that may still be lent. Never negative, even if services that were declared after
        sessions opened park more than is free.
        """
        return max(0, self.free_mem_mib - self.parked_mib)


def _outside() -> NodeEntry:
    spec = NodeSpec("", "", (), 0)
    return NodeEntry(0, spec, CoreSet(()), GpuSet(()), 0)


class Attachment(NamedTuple):
    """What a client may do in a session of another client that it is attached to.

    Attributes:
        may_close: whether it may close the session.
        hold: whether the session stays open for it when the session's own client is gone.
    """

    may_close: bool
    hold: bool


@dataclass(slots=True)
class SessionEntry:
    """A session that is not closed.

    Attributes:
        spec: what was requested; after a move it names the files to begin with.
        requested_at: when it was requested, or came to wait again.
        state: where it is in its life.
        node: its home node; 0 while it has none.
        cores: the cores that it reserves; empty except under the placer `static:K`.
        last_cores: the cores with which its last lease began. Data of that lease may still be in
            the caches of these cores.
        placed_at: when it was last placed on a node.
        leases: the leases of its actions, prefetched ones included.
        waiting: its actions that have not started, by turns of the clients that submitted them.
        closing: why it is to end; empty while it is not.
        forks: its forks that are not open yet, and whether its files are being copied for them now.
        opened_at: when its sandbox was first ready; 0 before.
        attached: the other clients that are attached to it, by number.
        background: the action that holds CPUs, or waits for some, for its background processes; 0
            for none. It is neither in `leases` nor in `waiting`.
        background_ran_ns: how long its background actions have held CPUs since one of them ended
            because nothing could run.
        image: the digest of its image, as its node reported; empty for none.
        snapshot_nodes: the nodes that had its snapshot when it was requested, where few had it.
    """

    spec: SessionSpec
    requested_at: int
    state: SessionState = SessionState.WAITING
    node: int = 0
    cores: tuple[int, ...] = ()
    last_cores: tuple[int, ...] = ()
    placed_at: int = 0
    leases: dict[int, None] = field(default_factory=dict)
    waiting: SessionTurns = field(default_factory=SessionTurns)
    closing: str = ""
    forks: dict[int, bool] = field(default_factory=dict)
    opened_at: int = 0
    attached: dict[int, Attachment] = field(default_factory=dict)
    background: int = 0
    background_ran_ns: int = 0
    image: str = ""
    snapshot_nodes: tuple[int, ...] = ()

    @property
    def works(self) -> bool:
        """Whether the session `serves` its clients, or background processes of it run or wait for
        CPUs. Such a session is not closed for idleness.
        """
        return bool(self.background or self.serves)

    @property
    def serves(self) -> bool:
        """Whether an action of a client waits or runs in the session, or a fork of it is to begin,
        and its sandbox exists or existed before a move. Such a session outlives the loss of its
        client.
        """
        if not (self.leases or self.waiting.head or self.forks):
            return False
        return self.state is not SessionState.WAITING or bool(self.spec.files)

    @property
    def ready(self) -> bool:
        """Whether its sandbox is on its node and takes actions."""
        return self.state in (SessionState.IDLE, SessionState.BUSY)

    @property
    def takes(self) -> bool:
        """Whether an action may start in it, apart from those that run: it is open, and its files
        are not being copied for a fork.
        """
        return self.ready and not (self.forks and any(self.forks.values()))

    @property
    def ends_with_client(self) -> bool:
        """Whether it is closed when its own client is gone: it was not opened to outlive that, and
        no attached client holds it.
        """
        return not self.spec.outlives and not any(a.hold for a in self.attached.values())

    @property
    def parallel(self) -> bool:
        """Whether its actions may run at the same time. Actions on cores that the session reserves
        never do.
        """
        return self.spec.parallel and not self.cores


class ActionEntry(msgspec.Struct):
    """An action that has not ended, or whose result its client has not acknowledged.

    Attributes:
        action: what was submitted; a routed turn is a call of the service that was chosen.
        submitted_at: when it was submitted.
        order_tag: its place among all actions that wait, drawn when its wait for units begins; 0
            before.
        counted: on which levels of `fair_order` its last grant was counted.
        state: where it is in its life.
        lease: the lease of its attempt; 0 while none is under way.
        attempt: how often it was started.
        forced_outcome: the outcome with which it will end when its lease ends, because it was
            cancelled or its session is closing; None otherwise.
        outcome: how it ended; None before.
        route: where a turn was routed to; None before, and for other actions.
        withheld: whether it may not start, because the broker was started again and does not have
            its payload until its client sends it again.
        reply: what its client is told of its end; None before.
        ended_lease: the lease with which it ended; 0 for none.
    """

    action: Action
    submitted_at: int
    order_tag: int = 0
    counted: int = 0
    state: ActionState = ActionState.PENDING
    lease: int = 0
    attempt: int = 0
    forced_outcome: Outcome | None = None
    outcome: Outcome | None = None
    route: Routed | None = None
    withheld: bool = False
    reply: ReplyToClient | None = None
    ended_lease: int = 0


class LeaseEntry(msgspec.Struct):
    """The units and memory that are lent to one attempt of an action. Its number is the fencing
    key.

    Attributes:
        lease: its number.
        action: the action that is attempted.
        node: the node on which it runs; 0 if its client holds it, as for a grant of an endpoint.
        cores: its CPU cores.
        gpus: its GPUs.
        mem_mib: its memory beyond that of its session.
        session: the session of its action; 0 for none.
        reserved: whether its cores belong to its session, which holds them while it is open.
        granted_at: when it began; when it was granted, as long as it has not begun.
        lease_queue: the leases of one unit in order, shared by all of them. The first has begun.
            Each of the others is prefetched: it begins when those in front of it are gone, and
            holds nothing until then.
        key: the key resource of its action.
        grants: (since, units) for each size that it has had; empty before it begins.
        prefetched: whether it was granted behind another lease.
        restore_ns: how much of its time goes into bringing its service to the block.
        state: where it is in its life.
        tenant: the tenant of the action's client.
        pool: the pool of units in which its action waited.
        wide: whether it may hold more than one CPU.
    """

    lease: int
    action: int
    node: int
    cores: tuple[int, ...]
    gpus: tuple[int, ...]
    mem_mib: int
    session: int
    reserved: bool
    granted_at: int
    lease_queue: dict[int, None]
    key: str = "cpu"
    grants: list[tuple[int, int]] = msgspec.field(default_factory=list)
    prefetched: bool = False
    restore_ns: int = 0
    state: LeaseState = LeaseState.GRANTED
    tenant: str = DEFAULT_TENANT
    pool: str = CPU
    wide: bool = False

    @property
    def units(self) -> int:
        """Units of its key resource that it holds now."""
        return self.grants[-1][1] if self.grants else 0

    @property
    def begun(self) -> bool:
        """Whether the lease holds its units already."""
        return bool(self.grants)

    @property
    def may_return(self) -> bool:
        """Whether its worker may give the lease back: it has neither begun nor ended."""
        return not self.grants and self.state is LeaseState.GRANTED

    def holds(self) -> list[tuple[str, int]]:
        """The resources that it holds, as (resource, units): its key resource, GPUs and memory.

        Cores that its session reserves are left out, since the session holds them.
        """
        if not self.grants:
            return []
        pool = self.pool
        found: list[tuple[str, int]] = []
        if pool != CPU or not self.reserved:
            found.append((pool, self.grants[-1][1] if pool in (CPU, GPU) else 1))
        if self.gpus and pool != GPU:
            found.append((GPU, len(self.gpus)))
        if self.mem_mib:
            found.append((MEMORY, self.mem_mib))
        return found

    def holds_like(self, other: LeaseEntry) -> bool:
        """Whether this lease surely holds the same as another one, where both have begun. It is
        faster than to compare what `holds` returns."""
        return (self.pool == other.pool and self.grants[-1][1] == other.grants[-1][1]
                and self.mem_mib == other.mem_mib and self.reserved == other.reserved
                and self.gpus == other.gpus)

    @property
    def resizable_at(self) -> int:
        """The time from which its size may change again."""
        return self.grants[-1][0] + RESIZE_GAP_NS

    def work_spans(self, until: int, exec_ns: int, submitted_at: int) -> list[tuple[int, int]]:
        """The (units, ns) of each size in which the action worked.

        For a lease that always had one size, the time that its node measured is used: the broker
        learns of several ends at once, and the first action in a new process waits for that process
        to start. On CPUs the measured time counts for no more than the time that passed, since a
        function can set the clock of its process.

        Args:
            until: when the lease ended.
            exec_ns: how long the action ran, as its worker reports; 0 if it does not.
            submitted_at: when the action was submitted.
        """
        cpu = self.key == "cpu"
        if len(self.grants) == 1 and (self.prefetched or (cpu and exec_ns > 0)):
            if cpu:
                time_ns = until - (submitted_at if self.prefetched else self.granted_at)
                exec_ns = max(0, min(exec_ns, time_ns))
            return [(self.grants[0][1], exec_ns)]
        return self.spans(until)

    def spans(self, until: int) -> list[tuple[int, int]]:
        """The (units, ns) of each size that it had up to a time. The time of a restore is left out.
        """
        if not self.grants:
            return []
        ends = [since for since, _ in self.grants[1:]] + [until]
        spans, late = [], self.restore_ns
        for (since, units), end in zip(self.grants, ends, strict=True):
            spans.append((units, max(0, end - since - late)))
            late = max(0, late - (end - since))
        return spans


@dataclass(slots=True)
class Ledger:
    """All that the scheduler knows about the job.

    Attributes:
        clients: the clients by number.
        by_uid: the number of each client that has not expired, by its uid.
        nodes: the nodes by number, with the lost ones that are in `lost`.
        lost: the nodes that were lost, in order of their losses; the last LOST_MAX of them, so that
            neither memory nor a pass of the placer grows with the nodes that came and went.
        sessions: the sessions by id.
        services: the declared services by name.
        endpoints: the declared endpoints by name, each with its quota.
        outside: node 0, which has nothing to lend. It stands for the clients, which hold the grants
            of endpoints.
        disconnected: the clients without a connection that have not expired.
        idle_deadlines: when idle sessions end.
        ttl_deadlines: when sessions with a time-to-live end.
        shared: the id of each shared session that is not closed, by its name.
        ended_shares: why shared sessions ended, by the hashes of their tokens; of the last ones.
        ownerless: sessions that end with their client, are held by another client, and whose own
            client has expired.
        session_queue: the sessions that wait to be placed.
        actions: the actions by id.
        leases: the leases by number.
        tenants: the tenants, and what each of them uses.
        ready: the actions that compete for units.
        estimator: what was learned of run times.
        demand: how often calls of services come.
        revision: grows when an action comes to wait that may start on any node, or when the end of
            an allocation moves.
        prefetched: how many leases have not begun.
        background: the leases of background actions, in the order of their grants.
        short: the first lease of each (node, core) whose lease queue has room for prefetched short
            leases; see `placement/prefetch`.
        batching: the first lease of each (node, first GPU) whose service runs calls in batches; see
            `placement/batches`.
        complete: whether all expected nodes have joined, so that it is known what is infeasible.
        next_lease: the number of the next lease.
        next_node: the number of the next node.
        next_client: the number of the next client.
        sessions_seen: how many sessions were ever requested.
        once: the actions with an idempotency key that have not ended, by that key.
        starts: how often a broker of this job has started.
        block_max: GPUs of the largest block that the placer grants to a call (`BrokerStarted`).
        margin_ns: how long before its allocation ends a node stops lending.
        draining: the nodes that are drained and not lost.
        next_end: when the next node is drained for its allocation's end; 0 if no end is known.
        told_ends: for each allocation, the end that its workers reported when they joined, and the
            one that Slurm has reported since.
        allocs: what is known of allocations.
        rollouts: the rollout pools by name.
        away: the nodes that are AWAY, each with the time until which the broker waits for it.
    """

    clients: dict[int, ClientEntry] = field(default_factory=dict)
    by_uid: dict[str, int] = field(default_factory=dict)
    nodes: dict[int, NodeEntry] = field(default_factory=dict)
    lost: dict[int, None] = field(default_factory=dict)
    sessions: dict[int, SessionEntry] = field(default_factory=dict)
    services: dict[str, ServiceSpec] = field(default_factory=dict)
    endpoints: dict[str, EndpointEntry] = field(default_factory=dict)
    outside: NodeEntry = field(default_factory=_outside)
    disconnected: dict[int, DisconnectedClient] = field(default_factory=dict)
    idle_deadlines: SessionTimeouts = field(default_factory=SessionTimeouts)
    ttl_deadlines: SessionTimeouts = field(default_factory=SessionTimeouts)
    shared: dict[str, int] = field(default_factory=dict)
    ended_shares: dict[str, str] = field(default_factory=dict)
    ownerless: dict[int, None] = field(default_factory=dict)
    tenants: Tenants = field(default_factory=Tenants)
    session_queue: SessionQueue = field(init=False)
    actions: dict[int, ActionEntry] = field(default_factory=dict)
    leases: dict[int, LeaseEntry] = field(default_factory=dict)
    ready: ReadyQueue = field(init=False)
    estimator: Estimator = field(default_factory=Estimator)
    demand: Demand = field(default_factory=Demand)
    revision: int = 0
    prefetched: int = 0
    background: dict[int, None] = field(default_factory=dict)
    short: dict[tuple[int, int], int] = field(default_factory=dict)
    batching: dict[tuple[int, int], int] = field(default_factory=dict)
    complete: bool = False
    next_lease: int = 1
    next_node: int = 1
    next_client: int = 1
    sessions_seen: int = 0
    once: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    block_max: int = 8
    margin_ns: int = 0
    draining: dict[int, None] = field(default_factory=dict)
    next_end: int = 0
    told_ends: dict[str, tuple[int, int]] = field(default_factory=dict)
    allocs: AllocLedger = field(default_factory=AllocLedger)
    rollouts: dict[str, RolloutPool] = field(default_factory=dict)
    away: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.session_queue = SessionQueue(self.tenants)
        self.ready = ReadyQueue(self.tenants)

    def up_nodes(self) -> list[NodeEntry]:
        """The nodes that can be lent from, in order of joining."""
        return [n for n in self.nodes.values() if n.state is NodeState.UP]

    def called_endpoints(self) -> list[EndpointEntry]:
        """The endpoints for which a call waits, in order of declaration. O(pools) where no call
        waits, else O(endpoints) of a few ns each: a pass does nothing for each of the others.
        """
        names = {endpoint_of(pool) for pool in self.ready.pools}
        names.discard("")
        return [e for name, e in self.endpoints.items() if name in names] if names else []

    def held_nodes(self) -> list[NodeEntry]:
        """The nodes that are up, drained or away. An action is infeasible if none of them could
        ever run it.
        """
        return [n for n in self.nodes.values() if n.state is not NodeState.DOWN]

    def place(self, node: int) -> NodeEntry:
        """The node with this number; `outside` for 0."""
        return self.nodes[node] if node else self.outside

    def check(self) -> None:
        """Raises an AssertionError that names the invariant which is violated, if one is.
        O(everything).
        """
        for node in [self.outside, *self.nodes.values()]:
            self._check_node(node)
        down = {n.node for n in self.nodes.values() if n.state is NodeState.DOWN}
        assert down == set(self.lost) and len(down) <= LOST_MAX, f"{down} are lost, not {self.lost}"
        away = {n.node for n in self.nodes.values() if n.state is NodeState.AWAY}
        assert away == set(self.away), f"{away} are away, not {self.away}"
        self.allocs.check({n.node for n in self.nodes.values() if n.state is not NodeState.DOWN})
        for action_id, entry in self.actions.items():
            pending = entry.state is ActionState.PENDING
            assert pending or action_id not in self.ready, f"{entry} is queued, though not PENDING"
            assert not entry.withheld or action_id not in self.ready, f"{entry} is queued"
            assert (entry.lease != 0) == (not pending and entry.state not in ENDED), f"{entry}"
        for lease in self.leases.values():
            assert not lease.node or lease.node in self.nodes, f"{lease} on no node"
            of = self.actions.get(lease.action)  # None if the lease is only being cleaned up
            at_client = of is not None and of.action.kind is Kind.GRANT
            assert at_client == (not lease.node), f"{lease}: only a client's grant has no node"
        for (node_id, gpu), head in self.batching.items():
            lease = self.leases[head]
            assert lease.begun and (lease.node, lease.gpus[0]) == (node_id, gpu), f"{lease}"
        for client in self.clients.values():
            count = sum(self.actions[action].state not in ENDED for action in client.actions)
            assert client.open_actions == count, f"{client} has {count} open actions"
        prefetched = sum(not lease.begun for lease in self.leases.values())
        assert self.prefetched == prefetched, f"{self.prefetched} prefetched, not {prefetched}"
        for lease in self.leases.values():
            assert lease.begun == (next(iter(lease.lease_queue)) == lease.lease), f"{lease}"
        for work, action_id in self.once.items():
            entry = self.actions[action_id]
            assert entry.action.once == work and entry.state not in ENDED, f"{work}: {entry}"
        for name, endpoint in self.endpoints.items():
            busy = sum(1 for x in self.leases.values() if endpoint_of(x.key) == name)
            assert busy == endpoint.busy <= endpoint.spec.concurrency, f"{endpoint}: {busy} calls"
            assert endpoint.level >= 0, f"{endpoint} is overdrawn"
        self._check_turns()
        self._check_tenants()
        for session_id, session in self.sessions.items():
            self._check_background(session)
            waits = session.state is SessionState.WAITING
            assert waits == (session_id in self.session_queue), f"{session}: its queue"
            assert session.parallel or len(session.leases) <= 1, f"{session} runs several"
            self._check_life(session)
        self._check_sharing()

    def _check_tenants(self) -> None:
        waiting: Counter[tuple[str, str]] = Counter()
        for pool in self.ready.pools:
            for shard in self.ready.shards(pool):
                waiting[pool, shard.share.tenant] += sum(len(q) for q in shard.queues.values())
        for session in self.session_queue:
            waiting[MEMORY, self.tenants.tenant_of(client_of(session))] += 1
        held: Counter[tuple[str, str]] = Counter()
        for lease in self.leases.values():
            for resource, units in lease.holds():
                held[resource, lease.tenant] += units
        for session_id, entry in self.sessions.items():
            if entry.node:
                tenant = self.tenants.tenant_of(client_of(session_id))
                held[MEMORY, tenant] += entry.spec.mem_mib
                held[CPU, tenant] += len(entry.cores)
        for name, of in self.tenants.resources.items():
            for tenant, use in of.tenants.items():
                counts = held[name, tenant], waiting[name, tenant]
                assert (use.held, use.waiting) == counts, f"{tenant} on {name}: {use}, not {counts}"

    def _check_turns(self) -> None:
        turns = {a for a, e in self.actions.items()
                 if e.action.turn is not None and e.state not in ENDED}
        for pool in self.rollouts.values():
            pool.check()
            mine = pool.open_turns
            assert set(mine) <= turns, f"{pool.spec.name}: turns that are over"
            turns -= set(mine)
            for action_id in mine:
                entry = self.actions[action_id]
                pending, dealt = entry.state is ActionState.PENDING, service_of(entry.action.key)
                queued = bool(dealt) and not entry.withheld
                assert not pending or queued == (action_id in self.ready), f"{entry}"
                assert not (pending and dealt) or pool.placed(action_id), f"{entry}: not placed"
                assert dealt or not pool.placed(action_id), f"{entry} has no route"
        assert not turns, f"turns that no pool knows: {turns}"

    def _check_background(self, session: SessionEntry) -> None:
        entry = self.actions.get(session.background)
        assert bool(entry) == bool(session.background), f"{session}: no background action"
        if entry is not None:
            assert entry.action.kind is Kind.BACKGROUND and entry.state not in ENDED, f"{entry}"
            assert (entry.lease in self.background) == bool(entry.lease), f"{entry}: its lease"
            queued = session.state is SessionState.IDLE and session.takes and not entry.lease
            assert queued == (session.background in self.ready), f"{entry}: not queued right"

    def _check_life(self, session: SessionEntry) -> None:
        spec = session.spec
        rests = spec.idle_ns > 0 and session.state is SessionState.IDLE and not session.works
        assert rests == self.idle_deadlines.holds(spec.id, spec.idle_ns), f"{session}: idle"
        lives = spec.ttl_ns > 0 and session.state is not SessionState.CLOSING
        assert lives == self.ttl_deadlines.holds(spec.id, spec.ttl_ns), f"{session}: time-to-live"
        for fork, copied in session.forks.items():
            assert self.sessions[fork].spec.origin == spec.id, f"{fork} is no fork of {session}"
            waits = self.sessions[fork].state is SessionState.WAITING
            assert waits != copied, f"{session}: fork {fork}"

    def _check_sharing(self) -> None:
        shared = {s.spec.name: number for number, s in self.sessions.items() if s.spec.shared}
        assert shared == self.shared, f"shared sessions: {self.shared}, not {shared}"
        for number, session in self.sessions.items():
            owner = client_of(number)
            assert not session.attached or session.spec.shared, f"{session} is not shared"
            assert owner not in session.attached, f"{session}: its own client is attached"
            for client in session.attached:
                assert number in self.clients[client].attached, f"{session}: client {client}"
            gone = not self.clients[owner].uid and not session.spec.outlives
            assert gone == (number in self.ownerless), f"{session}: its client has expired"
        for entry in self.clients.values():
            for number in entry.attached:
                assert entry.client in self.sessions[number].attached, f"{entry}: {number}"
        assert all(n in self.sessions for n in self.ownerless), f"{self.ownerless}"

    def _check_node(self, node: NodeEntry) -> None:
        if node.state is NodeState.DOWN:
            return
        held, gpus, mem = [], [], 0
        for lease_id in node.leases:
            lease = self.leases[lease_id]
            held += [] if lease.reserved else list(lease.cores)
            gpus += list(lease.gpus)
            service = service_of(lease.key)
            assert not service or node.gpus.holds(service, lease.gpus), f"{lease} was evicted"
            mem += lease.mem_mib
        for session_id in node.sessions:
            held += list(self.sessions[session_id].cores)
            mem += self.sessions[session_id].spec.mem_mib
        wide = sum(self.leases[lease_id].wide for lease_id in node.leases)
        assert node.wide == wide, f"{node.spec.name} has {wide} wide leases, not {node.wide}"
        assert len(set(held)) == len(held), f"a core of {node.spec.name} is lent twice: {held}"
        assert len(held) + node.cores.free == len(node.cores.units), f"cores of {node.spec.name}"
        assert len(set(gpus)) == len(gpus), f"a GPU of {node.spec.name} is lent twice: {gpus}"
        node.gpus.check()
        assert len(gpus) + node.gpus.free == len(node.gpus.units), f"GPUs of {node.spec.name}"
        assert mem + node.free_mem_mib == node.spec.mem_mib, f"memory of {node.spec.name}"
        assert node.free_mem_mib >= 0, f"memory of {node.spec.name} is overdrawn"
