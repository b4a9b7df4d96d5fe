"""Pure. The broker's whole state: clients, nodes, sessions, actions and leases.

Law: changed only by `Scheduler.handle`; Σ lent + free = capacity on every node, which `check()`
proves. Iteration is over insertion-ordered dicts keyed by ids, so the same events give the same
state everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ...domain.action import Action, Kind
from ...domain.node import NodeSpec
from ...domain.outcome import Outcome
from ...domain.rollouts import Routed
from ...domain.service import ServiceSpec, endpoint_of, service_of
from ...domain.session import SessionSpec
from ...domain.states import ENDED, ActionState, LeaseState, NodeState, SessionState
from ..routing.rollout_pools import RolloutPool
from .alloc_ledger import AllocLedger
from .core_sets import CoreSet
from .demand import Demand
from .estimator import Estimator
from .gpu_blocks import GpuSet
from .idle import DisconnectedClient, IdleDeadlines
from .queue import ReadyQueue
from .rate_limit import EndpointEntry
from .session_queue import SessionQueue

RESIZE_GAP_NS = 20_000_000  # a lease keeps a size for at least so long


@dataclass(slots=True)
class ClientEntry:
    """A client, connected or away (`Ledger.expiring`)."""

    client: int
    uid: str
    name: str
    actions: dict[int, None] = field(default_factory=dict)  # not yet acknowledged
    sessions: dict[int, None] = field(default_factory=dict)
    last_session: int = 0  # the highest id it asked for
    sessionless: dict[int, None] = field(default_factory=dict)  # not ended, not cancelled
    active_at: int = 0  # when it last submitted an action


@dataclass(slots=True)
class NodeEntry:
    """A node and what of it is free."""

    node: int
    spec: NodeSpec
    cores: CoreSet
    gpus: GpuSet
    free_mem_mib: int
    prefetch_max: int = 0  # of its spec
    short_lease_gap_ns: int = 0  # between the ends of leases ahead on one unit, lately
    parked_mib: int = 0  # what its parked services take of that
    state: NodeState = NodeState.UP
    sessions: dict[int, None] = field(default_factory=dict)
    leases: dict[int, None] = field(default_factory=dict)  # those that have begun
    revision: int = 0  # grows when somebody comes to wait here, or when units come free
    joined_at: int = 0
    lends_until: int = 0  # 0: its allocation has no known end
    drain_at: int = 0  # `lends_until`, or later while Slurm is asked whether the end has moved
    draining: str = ""  # why nothing more is lent of it
    for_end: bool = False  # drained for its allocation's end alone: a later end takes that back
    said_end: int = 0  # when its allocation ends, as its worker said when it joined

    @property
    def room_mib(self) -> int:
        """Memory that may be given away: sessions may have been first, before services came."""
        return max(0, self.free_mem_mib - self.parked_mib)


def _outside() -> NodeEntry:
    """Where clients hold what was granted to them: no node, with nothing of its own to lend."""
    spec = NodeSpec("", "", (), 0)
    return NodeEntry(0, spec, CoreSet(()), GpuSet(()), 0)


@dataclass(slots=True)
class SessionEntry:
    """A session; `cores` are those it reserves (none but under `static:K`), `near` those that its
    last lease began with: what it left in their caches may still be there."""

    spec: SessionSpec
    requested_at: int
    state: SessionState = SessionState.WAITING
    node: int = 0
    cores: tuple[int, ...] = ()
    last_cores: tuple[int, ...] = ()
    placed_at: int = 0
    leases: dict[int, None] = field(default_factory=dict)
    # its actions not started; a dict would look through those that have left it for its first
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    closing: str = ""  # why it is to end
    forks: dict[int, bool] = field(default_factory=dict)  # not open yet -> its files are copied now

    @property
    def works(self) -> bool:
        """Whether it stands, or stood before it moved, and an action of it waits or runs, or a fork
        of it is to begin."""
        busy = self.leases or self.waiting or self.forks
        stood = self.state is not SessionState.WAITING or bool(self.spec.files)
        return bool(busy) and stood

    @property
    def takes(self) -> bool:
        """Whether an action may start in it, those that run aside: it stands, and no fork's files
        are being copied."""
        stands = self.state in (SessionState.IDLE, SessionState.BUSY)
        return stands and not any(self.forks.values())

    @property
    def parallel(self) -> bool:
        """Whether its actions may run beside each other (never on units it reserves)."""
        return self.spec.parallel and not self.cores


@dataclass(slots=True)
class ActionEntry:
    """An action; `lease` is 0 unless one attempt is under way."""

    action: Action
    submitted_at: int
    order_tag: int = 0  # its place among all that wait, drawn when nothing of its own is before it
    counted: int = 0  # on which levels of `fair_order` its last grant was counted as a turn
    state: ActionState = ActionState.PENDING
    lease: int = 0
    attempt: int = 0
    forced_outcome: Outcome | None = None  # how, and why, it shall end when its lease does
    outcome: Outcome | None = None
    route: Routed | None = None  # of a turn that was dealt


@dataclass(slots=True)
class LeaseEntry:
    """What is lent to one attempt of an action; the fencing key.

    `chain` holds the leases of one unit in order: the first has begun, each of the others begins
    when those before it are gone and holds nothing until then."""

    lease: int
    action: int
    node: int
    cores: tuple[int, ...]
    gpus: tuple[int, ...]
    mem_mib: int
    session: int
    reserved: bool  # its cores are its session's own
    granted_at: int  # when it began
    lease_queue: dict[int, None]
    key: str = "cpu"
    grants: list[tuple[int, int]] = field(default_factory=list)  # (since, units), first at start
    prefetched: bool = False  # it was granted while others were before it
    restore_ns: int = 0  # what of its time goes into bringing its service in
    state: LeaseState = LeaseState.GRANTED

    @property
    def units(self) -> int:
        """Units of its key resource that it holds now."""
        return self.grants[-1][1] if self.grants else 0

    @property
    def begun(self) -> bool:
        """Whether it holds its units."""
        return bool(self.grants)

    @property
    def resizable_at(self) -> int:
        """From when on its size may change again."""
        return self.grants[-1][0] + RESIZE_GAP_NS

    def work_spans(self, until: int, exec_ns: int, submitted_at: int) -> list[tuple[int, int]]:
        """(units, ns) of each size in which it worked until it ended. While it had one size its
        node knows better how long: we hear of several ends at once, and the first in a fresh host
        waits for that to start. On CPUs no longer than there was time for: a function can turn the
        clock of its process."""
        cpu = self.key == "cpu"
        if len(self.grants) == 1 and (self.prefetched or (cpu and exec_ns > 0)):
            if cpu:
                time_ns = until - (submitted_at if self.prefetched else self.granted_at)
                exec_ns = max(0, min(exec_ns, time_ns))
            return [(self.grants[0][1], exec_ns)]
        return self.spans(until)

    def spans(self, until: int) -> list[tuple[int, int]]:
        """(units, ns) of each size it had up to a time, restores left out."""
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
    """All of it."""

    clients: dict[int, ClientEntry] = field(default_factory=dict)
    by_uid: dict[str, int] = field(default_factory=dict)
    nodes: dict[int, NodeEntry] = field(default_factory=dict)
    sessions: dict[int, SessionEntry] = field(default_factory=dict)
    services: dict[str, ServiceSpec] = field(default_factory=dict)
    endpoints: dict[str, EndpointEntry] = field(default_factory=dict)
    outside: NodeEntry = field(default_factory=_outside)
    disconnected: dict[int, DisconnectedClient] = field(default_factory=dict)
    idle_deadlines: IdleDeadlines = field(default_factory=IdleDeadlines)
    session_queue: SessionQueue = field(default_factory=SessionQueue)  # sessions not placed
    actions: dict[int, ActionEntry] = field(default_factory=dict)
    leases: dict[int, LeaseEntry] = field(default_factory=dict)
    ready: ReadyQueue = field(default_factory=ReadyQueue)
    estimator: Estimator = field(default_factory=Estimator)
    demand: Demand = field(default_factory=Demand)
    revision: int = 0  # grows when somebody comes to wait who may start on any node
    prefetched: int = 0  # leases that have not begun
    short: dict[tuple[int, int], int] = field(default_factory=dict)  # (node, unit) -> see `ahead`
    batching: dict[tuple[int, int], int] = field(default_factory=dict)  # (node, GPU) -> `batches`
    complete: bool = False  # all expected nodes have joined
    next_lease: int = 1
    next_node: int = 1
    next_client: int = 1
    sessions_seen: int = 0
    once: dict[str, int] = field(default_factory=dict)  # open actions by the name of their work
    starts: int = 0  # of the job's broker
    block_max: int = 8  # GPUs of the largest block that its placer grants a call (`BrokerStarted`)
    margin_ns: int = 0  # a node lends no more so long before its allocation ends
    draining: dict[int, None] = field(default_factory=dict)  # nodes that lend no more, not lost
    next_end: int = 0  # when the next node is drained for its end; 0: none has a known end
    # by allocation: the end that its workers said, and the one that Slurm has told since
    told_ends: dict[str, tuple[int, int]] = field(default_factory=dict)
    allocs: AllocLedger = field(default_factory=AllocLedger)
    rollouts: dict[str, RolloutPool] = field(default_factory=dict)

    def up_nodes(self) -> list[NodeEntry]:
        """The nodes that can be lent from, in order of joining."""
        return [n for n in self.nodes.values() if n.state is NodeState.UP]

    def held_nodes(self) -> list[NodeEntry]:
        """Those and the ones that are drained: what "never" is said of."""
        return [n for n in self.nodes.values() if n.state is not NodeState.DOWN]

    def place(self, node: int) -> NodeEntry:
        """A node by its number, or for 0 `outside`."""
        return self.nodes[node] if node else self.outside

    def check(self) -> None:
        """Proves the laws; an AssertionError names the one that is broken. O(everything)."""
        for node in [self.outside, *self.nodes.values()]:
            self._check_node(node)
        self.allocs.check({n.node for n in self.nodes.values() if n.state is not NodeState.DOWN})
        for action_id, entry in self.actions.items():
            pending = entry.state is ActionState.PENDING
            assert pending or action_id not in self.ready, f"{entry} waits and does not"
            assert (entry.lease != 0) == (not pending and entry.state not in ENDED), f"{entry}"
        for lease in self.leases.values():
            assert not lease.node or lease.node in self.nodes, f"{lease} on no node"
            of = self.actions.get(lease.action)  # forgotten if it is only being cleaned up
            at_client = of is not None and of.action.kind is Kind.GRANT
            assert at_client == (not lease.node), f"{lease} is held by the wrong side"
        for (node_id, gpu), head in self.batching.items():
            lease = self.leases[head]
            assert lease.begun and (lease.node, lease.gpus[0]) == (node_id, gpu), f"{lease}"
        prefetched = sum(not lease.begun for lease in self.leases.values())
        assert self.prefetched == prefetched, f"{self.prefetched} prefetched, not {prefetched}"
        for lease in self.leases.values():
            assert lease.begun == (next(iter(lease.lease_queue)) == lease.lease), f"{lease}"
        for work, action_id in self.once.items():
            entry = self.actions[action_id]
            assert entry.action.once == work and entry.state not in ENDED, f"{work}: {entry}"
        for name, endpoint in self.endpoints.items():
            busy = sum(1 for x in self.leases.values() if endpoint_of(x.key) == name)
            assert busy == endpoint.busy <= endpoint.spec.concurrency, f"{endpoint}: {busy} inside"
            assert endpoint.level >= 0, f"{endpoint} is overdrawn"
        self._check_turns()
        for session_id, session in self.sessions.items():
            waits = session.state is SessionState.WAITING
            assert waits == (session_id in self.session_queue), f"{session} waits and does not"
            assert session.parallel or len(session.leases) <= 1, f"{session} runs two at once"
            self._check_life(session)

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
                assert not pending or bool(dealt) == (action_id in self.ready), f"{entry}"
                assert not (pending and dealt) or pool.placed(action_id), f"{entry} goes nowhere"
                assert dealt or not pool.placed(action_id), f"{entry} was not dealt and is placed"
        assert not turns, f"turns that no pool knows: {turns}"

    def _check_life(self, session: SessionEntry) -> None:
        spec = session.spec
        rests = spec.idle_ns > 0 and session.state is SessionState.IDLE and not session.works
        assert rests == self.idle_deadlines.holds(spec.id, spec.idle_ns), f"{session}: idle"
        for fork, copied in session.forks.items():
            assert self.sessions[fork].spec.origin == spec.id, f"{fork} is no fork of {session}"
            waits = self.sessions[fork].state is SessionState.WAITING
            assert waits != copied, f"{session}: fork {fork} waits and does not"

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
        assert len(set(held)) == len(held), f"a core of {node.spec.name} is lent twice: {held}"
        assert len(held) + node.cores.free == len(node.cores.units), f"cores of {node.spec.name}"
        assert len(set(gpus)) == len(gpus), f"a GPU of {node.spec.name} is lent twice: {gpus}"
        node.gpus.check()
        assert len(gpus) + node.gpus.free == len(node.gpus.units), f"GPUs of {node.spec.name}"
        assert mem + node.free_mem_mib == node.spec.mem_mib, f"memory of {node.spec.name}"
        assert node.free_mem_mib >= 0, f"memory of {node.spec.name} is overdrawn"
