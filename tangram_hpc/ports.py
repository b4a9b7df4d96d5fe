"""The interfaces that the drivers need from outside, as protocols without behaviour.

Broker, worker, client and gateway know these protocols and not their adapters. Only `app/` knows
which adapter implements which port; the simulator implements the same ports with models. A port
must not name an adapter, a file format or a transport.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .domain.event import Event
from .domain.outcome import Outcome
from .domain.service import ServiceSpec
from .domain.session import SessionSpec
from .domain.slurm import JobOrder, JobRef, JobView, SlurmCalls
from .domain.states import ActionState
from .protocol.direct_frames import ByteStream
from .protocol.frame import Buffer, Envelope
from .protocol.message import (
    ActionResult,
    Message,
    SnapshotOrder,
    SnapshotReport,
    StartAttempt,
    StreamMessage,
)
from .scheduler.routing.cmlfq import CausalTree

# Seconds. When an action has run for longer, its worker gives back the leases that wait behind it.
# The worker applies the limit to leases that it holds itself, an executor to calls that it handed
# to a runner.
GIVE_BACK_S = 0.05


class Clock(Protocol):
    """The source of time; drivers read no clock of their own."""

    def now_ns(self) -> int:
        """Returns the time in nanoseconds since the epoch; it never runs backwards within a
        process.
        """
        ...


class Link(Protocol):
    """A driver's view of one connection with one peer.

    Attributes:
        unsent: flushed bytes for which the peer's connection has no room yet.
    """

    @property
    def unsent(self) -> int:
        """Returns how many flushed bytes still wait for room in the peer's connection."""
        ...

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Queues a message; it leaves at the next flush."""
        ...

    def flush(self) -> None:
        """Hands all queued messages to the transport as one frame."""
        ...

    def discard(self) -> None:
        """Drops all queued messages."""
        ...

    def close(self) -> None:
        """Ends the connection after the flushed messages have left; queued messages are dropped."""
        ...


class Timer(Protocol):
    """Calls functions later, on the driver's own loop."""

    def after(self, delay_s: float, call: Callable[[], None]) -> object:
        """Calls `call` once after `delay_s` seconds; with 0, on the next turn of the loop."""
        ...


class Journal(Protocol):
    """The append-only log of events, from which a broker's whole state can be rebuilt.

    Attributes:
        mode: how safe a commit is; the value of the setting `sync`.
    """

    mode: str

    def append(self, events: Sequence[Event]) -> int:
        """Queues events for the next commit; returns the number of the last one."""
        ...

    def commit(self, then: Callable[[], None]) -> None:
        """Writes the queued events. Calls `then` when the events are as safe as `mode` promises,
        which is at once for `none`.
        """
        ...

    def superseded(self) -> bool:
        """Returns whether another broker has taken this one's place. If so, nothing may be
        committed and no peer may be answered. The call is cheap, because it is made often.
        """
        ...

    def close(self) -> None:
        """Commits the queued events and closes the file."""
        ...


class Spool(Protocol):
    """Keeps the calls and results of actions with an idempotency key (`Action.once`), so that the
    broker's next start finds them. A key has either a call or a result.
    """

    def keep_call(self, once: str, payload: Buffer, action: int) -> bool:
        """Keeps the call of an action; returns False if there is no room for it."""
        ...

    def keep_result(self, once: str, result: ActionResult, payload: Buffer | None,
                    work: str) -> None:
        """Keeps the result of an action in place of its call, and which work the action was."""
        ...

    def call(self, once: str, action: int) -> bytes | None:
        """Returns the kept call of a key, or None. That of another action than this does not count:
        the call of this one, which replaced it, was lost with the broker's machine."""
        ...

    def result(self, once: str) -> tuple[ActionResult, bytes | None, str] | None:
        """Returns the kept result of a key, its payload and which work its action was, or None."""
        ...

    def has_result(self, once: str) -> bool:
        """Returns whether a result is kept for a key."""
        ...

    def names(self) -> list[str]:
        """Returns all keys for which a call or a result is kept, oldest first."""
        ...

    def drop(self, names: Iterable[str]) -> None:
        """Removes the calls and results of these keys; unknown keys are ignored."""
        ...

    def commit(self) -> None:
        """Hands all changes since the last commit to the kernel."""
        ...


