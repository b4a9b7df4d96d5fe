"""Defines the events: facts in the past tense. Pure.

Events are the only input of the scheduler and the only content of the journal. An event never
changes. Its field `at` is the broker's clock, in ns since the epoch.

A new field at the end of an event, with a default, keeps old journals readable. Any other change
needs a new `JOURNAL_VERSION`.
"""

from __future__ import annotations

from typing import Union

import msgspec

from .action import Action
from .allocation import AllocPolicy, SatelliteShape
from .node import NodeSpec
from .outcome import Outcome
from .rollouts import RolloutsSpec
from .service import EndpointSpec, ServiceSpec
from .session import SessionSpec
from .states import ActionState
from .tenant import TenantSpec

JOURNAL_VERSION = 11


class Event(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", gc=False):
    """The fields that all events have.

    Attributes:
        at: when it happened, by the broker's clock, in ns since the epoch.
    """

    at: int


class BrokerStarted(Event, frozen=True, tag="broker-started"):
    """The first event of each start of a broker.

    Attributes:
        job: the Slurm job, or a name where there is none.
        placer: name of the placer.
        sync: sync mode of the journal.
        user: the user who runs the broker.
        version: version of this package.
        block_max: the largest block of GPUs that the placer grants to a call. A replay under
            another placer uses it, so that it reaches the same state.
        await_until: until when this broker waits for the workers and clients of the broker before
            it, in ns since the epoch; 0 if it waits for none, since all that the earlier broker
            held has ended.
        granted_at: when Slurm granted the broker's job its nodes, by Slurm's clock, in ns since the
            epoch; the time of the last grant if the job was requeued. 0 if that is not known.
        account: the Slurm account that the job is charged to; empty where there is none.
    """

    job: str
    placer: str
    sync: str
    user: str = ""
    version: str = ""
    block_max: int = 8
    await_until: int = 0
    granted_at: int = 0
    account: str = ""


class BrokerStopped(Event, frozen=True, tag="broker-stopped"):
    """The last event of a broker that ended in order."""

    reason: str


class BrokerStalled(Event, frozen=True, tag="broker-stalled"):
    """The broker did not run for a while, because it or its machine was stopped.

    The deadlines of all clients that were disconnected before the stall, and of all sessions that
    were idle before it, move by `moved_ns`.
    """

    moved_ns: int


class ClientJoined(Event, frozen=True, tag="client-joined"):
    """A client connected. If its `uid` is known, the same client has connected again.

    Attributes:
        client: number that the broker gave it.
        uid: a random name that the client chose for itself when it began.
        name: what people see.
        rank: its rank in the trainer's world.
        size: how many ranks that world has.
        via: the transport of its connection, `socket` or `mpi`.
    """

    client: int
    uid: str
    name: str
    rank: int
    size: int
    via: str


class TenantDeclared(Event, frozen=True, tag="tenant-declared"):
    """What a tenant is granted from now on."""

    spec: TenantSpec


class TenantNamed(Event, frozen=True, tag="tenant-named"):
    """A client that has just joined for the first time named the tenant for which its actions and
    sessions count. Those of a client that names none count for the default tenant.
    """

    client: int
    tenant: str


class ClientLeft(Event, frozen=True, tag="client-left"):
    """A client's connection ended.

    Attributes:
        client: its number.
        bye: whether the client said goodbye. If not, it may come back within its grace.
        expires_at: when that grace ends.
    """

    client: int
    bye: bool
    expires_at: int


class ClientExpired(Event, frozen=True, tag="client-expired"):
    """A client did not come back within its grace. Its actions are cancelled and its sessions
    closed.
    """

    client: int


class NodeJoined(Event, frozen=True, tag="node-joined"):
    """A worker joined. `node` is a new number each time, so it is also the node's epoch.

    Attributes:
        node: the number that the broker gave it.
        spec: what it lends.
        uid: a random name that the worker chose for itself when it began; empty for none.
    """

    node: int
    spec: NodeSpec
    uid: str = ""


class NodeRejoined(Event, frozen=True, tag="node-rejoined"):
    """The worker of a node came back to a broker that was started again. Its leases and sessions go
    on.
    """

    node: int


class NodeLost(Event, frozen=True, tag="node-lost"):
    """A worker is gone. All its leases are fenced and its sessions are lost."""

    node: int
    reason: str


class NodesComplete(Event, frozen=True, tag="nodes-complete"):
    """No further node is expected, so an action that fits no node now can never run."""

    nodes: int


class NodeDraining(Event, frozen=True, tag="node-draining"):
    """Nothing new is lent on a node, because it will be given back.

    Attributes:
        node: the node's number.
        reason: why, for people.
        for_end: whether the only cause is that its allocation will end soon. Then the drain is
            undone if the allocation turns out to end later.
    """

    node: int
    reason: str
    for_end: bool = False


class AllocationEndAsked(Event, frozen=True, tag="allocation-end-asked"):
    """The broker asks Slurm when an allocation ends.

    No node of the allocation is drained for that end before the answer (`AllocationEndTold`) has
    come or `until` has passed.
    """

    allocation: str
    until: int


class AllocationEndTold(Event, frozen=True, tag="allocation-end-told"):
    """Slurm said that an allocation ends at `ends_at_ns` (since the epoch).

    Either its time limit was changed, or Slurm confirmed the end shortly before the allocation's
    nodes would be drained.
    """

    allocation: str
    ends_at_ns: int


class AllocationsAllowed(Event, frozen=True, tag="allocations-allowed"):
    """The user's policy for satellites and for giving nodes back, from now on."""

    policy: AllocPolicy


class AllocationAsked(Event, frozen=True, tag="allocation-asked"):
    """The broker decided to request a satellite. Slurm has not heard of it yet."""

    alloc: int
    shape: SatelliteShape
    reason: str


class AllocationQueued(Event, frozen=True, tag="allocation-queued"):
    """Slurm accepted the request and gave it the id `job`."""

    alloc: int
    job: str


class AllocationRefused(Event, frozen=True, tag="allocation-refused"):
    """Slurm did not accept the request. No satellite of this shape is requested before `until`."""

    alloc: int
    reason: str
    until: int


class AllocationHeld(Event, frozen=True, tag="allocation-held"):
    """Slurm granted an allocation.

    Attributes:
        alloc: its number here. An allocation that the broker did not request gets a new one.
        since: when it began, by Slurm's clock; 0 if that is not known.
        cpus: its CPUs; 0 for as many as were requested.
        job: its Slurm job id, if the broker did not request it.
        own: whether it is the broker's own allocation, which is never given back.
    """

    alloc: int
    since: int
    cpus: int = 0
    job: str = ""
    own: bool = False


class AllocationReleased(Event, frozen=True, tag="allocation-released"):
    """It was decided to end an allocation, or to withdraw its request.

    If `until` is not 0, no satellite of its shape is requested before that time.
    """

    alloc: int
    reason: str
    until: int = 0


class AllocationEnded(Event, frozen=True, tag="allocation-ended"):
    """Slurm no longer has the allocation, or never granted it.

    `ended` is the time of its end by Slurm's clock. 0 means that the time is not known; `at` is
    used then.
    """

    alloc: int
    reason: str
    ended: int = 0


class ServiceDeclared(Event, frozen=True, tag="service-declared"):
    """Actions may call this GPU service from now on. It is not on any GPU yet."""

    spec: ServiceSpec


class EndpointDeclared(Event, frozen=True, tag="endpoint-declared"):
    """Actions may call this endpoint from now on. Its token bucket is full."""

    spec: EndpointSpec


class ServiceLoaded(Event, frozen=True, tag="service-loaded"):
    """A service came onto this block of free GPUs without a call that needed it."""

    service: str
    node: int
    gpus: tuple[int, ...]


class SessionRequested(Event, frozen=True, tag="session-requested"):
    """A client requested a session. `snapshot_nodes` are the nodes that had the snapshot from which
    it begins, ascending. It is empty for a session without a snapshot, where many nodes have the
    snapshot, and in journals of earlier releases.
    """

    spec: SessionSpec
    snapshot_nodes: tuple[int, ...] = ()


class SessionPlaced(Event, frozen=True, tag="session-placed"):
    """A session got its node, and the cores that it reserves (only under `static:K`)."""

    session: int
    node: int
    cores: tuple[int, ...]


class SessionReady(Event, frozen=True, tag="session-ready"):
    """The sandbox of a session is ready; `image` is the digest of its image, empty for none."""

    session: int
    image: str = ""


class SessionRenewed(Event, frozen=True, tag="session-renewed"):
    """The client renewed a session: its time of idleness begins anew."""

    session: int


class SessionAttached(Event, frozen=True, tag="session-attached"):
    """A client other than its own attached to a shared session, or attached again.

    Attributes:
        session: id of the session.
        client: number of the client.
        may_close: whether its token lets it close the session and hold it.
        hold: whether the session stays open for this client when its own client is gone.
    """

    session: int
    client: int
    may_close: bool = False
    hold: bool = False


class SessionDetached(Event, frozen=True, tag="session-detached"):
    """A client detached from a session. What it had submitted there was cancelled before."""

    session: int
    client: int


class SessionMoving(Event, frozen=True, tag="session-moving"):
    """An idle session leaves its node: no action starts in it, and its files are archived there."""

    session: int
    reason: str


class SessionPacked(Event, frozen=True, tag="session-packed"):
    """A session has left its node and waits for another one.

    Its files are in the job's store, in the archive with the digest `files`.
    """

    session: int
    files: str


class SessionClosing(Event, frozen=True, tag="session-closing"):
    """A session is ending. Its running actions are killed, and its waiting ones cancelled."""

    session: int
    reason: str


class SessionClosed(Event, frozen=True, tag="session-closed"):
    """The sandbox of a session is gone, and its memory is free.

    `reason` is empty if its client itself closed it. `infeasible` says that the session could not
    have opened on any node.
    """

    session: int
    reason: str
    infeasible: bool = False


class ActionSubmitted(Event, frozen=True, tag="action-submitted"):
    """A client submitted an action."""

    action: Action


class ActionResubmitted(Event, frozen=True, tag="action-resubmitted"):
    """A client sent an open action again to a broker that was started again and did not have its
    payload. Until then the action does not start.
    """

    action: int


class ActionCancelled(Event, frozen=True, tag="action-cancelled"):
    """A client cancelled an action, or the action can no longer run.

    It ends as `state`: at once if it waits, and with its lease if it runs. If it has ended, nothing
    happens, unless `state` is NODE_FAIL: then its result was lost with its node before the client
    had it, and the client is told NODE_FAIL.
    """

    action: int
    reason: str
    state: ActionState = ActionState.CANCELLED


class ActionAcknowledged(Event, frozen=True, tag="action-acknowledged"):
    """The client has the results of these actions, so the broker may forget them."""

    actions: tuple[int, ...]


class LeaseGranted(Event, frozen=True, tag="lease-granted"):
    """Units were lent to one attempt of an action.

    Attributes:
        lease: number of the lease.
        action: id of the action.
        node: number of the node.
        attempt: which attempt of the action this is, from 1.
        cores: the CPUs that were lent.
        gpus: the GPUs that were lent.
        restore_ns: time to bring the service onto `gpus`, which is part of the attempt; 0 if the
            service is there.
        after: the lease that must end on these units before this one begins; it holds nothing until
            then. 0 for a lease that begins at once.
    """

    lease: int
    action: int
    node: int
    attempt: int
    cores: tuple[int, ...]
    gpus: tuple[int, ...] = ()
    restore_ns: int = 0
    after: int = 0


class LeaseStarted(Event, frozen=True, tag="lease-started"):
    """The worker said that the attempt runs.

    Workers say so in their periodic reports, so a short attempt may end without this event.
    """

    lease: int


class LeaseResized(Event, frozen=True, tag="lease-resized"):
    """The CPUs of a running lease changed to `cores`."""

    lease: int
    cores: tuple[int, ...]


class LeaseFinished(Event, frozen=True, tag="lease-finished"):
    """The outcome of an attempt is known. `clean` says that its units are free, too."""

    lease: int
    outcome: Outcome
    clean: bool


class LeaseReturned(Event, frozen=True, tag="lease-returned"):
    """The worker gave back a lease that had not begun. Its action waits again, in its old place.

    Attributes:
        lease: number of the lease.
        undelivered: whether the order for it never reached its worker, because the broker ended.
            Only such a lease may be one that began at once, without a lease in front of it.
    """

    lease: int
    undelivered: bool = False


class LeaseReleased(Event, frozen=True, tag="lease-released"):
    """The node released the units of a lease whose outcome was known before."""

    lease: int


class EndpointThrottled(Event, frozen=True, tag="endpoint-throttled"):
    """An endpoint refused a call whose lease began at `granted_at`.

    The endpoint is not called before `until`, and fewer calls run at once from then on. `pushed` is
    FALTERED or THROTTLED.
    """

    endpoint: str
    until: int
    granted_at: int
    pushed: int


class RolloutsDeclared(Event, frozen=True, tag="rollouts-declared"):
    """Turns may be routed among the services of this pool from now on."""

    spec: RolloutsSpec


class RolloutPriorLoaded(Event, frozen=True, tag="rollout-prior-loaded"):
    """A pool goes on from what was learned in earlier runs: `shared` by all jobs that share its
    folder, `own` by this job. Both are compressed causal trees, see
    `scheduler/handlers/rollout_prior`; empty bytes stand for an empty tree."""

    pool: str
    shared: bytes
    own: bytes


class TurnRouted(Event, frozen=True, tag="turn-routed"):
    """A turn was routed: from now on it is a call of `service`. The fields are those of `Routed`.
    """

    action: int
    service: str
    wanted: int
    bucket: int
    how: str
    move_ns: int


class RolloutServiceClosed(Event, frozen=True, tag="rollout-service-closed"):
    """A service of a pool could not be brought to its GPUs. It gets no turn before `until`."""

    pool: str
    service: str
    until: int


class RolloutServiceTried(Event, frozen=True, tag="rollout-service-tried"):
    """Turns are routed again to a service that had failed."""

    pool: str
    service: str


class ToolReturned(Event, frozen=True, tag="tool-returned"):
    """A client reported that a tool of a trajectory, which ran elsewhere, returned.

    Attributes:
        client: number of the client.
        pool: the rollout pool.
        trajectory: the client's name for the trajectory.
        tool: name of the tool.
        characters: length of what it returned.
        status: how it ended: SUCCESS, FAILURE or TIMEOUT of `scheduler.routing.cmlfq`.
    """

    client: int
    pool: str
    trajectory: str
    tool: str
    characters: int
    status: int


class TrajectoryEnded(Event, frozen=True, tag="trajectory-ended"):
    """A trajectory ended.

    Attributes:
        client: number of the client.
        pool: the rollout pool.
        trajectory: the client's name for the trajectory.
        tokens: how many tokens it generated; -1 if it was cut off.
        epoch: the training step; -1 for the step of the trajectory that ended before this one.
    """

    client: int
    pool: str
    trajectory: str
    tokens: int
    epoch: int = -1


AnyEvent = Union[  # noqa: UP007 - a runtime union that msgspec decodes by tag
    BrokerStarted,
    BrokerStopped,
    BrokerStalled,
    ClientJoined,
    TenantDeclared,
    TenantNamed,
    ClientLeft,
    ClientExpired,
    NodeJoined,
    NodeLost,
    NodesComplete,
    ServiceDeclared,
    EndpointDeclared,
    ServiceLoaded,
    SessionRequested,
    SessionPlaced,
    SessionReady,
    SessionRenewed,
    SessionClosing,
    SessionClosed,
    ActionSubmitted,
    ActionCancelled,
    ActionAcknowledged,
    LeaseGranted,
    LeaseStarted,
    LeaseResized,
    LeaseFinished,
    LeaseReleased,
    LeaseReturned,
    EndpointThrottled,
    NodeDraining,
    AllocationsAllowed,
    AllocationAsked,
    AllocationQueued,
    AllocationRefused,
    AllocationHeld,
    AllocationReleased,
    AllocationEnded,
    SessionMoving,
    SessionPacked,
    RolloutsDeclared,
    TurnRouted,
    RolloutServiceClosed,
    RolloutServiceTried,
    ToolReturned,
    TrajectoryEnded,
    AllocationEndAsked,
    AllocationEndTold,
    RolloutPriorLoaded,
    SessionAttached,
    SessionDetached,
    NodeRejoined,
    ActionResubmitted,
]


def moved(event: Event, at: int) -> Event:
    """Returns the event with another time."""
    return msgspec.structs.replace(event, at=at)
