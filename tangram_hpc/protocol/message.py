"""Pure. Every message that passes between client, broker and worker.

Law: one `Struct` a message, tagged by a small int, encoded as an array. A message that carries a
payload says so by `n = 1`; the payload itself travels beside the messages of a frame
(`protocol/frame.py`) and is never decoded by the broker. A new field goes to the end with a
default; anything else needs a new `PROTOCOL_VERSION`.
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
INLINE_MAX = 66 * 1024  # 64 KiB of data and its wrapping; more goes by digest through the store


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="t", gc=False):
    """The common head of all messages. Nothing of them points back at them, so that the collector
    need not look (`gc`)."""


# ---- both ways -------------------------------------------------------------------------------


class Ping(Message, frozen=True, tag=1):
    """Are you there? `stamp` comes back in the Pong."""

    stamp: int = 0


class Pong(Message, frozen=True, tag=2):
    """I am."""

    stamp: int = 0


class Refused(Message, frozen=True, tag=3):
    """The peer ends the conversation: a wrong version, job or role. `text` is for a person."""

    text: str


# ---- client -> broker ------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=10):
    """First message of a client. `uid` stays the same when it reconnects; rank and size are its
    place in its MPI world (-1, 0 without one)."""

    version: int
    job: str
    uid: str
    name: str = ""
    rank: int = -1
    size: int = 0
    via: str = "socket"


class Submit(Message, frozen=True, tag=11):
    """An action; the payload is for its worker. Submitting an id again is harmless."""

    action: Action
    n: int = 1


class Cancel(Message, frozen=True, tag=12):
    """The client no longer wants these actions."""

    actions: tuple[int, ...]


class RequestSession(Message, frozen=True, tag=13):
    """Open a session. Requesting an id again is harmless. `again`: it was asked for before the way
    was lost; if it has ended since, SessionDown says so and no other one opens in its place."""

    spec: SessionSpec
    again: bool = False


class ReleaseSession(Message, frozen=True, tag=14):
    """Close a session; what still runs in it is killed."""

    session: int


class Ack(Message, frozen=True, tag=15):
    """The client holds these results: the broker may forget them."""

    actions: tuple[int, ...]


class Ask(Message, frozen=True, tag=16):
    """A question about the broker's state (`info`, `nodes`, `pending`; `explain` with an
    action's id); answered by Answer."""

    request: int
    what: str
    argument: str = ""


class DeclareService(Message, frozen=True, tag=21):
    """Actions shall call this service from now on; answered by Answer or Rejected."""

    request: int
    spec: ServiceSpec


class DeclareRollouts(Message, frozen=True, tag=22):
    """Turns shall be dealt among this pool's services from now on; answered by Answer or
    Rejected. The same again is harmless."""

    request: int
    spec: RolloutsSpec


class ToolReturned(Message, frozen=True, tag=23):
    """A tool that ran elsewhere returned so many characters to one of the client's trajectories;
    `status` as in `scheduler.routing.cmlfq`. Unknown ones are ignored."""

    pool: str
    trajectory: str
    tool: str
    characters: int
    status: int


class EndTrajectory(Message, frozen=True, tag=24):
    """One of the client's trajectories ended with so many generated tokens (-1: it was cut off),
    in this step of the trainer (-1: as the last one). Unknown ones are ignored."""

    pool: str
    trajectory: str
    tokens: int
    epoch: int = -1


class Forget(Message, frozen=True, tag=26):
    """What came of the actions of these names, and of all whose name begins with `prefix`, need not
    be kept any longer (`Action.once`); answered by Answer."""

    request: int
    names: tuple[str, ...]
    prefix: str = ""


class Bye(Message, frozen=True, tag=17):
    """The client ends: no grace is needed."""


class RenewSession(Message, frozen=True, tag=19):
    """The client still wants a session: its idle clock starts again."""

    session: int


class DeclareEndpoint(Message, frozen=True, tag=20):
    """From now on actions may name this endpoint; answered by Answer, or by Rejected under
    `request`. The same again is harmless."""

    request: int
    spec: EndpointSpec


class Done(Message, frozen=True, tag=25):
    """How the call under a grant went. `lease` as Granted said it; 0: the action is not wanted any
    more, granted or not. A state of PREEMPTED sends it back: it waits again at its old turn."""

    action: int
    lease: int
    outcome: Outcome


class Shutdown(Message, frozen=True, tag=18):
    """Asks the broker to end (`tangram shutdown`), and the broker's worker to end."""

    reason: str = ""


# ---- broker -> client ------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag=30):
    """First answer: the client's number, and what it must know of the job."""

    client: int
    job: str
    store: str
    placer: str
    sync: str
    grace_s: float
    fresh: bool = True  # False: known from before, its open actions are still known


class Result(Message, frozen=True, tag=31):
    """An action's outcome, with the worker's payload. Times in ns by the broker's clock; `grants`:
    (since its last grant, units from then on); `route`: of a turn, where it went."""

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

    def under(self, action: int) -> Result:
        """The same, told of another action that was to do the same work."""
        return msgspec.structs.replace(self, action=action)


class Rejected(Message, frozen=True, tag=32):
    """The action or session can never run; `text` names the field and the remedy. `lost`: it
    could have, but its session is gone. With the id 0 a message was refused that has no id; its
    conversation goes on."""

    id: int
    text: str
    lost: bool = False