class SpillFiles(Protocol):
    """Holds payloads for clients that do not read, on disk instead of in memory. The files end with
    the broker. A worker holds unconfirmed results in the same way, with the numbers of its files in
    place of clients' numbers.
    """

    def put(self, client: int, data: Buffer) -> int:
        """Writes a payload; returns its offset in the client's spill file, or -1 if there is no
        room.
        """
        ...

    def get(self, client: int, offset: int, size: int) -> bytes:
        """Returns the payload of `size` bytes at this offset of the client's spill file."""
        ...

    def free(self, client: int) -> None:
        """Says that one payload of the client is no longer needed."""
        ...

    def drop(self, client: int) -> None:
        """Removes all payloads of the client; an unknown client is ignored."""
        ...


class TreeStore(Protocol):
    """Keeps what rollout pools have learned, in folders that several jobs may share. Each job
    writes a file of its own; all files are read together.
    """

    def load(self, folder: str) -> tuple[CausalTree | None, CausalTree | None]:
        """Returns the tree that all jobs have learned, and this job's own; None for a tree that is
        not there.

        Raises:
            InvalidInput: a file cannot be read; the message is one line.
        """
        ...

    def save(self, folder: str, tree: CausalTree) -> None:
        """Replaces this job's own tree. The call neither waits nor raises."""
        ...

    def trouble(self, folder: str) -> str:
        """Returns why the last save failed; empty if it did not."""
        ...

    def close(self) -> None:
        """Returns when all saves are written, or have taken too long."""
        ...


class Reports(Protocol):
    """The reports of an executor to its worker."""

    def started(self, lease: int) -> None:
        """The process of the lease runs."""
        ...

    def finished(self, lease: int, outcome: Outcome, payload: bytes | None, clean: bool,
                 settles: bool = False) -> None:
        """The attempt under the lease has ended.

        Args:
            lease: the lease's number.
            outcome: how the attempt ended.
            payload: the result; None if there is none.
            clean: whether the units are free too; if not, `released` follows.
            settles: whether `settled` follows in this turn of the loop.
        """
        ...

    def settled(self) -> None:
        """The executor is between two steps, so orders that wait for units may begin."""
        ...

    def released(self, lease: int) -> None:
        """All processes of a lease that finished without `clean` are gone, so its units are free.
        """
        ...

    def returned(self, lease: int) -> None:
        """A prefetched lease that the executor had accepted has not begun and will not begin."""
        ...

    def output(self, lease: int, stream: int, data: bytes) -> None:
        """A streamed command has written a piece of output to `stream` (1 or 2)."""
        ...

    def input_credit(self, lease: int, count: int) -> None:
        """So many more bytes of input may be sent to the command of a lease."""
        ...

    def stream(self, message: StreamMessage, data: bytes | None = None) -> None:
        """Reports that a port stream has brought bytes or credit, or has ended; `data` are the
        bytes."""
        ...

    def session_up(self, session: int, image: str = "") -> None:
        """The sandbox of the session is ready; `image` is the digest of its image, if it has one.
        """
        ...

    def session_down(self, session: int, reason: str, infeasible: bool = False) -> None:
        """The sandbox of the session is gone. `reason` is empty if the worker had asked the
        executor to close it. `infeasible` says that it could not have been built on any node.
        """
        ...

    def session_packed(self, session: int, files: str) -> None:
        """The sandbox of the session is gone, and its files are in the store under the name
        `files`.
        """
        ...

    def background_wants(self, session: int) -> None:
        """Background processes of the session could run and hold no CPUs. It is repeated."""
        ...

    def snapshot(self, report: SnapshotReport) -> None:
        """Reports a change of a snapshot on this node."""
        ...


