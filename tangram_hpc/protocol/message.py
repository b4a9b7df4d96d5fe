"""Defines every message that passes between client, broker and worker. Pure.

Each message is one `Struct`, encoded as an array, and tagged by a small whole number. A message
with `n = 1` has a payload, which travels beside the messages in their frame (`protocol/frame.py`).
The broker never decodes a payload.

A new field goes to the end and has a default. Any other change needs a new `PROTOCOL_VERSION`.
"""

from __future__ import annotations

from typing import Union

import msgspec

from ..domain.action import Action
from ..domain.node import NodeSpec
from ..domain.outcome import Outcome
from ..domain.rollouts import RolloutsSpec, Routed
from ..domain.service import EndpointSpec, ServiceSpec
from ..domain.session import SessionSpec
from ..domain.states import ActionState

PROTOCOL_VERSION = 7
INLINE_MAX = 66 * 1024  # 64 KiB of data and their framing; larger payloads go through the store


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="t", gc=False):
    """The base class of all messages.

    A message never refers back to itself, so Python's garbage collector need not look at it (`gc`).
    """


# ---- both ways -------------------------------------------------------------------------------


class Ping(Message, frozen=True, tag=1):
    """Asks whether the peer lives. `stamp` comes back in its Pong."""

    stamp: int = 0


class Pong(Message, frozen=True, tag=2):
    """Answers a Ping. For `credit`, see `Welcome`."""

    stamp: int = 0
    credit: int = 0


class PeerRefused(Message, frozen=True, tag=3):
    """The peer ends the connection because of a wrong version, job or role; `text` says which, for
    people.
    """

    text: str


class StreamData(Message, frozen=True, tag=46):
    """Bytes of a port stream, in either direction (`protocol/port_flow.py`).

    Attributes:
        stream: number of the stream.
        last: whether this side sends no more bytes after these.
        n: always 1: the message has one payload, the bytes, which may be empty.
    """

    stream: int
    last: bool = False
    n: int = 1


class StreamCredit(Message, frozen=True, tag=47):
    """Allows `count` more bytes of a port stream to be sent to the side that sends this message.

    The first such message that a client gets says that its stream is connected.
    """

    stream: int
    count: int


class StreamEnded(Message, frozen=True, tag=62):
    """A port stream is over in both directions.

    Attributes:
        stream: number of the stream.
        reason: why, in one line; empty if a side closed it in order.
        code: the symbolic name of the error, such as ECONNREFUSED; empty for none.
    """

    stream: int
    reason: str = ""
    code: str = ""


# ---- client -> broker ------------------------------------------------------------------------


class ClientHello(Message, frozen=True, tag=10):
    """The first message of a client.

    Attributes:
        version: the protocol version that it speaks.
        job: the job that it wants to reach.
        uid: its own name for itself, which stays the same when it connects again.
        name: what people see.
        rank: its rank in its MPI world; -1 without one.
        size: the size of that world; 0 without one.
        via: the way it came, `socket` or `mpi`.
        tenant: the tenant for which its actions and sessions count; empty for the default one.
    """

    version: int
    job: str
    uid: str
    name: str = ""
    rank: int = -1
    size: int = 0
    via: str = "socket"
    tenant: str = ""


class Submit(Message, frozen=True, tag=11):
    """Submits an action, with a payload for its worker. To submit an id again does no harm."""

    action: Action
    n: int = 1


class Cancel(Message, frozen=True, tag=12):
    """The client no longer wants these actions."""

    actions: tuple[int, ...]


class RequestSession(Message, frozen=True, tag=13):
    """Requests a session. To request an id again does no harm.

    `again` says that it was requested before the connection was lost. If the session has ended
    since then, the answer is SessionDown, and no new session opens under its id. With `n = 1` the
    payload is what clients that attach are told of a shared session
    (`payload.SessionContext`). The broker keeps it in memory alone.
    """

    spec: SessionSpec
    again: bool = False
    n: int = 0


class ReleaseSession(Message, frozen=True, tag=14):
    """Closes a session. What still runs in it is killed."""

    session: int


class Ack(Message, frozen=True, tag=15):
    """The client holds the results of these actions, so the broker may forget them."""

    actions: tuple[int, ...]