class SessionUp(Message, frozen=True, tag=33):
    """The session's sandbox stands on `node`; it waited `wait_ns` for admission."""

    session: int
    node: str
    wait_ns: int = 0


class SessionDown(Message, frozen=True, tag=34):
    """The session is gone; `reason` is empty after an orderly end. `never`: it could not have
    opened on any node."""

    session: int
    reason: str
    never: bool = False


class Output(Message, frozen=True, tag=35):
    """A piece of a streamed action's output; stream 1 is stdout, 2 stderr."""

    id: int  # broker -> client: the action; worker -> broker: the lease
    stream: int
    n: int = 1


class Answer(Message, frozen=True, tag=36):
    """Answers Ask: the payload is JSON."""

    request: int
    n: int = 1


class Granted(Message, frozen=True, tag=37):
    """The client may make this call now: it holds a slot and has taken a token of its endpoint
    under this lease, until it says Done. `rate_micro`, `burst_micro`: the bucket's, as it is now;
    a client that stood still keeps to them by itself, and gives back what it cannot use."""

    action: int
    lease: int
    rate_micro: int = 0
    burst_micro: int = 0


# ---- worker -> broker ------------------------------------------------------------------------


class WorkerHello(Message, frozen=True, tag=50):
    """First message of a worker: what it lends."""

    version: int
    job: str
    spec: NodeSpec


class Started(Message, frozen=True, tag=51):
    """These leases' processes run (sent on the worker's beat, for those still running)."""

    leases: tuple[int, ...]


class Finished(Message, frozen=True, tag=52):
    """An attempt's outcome is known. `clean`: its units are free too. `n`: a payload for the
    client comes with it."""

    lease: int
    outcome: Outcome
    clean: bool = True
    n: int = 0


class Released(Message, frozen=True, tag=53):
    """What a lease's processes left behind is gone: its units are free."""

    lease: int


class Returned(Message, frozen=True, tag=56):
    """Leases that follow one which takes long; they have not begun and will not."""

    leases: tuple[int, ...]


class Leaving(Message, frozen=True, tag=57):
    """This node will be gone soon, the job goes on: nothing more is to be given to it. When the
    conversation then ends, what ran here is the broker's to start elsewhere."""

    reason: str


class SandboxUp(Message, frozen=True, tag=54):
    """A session's sandbox stands."""

    session: int


class SandboxDown(Message, frozen=True, tag=55):
    """A session's sandbox is gone. `reason` is empty when that was asked for."""

    session: int
    reason: str = ""


class SandboxPacked(Message, frozen=True, tag=58):
    """A session's sandbox is gone as PackSandbox asked; its files are in the store."""

    session: int
    files: str


# ---- broker -> worker ------------------------------------------------------------------------


class WorkerWelcome(Message, frozen=True, tag=70):
    """First answer to a worker."""

    node: int
    store: str
    kill_wait_s: float = 2.0
    output_max: int = 1 << 20


class Start(Message, frozen=True, tag=71):
    """Run an action under a lease on these units, after bringing its service onto the GPUs where
    that costs `restore_ns`, and when the lease `after` is gone from them (0: now); the payload is
    the client's."""

    lease: int
    action: Action
    cores: tuple[int, ...]
    gpus: tuple[int, ...] = ()
    n: int = 1
    restore_ns: int = 0
    after: int = 0


class Kill(Message, frozen=True, tag=72):
    """End what runs under a lease and report `state`."""

    lease: int
    state: ActionState
    reason: str = ""


class Resize(Message, frozen=True, tag=73):
    """The lease's units from now on."""

    lease: int
    cores: tuple[int, ...]


class OpenSandbox(Message, frozen=True, tag=74):
    """Build a session's sandbox."""

    spec: SessionSpec


class PrepareService(Message, frozen=True, tag=76):
    """Actions may call this service here from now on."""

    spec: ServiceSpec


class CloseSandbox(Message, frozen=True, tag=75):
    """Take a session's sandbox down."""

    session: int


class PackSandbox(Message, frozen=True, tag=77):
    """Take a session's sandbox down and put its files into the store; answered by SandboxPacked, or
    by SandboxDown when that cannot be done."""

    session: int


AnyMessage = Union[  # noqa: UP007 - a runtime union that msgspec decodes by tag
    Ping,
    Pong,
    Refused,
    Hello,
    Submit,
    Cancel,
    RequestSession,
    ReleaseSession,
    Ack,
    Ask,
    DeclareService,
    DeclareRollouts,
    ToolReturned,
    EndTrajectory,
    Forget,
    Bye,
    Shutdown,
    RenewSession,
    DeclareEndpoint,
    Done,
    Welcome,
    Result,
    Rejected,
    SessionUp,
    SessionDown,
    Output,
    Answer,
    Granted,
    WorkerHello,
    Started,
    Finished,
    Released,
    Returned,
    Leaving,
    SandboxUp,
    SandboxDown,
    WorkerWelcome,
    Start,
    Kill,
    Resize,
    OpenSandbox,
    CloseSandbox,
    PrepareService,
    SandboxPacked,
    PackSandbox,
]