@dataclass(frozen=True)
class SandboxSettings:
    """A site's settings for the sandboxes of a node. `Config` describes the fields of the same
    names; `keep_outputs` is true if `logs_mib` is not 0. They apply to every session that does not
    set `backend` or `disk_mib` itself.
    """

    disk_mib: int = 10240
    session_pids: int = 1024
    starts_max: int = 0
    isolation: str = ""
    enforcement: str = ""
    read_paths: tuple[str, ...] = ()
    warm: int = -1
    kill_wait_s: float = 2.0
    output_max: int = 1 << 20
    compiled: bool = True
    output_bound: int = 64 << 20
    snapshots_max: int = 256
    snapshots_mib: int = 32768
    snapshot_idle_s: float = 86400.0
    keep_outputs: bool = False


class OutputLog(Protocol):
    """Keeps the output of this node's commands for `tangram logs`. `add` does not block."""

    def add(self, action: int, lease: int, stream: int, data: bytes) -> None:
        """Takes a part of the output of an attempt: of stream 1 or of the error stream 2. What
        cannot be written as fast as it comes is dropped and counted.
        """
        ...

    def close(self) -> None:
        """Writes what is left. It blocks until that is written, but for at most 10 s: a file
        system that hangs must not hold up the worker's end.
        """
        ...


@dataclass(frozen=True)
class ReadyImage:
    """An image that sandboxes can be built from.

    Attributes:
        folder: its root file system on this node.
        digest: its digest; empty for a folder that the session named itself.
        env: variables that its programs expect, as NAME=VALUE.
        workdir: the directory in which the image's programs start; empty if it names none.
        user: the user that the image names, as `user`, `user:group` or numbers; empty if it names
            none.
    """

    folder: str
    digest: str = ""
    env: tuple[str, ...] = ()
    workdir: str = ""
    user: str = ""


# Called with the image, "" and False; or with None, one line that says why there is none, and
# whether to ask again is of no use.
ImageReady = Callable[[ReadyImage | None, str, bool], None]


class Images(Protocol):
    """Turns the names of images into folders on this node. No call blocks."""

    def open(self, session: int, image: str, then: ImageReady, origin: int = 0) -> None:
        """Makes an image ready for a session, and keeps it until `release`. `then` is called once,
        maybe before this returns; never after a `release`. If `origin` is another session that uses
        an image, it is that one, whatever its name stands for now.
        """
        ...

    def release(self, session: int) -> None:
        """The session needs its image no more, ready or not. An unknown session is ignored."""
        ...

    def close(self) -> None:
        """Gives up everything that is under way, and calls nobody. Blocks until that is done."""
        ...


class Sandboxes(Protocol):
    """Runs actions that are code. No call blocks; the answers come through `Reports`."""

    def open_session(self, spec: SessionSpec) -> None:
        """Builds a sandbox; `session_up` or `session_down` follows."""
        ...

    def close_session(self, session: int) -> None:
        """Ends a sandbox and all that runs in it; `session_down` follows."""
        ...

    def pack_session(self, session: int) -> None:
        """Stores the files of a sandbox in which no action runs, and ends it. `session_packed`
        follows, or `session_down` if the files cannot be stored.
        """
        ...

    def order_snapshot(self, order: SnapshotOrder) -> None:
        """Removes, publishes or fetches a snapshot; the result, if any, comes by
        `Reports.snapshot`.
        """
        ...

    def snapshot_reports(self) -> Iterable[SnapshotReport]:
        """Returns what a broker that came back must hear of this node's snapshots: a report `held`
        for each that clients know, and `wanted` for each for which a session waits.
        """
        ...

    def start(self, order: StartAttempt, payload: memoryview) -> None:
        """Runs an action; `finished` follows in every case."""
        ...

    def follow(self, order: StartAttempt, payload: memoryview) -> bool:
        """Accepts an action that is to begin when the lease `order.after` is gone. Returns False if
        the action cannot be accepted now; the caller then keeps the order until that lease is gone.
        """
        ...

    def take_back(self, lease: int) -> bool:
        """Gives up a lease that `follow` accepted, unless it has begun; returns whether it was
        given up. Leases that wait behind it may be returned (`Reports.returned`) too.
        """
        ...

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        """Ends the processes or the call of a lease; `finished` follows with that state. An unknown
        lease is ignored.
        """
        ...

    def give_input(self, lease: int, kind: int, data: bytes, number: int, other: int) -> None:
        """Gives what runs under a lease a signal, or input or a size for its terminal
        (`protocol/input_flow.py`). An unknown lease is ignored.
        """
        ...

    def carry(self, message: StreamMessage, data: bytes) -> None:
        """Opens a port stream, gives it bytes or credit, or ends it (`protocol/port_flow.py`).
        `Reports.stream` answers. An unknown stream is ignored.
        """
        ...

    def resize(self, lease: int, cores: tuple[int, ...]) -> None:
        """Moves the processes of a lease to these cores. An unknown lease is ignored."""
        ...

    def close(self) -> None:
        """Ends everything; returns when nothing is left behind."""
        ...