class Query(Message, frozen=True, tag=16):
    """A query about the broker's state, answered by QueryReply.

    `what` is `info`, `nodes`, `pending` or another name in `broker/queries/`; `explain` has an
    action's id as its `argument`.
    """

    request: int
    what: str
    argument: str = ""


class DeclareService(Message, frozen=True, tag=21):
    """Declares a service, which actions may call from now on. Answered by QueryReply or
    Rejected."""

    request: int
    spec: ServiceSpec


class DeclareRollouts(Message, frozen=True, tag=22):
    """Declares a rollout pool, among whose services turns are routed from now on.

    It is answered by QueryReply or Rejected. To declare the same pool again does no harm.
    """

    request: int
    spec: RolloutsSpec


class ReportToolReturn(Message, frozen=True, tag=23):
    """Reports that a tool of a trajectory, which ran outside of the broker, returned `characters`
    characters.

    `status` is SUCCESS, FAILURE or TIMEOUT of `scheduler.routing.cmlfq`. The broker ignores the
    message if it does not know the trajectory.
    """

    pool: str
    trajectory: str
    tool: str
    characters: int
    status: int


class EndTrajectory(Message, frozen=True, tag=24):
    """Reports that a trajectory ended with `tokens` generated tokens; -1 if it was cut off.

    `epoch` is the training step; -1 for the step of the trajectory that ended before this one. The
    broker ignores the message if it does not know the trajectory.
    """

    pool: str
    trajectory: str
    tokens: int
    epoch: int = -1


class Forget(Message, frozen=True, tag=26):
    """Lets the broker delete the kept results of actions with these idempotency keys
    (`Action.once`).

    If `prefix` is not empty, the results of all keys that begin with it may go too. Answered by
    QueryReply.
    """

    request: int
    names: tuple[str, ...]
    prefix: str = ""


class Input(Message, frozen=True, tag=29):
    """Input for a running command: a signal, or what its terminal gets (`protocol/input_flow.py`).

    Attributes:
        id: the action, from a client to the broker; the lease, from the broker to a worker.
        kind: what it is, a number of `input_flow`.
        number: the signal, or rows.
        other: columns.
        n: 1 if it has bytes as its payload.
    """

    id: int
    kind: int
    number: int = 0
    other: int = 0
    n: int = 0


class OpenStream(Message, frozen=True, tag=45):
    """Asks for a stream to a port of a session's sandbox (`protocol/port_flow.py`). The broker
    passes it on to the worker. The answer is StreamCredit or StreamEnded.

    Attributes:
        stream: number of the stream, which the client chose.
        session: the session.
        port: the TCP port, on the loopback that the session's commands have.
    """

    stream: int
    session: int
    port: int


class Bye(Message, frozen=True, tag=17):
    """The client ends and will not come back, so that it needs no grace."""


class RenewSession(Message, frozen=True, tag=19):
    """The client still wants a session: its time of idleness begins anew."""

    session: int


class AttachSession(Message, frozen=True, tag=27):
    """Attaches to a shared session of another client; answered by Attached or Rejected.

    Attributes:
        request: number of the request.
        name: the session's name.
        token: its attach token or its close token.
        hold: whether the session shall stay open for this client when its own client is gone.
        session: id of the session if this client was attached before the connection was lost. If
            that session has ended since then, the answer is SessionDown.
    """

    request: int
    name: str
    token: str
    hold: bool = False
    session: int = 0


class DetachSession(Message, frozen=True, tag=28):
    """Detaches from a session. What this client had submitted there is cancelled."""

    session: int


class ManageSnapshot(Message, frozen=True, tag=43):
    """Lists or removes snapshots, or prepares an environment; answered by QueryReply or Rejected.

    Attributes:
        request: number of the request.
        op: one of five operations. `list` lists the snapshots. `remove` removes the snapshot
            `name`. `prepare` asks for the environment with the fingerprint `name`; it is answered
            when the environment is ready, or when this client is to build it. `ready` says that
            this client has built the environment as the snapshot `text`. `failed` says that it
            could not, and `text` says why.
        name: see `op`.
        text: see `op`.
    """

    request: int
    op: str
    name: str = ""
    text: str = ""


