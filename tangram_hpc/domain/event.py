"""Pure. Events: facts in the past tense; the scheduler's only input and the journal's only content.

Law: frozen; `at` is the broker's clock in epoch ns. Adding a field at the end with a default keeps
old journals readable; anything else needs a new `JOURNAL_VERSION`.
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

JOURNAL_VERSION = 7


class Event(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", gc=False):
    """The common head of all events."""

    at: int


class BrokerStarted(Event, frozen=True, tag="broker-started"):
    """First event of a broker's life: which job, which placer, which sync mode of the journal.
    `block_max` is the largest block of GPUs that this placer grants a call. A replay under another
    placer goes by it, so that it comes to the same state."""

    job: str
    placer: str
    sync: str
    user: str = ""
    version: str = ""
    block_max: int = 8


class BrokerStopped(Event, frozen=True, tag="broker-stopped"):
    """Last event of an orderly end."""

    reason: str


class BrokerStalled(Event, frozen=True, tag="broker-stalled"):
    """The broker did not run for a while (it was stopped, or its machine was). The deadlines of
    clients that were away and of sessions that rested before that move by `moved_ns`."""

    moved_ns: int


class ClientJoined(Event, frozen=True, tag="client-joined"):
    """A client connected; the same `uid` again is the same client reconnecting."""

    client: int
    uid: str
    name: str
    rank: int
    size: int
    via: str


class ClientLeft(Event, frozen=True, tag="client-left"):
    """A client's connection ended. `bye` says that it meant to; otherwise its grace begins."""

    client: int
    bye: bool
    expires_at: int


class ClientExpired(Event, frozen=True, tag="client-expired"):
    """A client's grace ran out: what it had open is cancelled and closed."""

    client: int


class NodeJoined(Event, frozen=True, tag="node-joined"):
    """A worker joined as `node`, a new number (epoch) each time."""

    node: int
    spec: NodeSpec


class NodeLost(Event, frozen=True, tag="node-lost"):
    """A worker is gone; all its leases are fenced and its sessions lost."""

    node: int
    reason: str


class NodesComplete(Event, frozen=True, tag="nodes-complete"):
    """Every node that was expected has joined (or will not): from now on "never" is known."""

    nodes: int


class NodeDraining(Event, frozen=True, tag="node-draining"):
    """Nothing more is lent of a node: it is to be given back. `for_end`: only because its
    allocation is about to end, so that a later end takes the drain back."""

    node: int
    reason: str
    for_end: bool = False


class AllocationEndAsked(Event, frozen=True, tag="allocation-end-asked"):
    """Slurm is being asked when this allocation ends. No node of it is drained for its end before
    the answer (`AllocationEndTold`) or before `until`, whichever comes first."""

    allocation: str
    until: int


class AllocationEndTold(Event, frozen=True, tag="allocation-end-told"):
    """Slurm says that this allocation ends at `ends_at_ns` (epoch): its time limit may have been
    changed, or is confirmed shortly before its nodes would be drained."""

    allocation: str
    ends_at_ns: int


class AllocationsAllowed(Event, frozen=True, tag="allocations-allowed"):
    """What the user lets the broker ask for and give back, from now on."""

    policy: AllocPolicy


class AllocationAsked(Event, frozen=True, tag="allocation-asked"):
    """A satellite was decided upon; Slurm does not know of it yet."""

    alloc: int
    shape: SatelliteShape
    reason: str


class AllocationQueued(Event, frozen=True, tag="allocation-queued"):
    """Slurm took the request; it is this job."""

    alloc: int
    job: str


class AllocationRefused(Event, frozen=True, tag="allocation-refused"):
    """Slurm did not take the request, in its words; the shape is left alone until `until`."""

    alloc: int
    reason: str
    until: int


class AllocationHeld(Event, frozen=True, tag="allocation-held"):
    """Slurm granted an allocation, at `since` by its clock (0: nobody knows), of so many CPUs (0:
    as asked). One that the broker did not ask for has `job` and a new number; `own`: the broker's
    own, which is never given back."""

    alloc: int
    since: int
    cpus: int = 0
    job: str = ""
    own: bool = False


class AllocationReleased(Event, frozen=True, tag="allocation-released"):
    """An allocation was decided to end, or a request to be withdrawn. `until`: its shape is left
    alone until then (0: it is not)."""

    alloc: int
    reason: str
    until: int = 0


class AllocationEnded(Event, frozen=True, tag="allocation-ended"):
    """Slurm has the allocation no more, or never gave it. `ended`: when, by its clock; 0: nobody
    knows, so now."""

    alloc: int
    reason: str
    ended: int = 0


class ServiceDeclared(Event, frozen=True, tag="service-declared"):
    """From now on actions may name this GPU service; nothing of it is on any GPU yet."""

    spec: ServiceSpec


class EndpointDeclared(Event, frozen=True, tag="endpoint-declared"):
    """From now on actions may name this endpoint; its bucket is full."""

    spec: EndpointSpec


class ServiceLoaded(Event, frozen=True, tag="service-loaded"):
    """A service stands on this block of free GPUs without a call having brought it there."""

    service: str
    node: int
    gpus: tuple[int, ...]


class SessionRequested(Event, frozen=True, tag="session-requested"):
    """A client asked for a session."""

    spec: SessionSpec