class Executor(Sandboxes, Protocol):
    """Runs all of a node's actions: actions that are code, as `Sandboxes` does, and calls of
    services.

    One protocol extends another one here, as one interface extends another. No code is inherited,
    and an adapter needs no base class: `app.NodeExecutor` is composed of a `Sandboxes` and a
    `ServiceExecutor`.
    """

    def prepare_service(self, spec: ServiceSpec) -> None:
        """Lets actions call this service from now on."""
        ...


# ---- services --------------------------------------------------------------------------------


class ServiceDied(Exception):
    """Raised when a copy of a service has ended by itself; the text is one line that says how. The
    broker gives its calls to another copy.
    """


class OutOfDeviceMemory(Exception):
    """Raised when a service does not fit onto its block, or a batch does not. The copy lives on
    unchanged.
    """


class ServiceRefused(Exception):
    """Raised when a service cannot run as it is declared until somebody does something about it;
    the text is one line that names the field and the remedy.
    """


@dataclass(frozen=True)
class ServicePlace:
    """Where one copy of a service runs.

    Attributes:
        gpus: all GPUs that the node lends, in the order in which the copy's process sees them.
        device: "cuda", or "cpu" where slots of CPU stand in for GPUs.
        scratch: a folder of the copy's own.
        env: environment variables for the copy's process (`CUDA_VISIBLE_DEVICES`).
        threads: how many threads a copy on CPU may use.
    """

    gpus: tuple[int, ...]
    device: str
    scratch: str
    env: tuple[tuple[str, str], ...] = ()
    threads: int = 1


@dataclass(frozen=True)
class ServiceRequest:
    """One call of a batch; `arguments` are encoded as in `protocol.payload.ServiceCall`."""

    method: str
    arguments: bytes


@dataclass(frozen=True)
class ServiceReply:
    """The answer to one call (`protocol.value`), or one line that says why this call was wrong; the
    other calls of the batch are unaffected.
    """

    value: bytes = b""
    error: str = ""