class DeclareEndpoint(Message, frozen=True, tag=20):
    """Declares an endpoint, which actions may call from now on.

    It is answered by QueryReply or Rejected. To declare the same endpoint again does no harm.
    """

    request: int
    spec: EndpointSpec


class GrantEnded(Message, frozen=True, tag=25):
    """Reports how the call of an endpoint went that was made under a grant.

    `lease` is the one in Granted; 0 says that the client no longer wants the action, granted or
    not. An outcome of PREEMPTED sends the action back: it waits again, in its old place.
    """

    action: int
    lease: int
    outcome: Outcome


class Shutdown(Message, frozen=True, tag=18):
    """Asks the broker to end (`tangram shutdown`). The broker sends it to its workers, too."""

    reason: str = ""


# ---- broker -> client ------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag=30):
    """The first answer to a client: its number, and what it must know of the job."""

    client: int
    job: str
    store: str
    placer: str
    sync: str
    grace_s: float
    fresh: bool = True  # False if the broker knows it, and its open actions, from before
    # how many of its messages the broker has counted (`unconfirmed.COUNTED`); -1: this broker does
    # not know, since another one counted them
    received: int = 0
    epoch: int = 0  # of the broker, from 1; a client that has seen a higher one refuses it
    credit: int = 0  # how many plain actions the client may have at the broker; 0: any number
    output_bound: int = 64 << 20  # bytes of an output stream that a command may ask to keep


class ActionResult(Message, frozen=True, tag=31):
    """The outcome of an action, with the payload that its worker returned.

    Attributes:
        action: id of the action.
        outcome: how its last attempt ended.
        node: name of the node.
        cores: the CPUs that it held last.
        attempt: number of the last attempt, from 1.
        queue_ns: how long it waited until its last grant, by the broker's clock.
        held_ns: time from that grant to the end, by the broker's clock.
        n: 1 if it has a payload.
        grants: for each size that the lease had: ns since the grant, and units from then on.
        route: where a turn was routed to; None for other actions.
    """

    action: int
    outcome: Outcome
    node: str
    cores: tuple[int, ...]
    attempt: int
    queue_ns: int
    held_ns: int
    n: int = 0
    grants: tuple[tuple[int, int], ...] = ()
    route: Routed | None = None

    def under(self, action: int) -> ActionResult:
        """Returns this result for another action, which had the same idempotency key."""
        return msgspec.structs.replace(self, action=action)


class Rejected(Message, frozen=True, tag=32):
    """The action or session can never run; `text` names the field and the remedy.

    `lost` says that it could have run, but its session is gone. An id of 0 means that a message
    without an id was refused; the connection stays open.
    """

    id: int
    text: str
    lost: bool = False


class SessionUp(Message, frozen=True, tag=33):
    """The sandbox of a session is ready on `node`, after it waited `wait_ns` for a place. `image`
    is the digest of its image, empty for none.
    """

    session: int
    node: str
    wait_ns: int = 0
    image: str = ""


class SessionDown(Message, frozen=True, tag=34):
    """The session has ended.

    `reason` is empty if that was what the client wanted. `infeasible` says that the session could
    not have opened on any node.
    """

    session: int
    reason: str
    infeasible: bool = False


class Output(Message, frozen=True, tag=35):
    """A part of the output of an action that streams; `stream` 1 is stdout, 2 is stderr."""

    id: int  # the lease, from a worker to the broker; the action, from the broker to a client
    stream: int
    n: int = 1


class QueryReply(Message, frozen=True, tag=36):
    """Answers a query; the payload is JSON."""

    request: int
    n: int = 1


class Attached(Message, frozen=True, tag=38):
    """The client is attached to a session; its payload is that of the owner's RequestSession.

    Attributes:
        request: number of the request.
        spec: what was requested, without what only its own client may know.
        may_close: whether the client may close the session and hold it.
        n: 1 if it has a payload.
    """

    request: int
    spec: SessionSpec
    may_close: bool = False
    n: int = 0