class SessionPlaced(Event, frozen=True, tag="session-placed"):
    """A session got its home node, and the cores it reserves (none but under `static:K`)."""

    session: int
    node: int
    cores: tuple[int, ...]


class SessionReady(Event, frozen=True, tag="session-ready"):
    """The session's sandbox stands."""

    session: int


class SessionRenewed(Event, frozen=True, tag="session-renewed"):
    """Its client still wants a session: it has not been idle before now."""

    session: int


class SessionMoving(Event, frozen=True, tag="session-moving"):
    """A session at rest leaves its node: nothing starts in it, and its files are packed there."""

    session: int
    reason: str


class SessionPacked(Event, frozen=True, tag="session-packed"):
    """Nothing of a session is left on the node that it leaves, and its files are in the store under
    this digest: it waits for its next home."""

    session: int
    files: str


class SessionClosing(Event, frozen=True, tag="session-closing"):
    """The session is to end; what runs in it is killed, what waits for it is cancelled."""

    session: int
    reason: str


class SessionClosed(Event, frozen=True, tag="session-closed"):
    """The session's sandbox is gone and its memory free; `reason` is empty for an orderly end.
    `never`: it could not have opened on any node."""

    session: int
    reason: str
    never: bool = False


class ActionSubmitted(Event, frozen=True, tag="action-submitted"):
    """A client submitted an action."""

    action: Action


class ActionCancelled(Event, frozen=True, tag="action-cancelled"):
    """A client cancelled an action, or it can no longer run (`reason`); it ends as `state`, at
    once while it waits, with its lease while it runs."""

    action: int
    reason: str
    state: ActionState = ActionState.CANCELLED


class ActionAcknowledged(Event, frozen=True, tag="action-acknowledged"):
    """The client has these results: the broker may forget them."""

    actions: tuple[int, ...]


class LeaseGranted(Event, frozen=True, tag="lease-granted"):
    """Units were lent to one attempt of an action. `restore_ns`: bringing its service onto `gpus`
    is part of it, because that block does not hold it. With `after` it begins only when that
    lease is gone from these units, and holds nothing until then."""

    lease: int
    action: int
    node: int
    attempt: int
    cores: tuple[int, ...]
    gpus: tuple[int, ...] = ()
    restore_ns: int = 0
    after: int = 0


class LeaseStarted(Event, frozen=True, tag="lease-started"):
    """The worker says that it runs (told on the worker's beat; a short one never says it)."""

    lease: int


class LeaseResized(Event, frozen=True, tag="lease-resized"):
    """The units of a running lease changed."""

    lease: int
    cores: tuple[int, ...]


class LeaseFinished(Event, frozen=True, tag="lease-finished"):
    """The attempt's outcome is known. `clean` says that its units are free with it."""

    lease: int
    outcome: Outcome
    clean: bool


class LeaseReturned(Event, frozen=True, tag="lease-returned"):
    """The worker gives a lease back that has not begun; its action waits again, at its old turn."""

    lease: int


class LeaseReleased(Event, frozen=True, tag="lease-released"):
    """The node is clean after a lease whose outcome was known before."""

    lease: int


class EndpointThrottled(Event, frozen=True, tag="endpoint-throttled"):
    """An endpoint pushed back on a call whose lease began at `granted_at`: nobody calls it before
    `until`, and fewer do from then on. `pushed`: FALTERED or THROTTLED."""

    endpoint: str
    until: int
    granted_at: int
    pushed: int


class RolloutsDeclared(Event, frozen=True, tag="rollouts-declared"):
    """From now on turns may be dealt among the services of this pool."""

    spec: RolloutsSpec


class RolloutPriorLoaded(Event, frozen=True, tag="rollout-prior-loaded"):
    """A pool goes on from what was learned in earlier runs: `shared` by all jobs that share its
    folder, `own` by this job. Both are compressed causal trees, see
    `scheduler/handlers/rollout_prior`; empty: nothing was learned."""

    pool: str
    shared: bytes
    own: bytes


class TurnRouted(Event, frozen=True, tag="turn-routed"):
    """A turn is a call of this service from now on; the fields are `Routed`'s."""

    action: int
    service: str
    wanted: int
    bucket: int
    how: str
    move_ns: int


class RolloutServiceClosed(Event, frozen=True, tag="rollout-service-closed"):
    """A service of a pool cannot be brought to its GPUs: no turn is dealt to it before `until`."""

    pool: str
    service: str
    until: int


class RolloutServiceTried(Event, frozen=True, tag="rollout-service-tried"):
    """Turns are dealt to such a service again."""

    pool: str
    service: str


class ToolReturned(Event, frozen=True, tag="tool-returned"):
    """A client's word that a tool which ran elsewhere returned to one of its trajectories."""

    client: int
    pool: str
    trajectory: str
    tool: str
    characters: int
    status: int


class TrajectoryEnded(Event, frozen=True, tag="trajectory-ended"):
    """A trajectory has ended with so many generated tokens (-1: it was cut off) in this step of the
    trainer (-1: as the last one)."""

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
]


def moved(event: Event, at: int) -> Event:
    """The same, at another time."""
    return msgspec.structs.replace(event, at=at)