class ServiceBackend(Protocol):
    """One copy of a service, from `load` to `close`; it is parked or on one block of GPUs.

    One task awaits its methods, one at a time: load, then any number of wake, call..., park. A copy
    that shares its GPU may stand by (`stand_by`) while it is awake; after that it is called again
    or parked. Each of them may raise ServiceDied.

    Attributes:
        shares_gpu: whether its weights may stay on a GPU while other copies are called there, and
            theirs while it is called. They take as much memory there as `load` returns.
        loads_here: whether `load` is work of this node, not just a wait for somebody's server.
    """

    shares_gpu: bool
    loads_here: bool

    async def load(self) -> int:
        """Makes the copy ready, parked in host memory; returns how many MiB of host memory it
        takes.

        Raises:
            ServiceRefused: the copy can never be made ready.
        """
        ...

    async def wake(self, gpus: tuple[int, ...]) -> None:
        """Brings the copy onto this block of GPUs, numbered as the node lends them.

        Raises:
            OutOfDeviceMemory: the copy does not fit.
        """
        ...

    async def call(self, requests: Sequence[ServiceRequest]) -> list[ServiceReply]:
        """Carries calls out as one batch; returns the replies in their order.

        Raises:
            OutOfDeviceMemory: the batch does not fit.
        """
        ...

    async def stand_by(self) -> None:
        """Frees what the copy takes of its GPU besides its weights. Only a copy that shares its GPU
        is asked to.
        """
        ...

    async def park(self) -> None:
        """Leaves the block; the memory of its GPUs is free when this returns."""
        ...

    def kill(self) -> None:
        """Ends the copy at once, in any state; a method that is being awaited raises ServiceDied.
        It is called from the loop's thread; a second call is harmless.
        """
        ...

    async def close(self) -> None:
        """Ends the copy in order and leaves nothing behind."""
        ...


MakeServiceBackend = Callable[[ServiceSpec, ServicePlace], ServiceBackend]


# ---- Slurm -----------------------------------------------------------------------------------


class SlurmRejected(Exception):
    """Raised when Slurm refuses a request (partition, QOS, a limit, somebody else's job); the text
    is one line. The same request would be refused again until something is changed.
    """


class SlurmTransient(Exception):
    """Raised when a request was not carried out, or when that is not known: the controller is away
    or late, or the budget is used up. The text is one line.

    Args:
        text: the line.
        again_ns: epoch time before which the same request would fail again.
        unsure: the request may have been carried out all the same. After a `submit`, look for the
            job's name by `query` before asking again.
    """

    def __init__(self, text: str, again_ns: int = 0, unsure: bool = False) -> None:
        super().__init__(text)
        self.again_ns, self.unsure = again_ns, unsure


SlurmFailure = SlurmRejected | SlurmTransient


class Slurm(Protocol):
    """A broker's requests to Slurm. No call blocks or raises. The result or the failure of a call
    is passed to `then`, once, on the driver's own loop and never before the call has returned.

    One budget covers all calls, which are made one at a time. Queries are at least 30 s apart;
    queries that are requested in between are made as one. Submissions are limited to a short burst
    and then one in 30 s, and each other call counts as one; further submissions get SlurmTransient.
    After a failure no call is made for a while, which doubles with each further failure.
    """

    def submit(self, order: JobOrder, then: Callable[[int | SlurmFailure], None]) -> None:
        """Submits a batch job; `then` gets its id (of a het job, the leader's id)."""
        ...

    def query(self, jobs: Sequence[int],
              then: Callable[[tuple[JobView, ...] | SlurmFailure], None],
              names: Sequence[str] = ()) -> None:
        """Asks for the state of own jobs with these ids or names.

        `then` gets a row for each job, and for a het job a row for each component, in order of id
        and component. A job without a row ended so long ago (MinJobAge) that the controller has
        forgotten it, or never existed. The query waits for its turn in the budget.
        """
        ...

    def cancel(self, jobs: Sequence[JobRef],
               then: Callable[[SlurmFailure | None], None]) -> None:
        """Ends jobs, or single components of het jobs; `then` gets None when Slurm has been told.

        A job that is over or unknown counts as ended. Component 0 is the leader: Slurm ends the
        whole job with it.
        """
        ...

    def comment(self, job: int, text: str, then: Callable[[SlurmFailure | None], None]) -> None:
        """Writes a line (at most `COMMENT_MAX` characters) behind `tangram:` into the Comment of an
        own job, which may be running or (where there is accounting) over.

        Text of others stays in front of the line, and an earlier line of ours is replaced. For a
        het job, the leader's Comment is written.
        """
        ...

    def calls(self) -> SlurmCalls:
        """Returns how many calls were made so far."""
        ...

    def close(self) -> None:
        """Ends the calls under way; those without an answer get SlurmTransient."""
        ...