class Granted(Message, frozen=True, tag=37):
    """The client may now make this call: it holds a slot and has taken a token of the endpoint.

    It holds the slot under `lease` until it sends GrantEnded. `rate_micro` and `burst_micro` are
    the token bucket's current values. A client that did not run for a while observes them by
    itself, and gives back what it cannot use in time.
    """

    action: int
    lease: int
    rate_micro: int = 0
    burst_micro: int = 0


class InputCredit(Message, frozen=True, tag=39):
    """Allows `count` more bytes of input for a running command.

    A worker sends the message with the lease's number as `id`, the broker passes it on to the
    client with the action's id. The broker also says how many bytes it has allowed in all
    (`total`), since such a message may be lost with the client's connection; on a new connection
    the broker repeats the total. A worker that comes back to a broker which was started again says
    in `count` how many bytes it has allowed in all, and in `total` how many of them it has
    received.
    """

    id: int
    count: int
    total: int = 0


# ---- worker -> broker ------------------------------------------------------------------------


class WorkerHello(Message, frozen=True, tag=50):
    """The first message of a worker, with what it lends.

    A worker that has lost its broker and has reached one again also tells what it still holds. If
    the broker waits for this worker, its Welcome has the same number of a node, and the worker goes
    on. Otherwise it is refused.

    Attributes:
        version: the protocol version that it speaks.
        job: the job that it wants to reach.
        spec: what it lends.
        uid: its own name for itself, which stays the same when it connects again.
        node: the number that the broker gave it before; 0 for a worker that is new.
        leases: the leases that it holds, or whose end the broker may not know.
        sessions: the sessions whose sandboxes it has, or whose end the broker may not know.
    """

    version: int
    job: str
    spec: NodeSpec
    uid: str = ""
    node: int = 0
    leases: tuple[int, ...] = ()
    sessions: tuple[int, ...] = ()


class AttemptsStarted(Message, frozen=True, tag=51):
    """The processes of these leases run. Workers report it periodically, for leases that still run.
    """

    leases: tuple[int, ...]


class Finished(Message, frozen=True, tag=52):
    """The outcome of an attempt is known.

    `clean` says that its units are free, too. With `n = 1`, a payload for the client comes along.
    """

    lease: int
    outcome: Outcome
    clean: bool = True
    n: int = 0


class Released(Message, frozen=True, tag=53):
    """What a lease's processes left behind has been removed, so its units are free."""

    lease: int


class Returned(Message, frozen=True, tag=56):
    """The worker gives back leases that wait behind a long one. They will not begin."""

    leases: tuple[int, ...]


class Leaving(Message, frozen=True, tag=57):
    """This node will soon be gone, while the job goes on. The broker shall give it nothing more.

    When the connection then ends, the broker starts elsewhere what ran on the node.
    """

    reason: str


class SandboxUp(Message, frozen=True, tag=54):
    """The sandbox of a session is ready; `image` is the digest of its image, empty for none."""

    session: int
    image: str = ""


class SandboxDown(Message, frozen=True, tag=55):
    """The sandbox of a session is gone. `reason` is empty if the broker had ordered that.
    `infeasible` says that it could not have been built on any node.
    """

    session: int
    reason: str = ""
    infeasible: bool = False


class BackgroundWants(Message, frozen=True, tag=59):
    """Background processes of a session could run and hold no CPUs. A worker repeats it."""

    session: int


class SandboxPacked(Message, frozen=True, tag=58):
    """The sandbox of a session is gone, as PackSandbox ordered, and its files are in the store."""

    session: int
    files: str


class SnapshotReport(Message, frozen=True, tag=60):
    """A worker's report about a snapshot.

    Attributes:
        name: the snapshot.
        what: `held` when its files are on this node, `gone` when they no longer are, `wanted` when
            a session of this node waits for them, and `published` when an archive of them is in
            the store, or could not be made.
        session: the session of which it was taken on this node; 0 if it came from another node.
        image: the image of that session, as it was asked for; empty for none.
        digest: the digest of that image; empty for none and for a plain folder.
        mib: the space that it takes on this node, in MiB.
        files: for `published`, the name of its archive in the store; empty if there is none.
        why: for `published`, in one line why there is no archive; empty if there is one.
    """

    name: str
    what: str
    session: int = 0
    image: str = ""
    digest: str = ""
    mib: int = 0
    files: str = ""
    why: str = ""


# ---- broker -> worker ------------------------------------------------------------------------


class WorkerWelcome(Message, frozen=True, tag=70):
    """The first answer to a worker: its number, and what it must know of the job."""

    node: int
    store: str
    kill_wait_s: float = 2.0
    output_max: int = 1 << 20
    output_bound: int = 64 << 20
    epoch: int = 0  # of the broker, from 1; a worker that has seen a higher one refuses it


class StartAttempt(Message, frozen=True, tag=71):
    """Start an action under a lease; the payload is the client's.

    Attributes:
        lease: number of the lease.
        action: the action.
        cores: the CPUs that are lent.
        gpus: the GPUs that are lent.
        n: 1, as it has a payload.
        restore_ns: expected time to bring the action's service onto `gpus` first; 0 if it is there.
        after: the lease on the same units that must end first; 0 to start at once.
    """

    lease: int
    action: Action
    cores: tuple[int, ...]
    gpus: tuple[int, ...] = ()
    n: int = 1
    restore_ns: int = 0
    after: int = 0


class KillAttempt(Message, frozen=True, tag=72):
    """End what runs under a lease, and report `state`."""

    lease: int
    state: ActionState
    reason: str = ""


class Resize(Message, frozen=True, tag=73):
    """The CPUs of a lease from now on."""

    lease: int
    cores: tuple[int, ...]


class OpenSandbox(Message, frozen=True, tag=74):
    """Build the sandbox of a session."""

    spec: SessionSpec


class Confirmed(Message, frozen=True, tag=79):
    """The worker need not keep the results of these leases any longer: their clients have them, or
    nobody waits for them.
    """

    leases: tuple[int, ...]


class InstallService(Message, frozen=True, tag=76):
    """Actions may call this service on this node from now on."""

    spec: ServiceSpec


class CloseSandbox(Message, frozen=True, tag=75):
    """Remove the sandbox of a session."""

    session: int


class PackSandbox(Message, frozen=True, tag=77):
    """Remove the sandbox of a session and archive its files in the job's store.

    It is answered by SandboxPacked, or by SandboxDown if it cannot be done.
    """

    session: int


class SnapshotOrder(Message, frozen=True, tag=78):
    """Tells a worker what to do with a snapshot.

    Attributes:
        name: the snapshot.
        what: `remove` its files as soon as no session needs them; `publish` an archive of them in
            the store; `fetch` the archive from the store; `missing` if there is no archive, so that
            sessions that wait for the snapshot end.
        files: for `fetch`, the name of the archive.
        image: for `fetch`, the image to which the snapshot belongs.
        digest: for `fetch`, the digest of that image.
        why: for `missing`, the reason in one line.
    """

    name: str
    what: str
    files: str = ""
    image: str = ""
    digest: str = ""
    why: str = ""


AnyMessage = Union[  # noqa: UP007 - a runtime union that msgspec decodes by tag
    Ping,
    Pong,
    PeerRefused,
    ClientHello,
    Submit,
    Cancel,
    RequestSession,
    ReleaseSession,
    Ack,
    Query,
    DeclareService,
    DeclareRollouts,
    ReportToolReturn,
    EndTrajectory,
    Forget,
    Bye,
    Shutdown,
    RenewSession,
    DeclareEndpoint,
    GrantEnded,
    Input,
    Welcome,
    ActionResult,
    Rejected,
    SessionUp,
    SessionDown,
    Output,
    QueryReply,
    Granted,
    InputCredit,
    WorkerHello,
    AttemptsStarted,
    Finished,
    Released,
    Returned,
    Leaving,
    SandboxUp,
    SandboxDown,
    WorkerWelcome,
    StartAttempt,
    KillAttempt,
    Resize,
    OpenSandbox,
    CloseSandbox,
    InstallService,
    Confirmed,
    SandboxPacked,
    PackSandbox,
    AttachSession,
    DetachSession,
    Attached,
    BackgroundWants,
    ManageSnapshot,
    SnapshotReport,
    SnapshotOrder,
    OpenStream,
    StreamData,
    StreamCredit,
    StreamEnded,
]
StreamMessage = OpenStream | StreamData | StreamCredit | StreamEnded