class Store(Protocol):
    """Holds what clients and workers share beside their messages: payloads that are too large for a
    frame, under their sha256 and their owner, and the job's secrets, under their names.
    """

    def put(self, data: Buffer, owner: str = "") -> str:
        """Stores the bytes for an owner; returns their name, which begins with their digest.

        Raises:
            StoreFailed: they cannot be written.
        """
        ...

    def get(self, name: str) -> bytes:
        """Returns the payload of this name.

        Raises:
            InvalidInput: the payload is missing or does not match its digest.
            StoreFailed: it cannot be read.
        """
        ...

    def drop(self, name: str) -> None:
        """Removes the payload of this name; the call never fails."""
        ...

    def keep_secrets(self, values: Mapping[str, str | None]) -> None:
        """Adds or replaces secrets; a value of None removes one.

        Raises:
            InvalidInput: they cannot be written.
        """
        ...

    def secrets(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the values of these secrets by name.

        Raises:
            InvalidInput: one is not there, or they cannot be read safely.
        """
        ...


class ChannelLost(Exception):
    """Raised when a client's channel to the broker is gone, although another channel may be opened.
    Users never see this error.
    """


class Channel(Protocol):
    """A client's connection to the broker. Every method but `wake` is called from one thread, the
    client's own, because MPI allows nothing else.

    Attributes:
        via: the transport's name.
    """

    via: str

    def send(self, frame: list[Buffer]) -> None:
        """Queues one frame; it leaves during this call or the next `wait`.

        Raises:
            ChannelLost: the connection is gone.
        """
        ...

    def wait(self, timeout_s: float, busy: bool) -> Iterable[Envelope]:
        """Waits until frames arrive, `wake` is called, or `timeout_s` seconds have passed; returns
        the frames.

        Args:
            timeout_s: how long to wait at most.
            busy: whether replies are awaited, so that a polling transport may spend CPU time.

        Raises:
            ChannelLost: the connection is gone.
        """
        ...

    def wake(self) -> None:
        """Ends a `wait`; it may be called from any thread."""
        ...

    def close(self) -> None:
        """Ends the connection to the broker."""
        ...

    def abandon(self) -> None:
        """Closes the copies of the connection that the child of a fork inherited, and sends
        nothing. No other call follows.
        """
        ...


Dial = Callable[[], Channel]


class DirectConnection(ByteStream, Protocol):
    """A client's connection to the process that serves its direct calls. One thread uses it."""

    def readable(self, timeout_s: float) -> bool:
        """Waits until bytes have come or the process is gone; returns False if neither was the case
        within so many seconds.
        """

    def hang_up(self) -> None:
        """Ends the connection; any thread may call it, also while another one waits."""

    def close(self) -> None:
        """Closes it. In the child of a fork it closes the copy only."""


class DirectListener(Protocol):
    """Waits for the process that shall serve a client's direct calls.

    Attributes:
        addresses: where it listens; none if this process cannot listen.
        key: the secret that the process must prove.
        accepted: ends with the connection of the first process that has proven the key; with None
            if the listener was closed before; with an OSError if it could not listen.
    """

    addresses: tuple[str, ...]
    key: bytes
    accepted: concurrent.futures.Future[DirectConnection | None]

    def close(self) -> None:
        """Stops listening; see `accepted`. Any thread may call it, and more than once."""

    def abandon(self) -> None:
        """Closes the copies of what it listens on, in the child of a fork."""


@dataclass(frozen=True)
class DirectTransport:
    """How a client's direct calls get to a node and back.

    Attributes:
        listen: begins to listen.
        server: returns the function that the action runs. It takes the listener's addresses and
            key, the job's name, the seconds that it waits for a call, and the seconds after which
            a call is the last one; and returns a `DirectReturn`.
    """

    listen: Callable[[], DirectListener]
    server: Callable[[], Callable[..., object]]
