"""Ports: what the drivers need of the outside world. Protocols only, no behaviour.

Law: a driver sees these ports and none of their adapters; only `app/` knows which adapter serves
which port. The simulator serves the same ports with models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .domain.event import Event
from .domain.outcome import Outcome
from .domain.service import ServiceSpec
from .domain.session import SessionSpec
from .domain.slurm import JobOrder, JobRef, JobView, SlurmCalls
from .domain.states import ActionState
from .protocol.frame import Buffer, Parcel
from .protocol.message import ActionResult, Message, StartAttempt
from .scheduler.routing.cmlfq import CausalTree

# Seconds. An action that runs longer lets its worker give back the leases that wait behind it. The
# worker keeps to it for leases that it holds itself, an executor for calls that it gave a runner.
GIVE_BACK_S = 0.05


class Clock(Protocol):
    """The time, handed in."""

    def now_ns(self) -> int:
        """Epoch ns that never run backwards within a process."""
        ...


class Link(Protocol):
    """One conversation with one peer.

    Attributes:
        unsent: bytes that were flushed and that the peer's connection has no room for yet.
    """

    @property
    def unsent(self) -> int:
        """See above."""
        ...

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Queues a message; it leaves at the next flush."""
        ...

    def flush(self) -> None:
        """Hands all that was queued to the transport as one frame."""
        ...

    def close(self) -> None:
        """Ends the conversation after what was flushed."""
        ...


class Timer(Protocol):
    """Calls back on the driver's own loop."""

    def after(self, delay_s: float, call: Callable[[], None]) -> object:
        """Calls `call` once after `delay_s` seconds (0: on the next turn of the loop)."""
        ...


class Journal(Protocol):
    """The one truth: an append-only log of events."""

    mode: str

    def append(self, events: Iterable[Event]) -> int:
        """Queues events for the next commit; returns the number of the last one."""
        ...

    def commit(self, then: Callable[[], None]) -> None:
        """Writes what was appended; calls `then` when it is as safe as `mode` promises
        (at once for `none`)."""
        ...

    def superseded(self) -> bool:
        """Whether another broker has taken this one's place; then nothing may be committed, and
        nobody answered. Asked often; cheap."""
        ...

    def close(self) -> None:
        """Commits and closes."""
        ...


class Spool(Protocol):
    """What actions with a name of their own (`Action.once`) are to do, and what came of them, for
    the broker's next start. One of the two a name."""

    def keep_call(self, once: str, payload: Buffer) -> bool:
        """Keeps what an action is to do; False: there is no room for one more."""
        ...

    def keep_result(self, once: str, result: ActionResult, payload: Buffer | None) -> None:
        """Keeps what came of it, in place of what it was to do."""
        ...

    def call(self, once: str) -> bytes | None:
        """What it is to do."""
        ...

    def result(self, once: str) -> tuple[ActionResult, bytes | None] | None:
        """What came of it."""
        ...

    def has_result(self, once: str) -> bool:
        """Whether that is kept."""
        ...

    def names(self) -> list[str]:
        """All names of which something is kept, oldest first."""
        ...

    def drop(self, names: Iterable[str]) -> None:
        """Keeps nothing of these any more; unknown ones are ignored."""
        ...

    def commit(self) -> None:
        """Hands what was kept and dropped to the kernel."""
        ...


class SpillFiles(Protocol):
    """Holds payloads for clients that do not read, on disk instead of in memory. Its content ends
    with the broker."""

    def put(self, client: int, data: Buffer) -> int:
        """Writes a payload; its offset in the client's spill file, or -1: there is no room."""
        ...

    def get(self, client: int, offset: int, size: int) -> bytes:
        """Reads a payload."""
        ...

    def free(self, client: int) -> None:
        """One payload of the client's is not needed any more."""
        ...

    def drop(self, client: int) -> None:
        """Nothing of the client's is needed any more; unknown ones are ignored."""
        ...


class TreeStore(Protocol):
    """What rollout pools have learned, in folders that several jobs may share: each writes its own
    file, and all are read together."""

    def load(self, folder: str) -> tuple[CausalTree | None, CausalTree | None]:
        """What all have learned, and what this job has; None where there is nothing.

        Raises:
            InvalidInput: it cannot be read; one line.
        """
        ...

    def save(self, folder: str, tree: CausalTree) -> None:
        """Replaces what this job has learned; does not wait, and does not raise."""
        ...

    def trouble(self, folder: str) -> str:
        """Why the last save failed; empty where it did not."""
        ...

    def close(self) -> None:
        """Returns when all is written, or has taken too long."""
        ...


class Reports(Protocol):
    """What an executor tells its worker; facts go up."""

    def started(self, lease: int) -> None:
        """The lease's process runs."""
        ...

    def finished(self, lease: int, outcome: Outcome, payload: bytes | None, clean: bool,
                 soon: bool = False) -> None:
        """The attempt's outcome; with `clean` its units are free too. `soon`: `settled` follows in
        this turn of the loop."""
        ...

    def settled(self) -> None:
        """The executor is in the middle of nothing: what waited for units may begin."""
        ...

    def released(self, lease: int) -> None:
        """Nothing of a lease that finished without `clean` is left."""
        ...

    def returned(self, lease: int) -> None:
        """A lease that it took ahead has not begun and will not."""
        ...

    def output(self, lease: int, stream: int, data: bytes) -> None:
        """A piece of a streamed command's output."""
        ...

    def session_up(self, session: int) -> None:
        """The session's sandbox stands."""
        ...

    def session_down(self, session: int, reason: str) -> None:
        """The session's sandbox is gone; `reason` is empty when that was asked for."""
        ...

    def session_packed(self, session: int, files: str) -> None:
        """The session's sandbox is gone, and its files are in the store under this digest."""
        ...


@dataclass(frozen=True)
class SandboxSettings:
    """What a site sets for the sandboxes of a node; see `Config` for the fields of those names.
    What a session leaves open (`backend`, `disk_mib`) is as said here."""

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


class Sandboxes(Protocol):
    """Runs actions that are code; orders come down. Never blocks; answers through `Reports`."""

    def open_session(self, spec: SessionSpec) -> None:
        """Builds a sandbox; `session_up` or `session_down` follows."""
        ...

    def close_session(self, session: int) -> None:
        """Takes a sandbox and all that runs in it down; `session_down` follows."""
        ...

    def pack_session(self, session: int) -> None:
        """Takes a sandbox in which no action runs down and stores its files; `session_packed`
        follows, or `session_down` when that cannot be done."""
        ...

    def start(self, order: StartAttempt, payload: memoryview) -> None:
        """Runs an action; `finished` follows, whatever happens."""
        ...

    def follow(self, order: StartAttempt, payload: memoryview) -> bool:
        """Takes an action whose turn comes when the lease `order.after` is gone; False: not now,
        keep it until then."""
        ...

    def take_back(self, lease: int) -> bool:
        """Forgets a lease that it took ahead, if that has not begun; says whether. Others behind it
        may be given back by that."""
        ...

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        """Ends what runs under a lease; `finished` follows with that state. Unknown: ignored."""
        ...

    def resize(self, lease: int, cores: tuple[int, ...]) -> None:
        """Moves what runs under a lease to these units. Unknown: ignored."""
        ...

    def close(self) -> None:
        """Ends everything and leaves nothing behind; returns when that is so."""
        ...


class Executor(Sandboxes, Protocol):
    """Runs all of a node's actions: what `Sandboxes` does, and calls of services.

    One protocol extends another one here, as one interface extends another. No code is inherited,
    and an adapter needs no base class: `app.NodeExecutor` is composed of a `Sandboxes` and a
    `ServiceExecutor`.
    """

    def prepare_service(self, spec: ServiceSpec) -> None:
        """Actions may call this service from now on."""
        ...


# ---- services --------------------------------------------------------------------------------


class ServiceDied(Exception):
    """A copy of a service has ended by itself; its text is one line that says how. Calls that it
    had are given to another copy."""


class OutOfDeviceMemory(Exception):
    """It does not fit onto its block, or a batch does not; the copy lives and is as it was."""


class ServiceRefused(Exception):
    """It can never be served as it is declared; one line that names the field and the remedy."""


@dataclass(frozen=True)
class ServicePlace:
    """Where one copy runs. `gpus`: all that the node lends, in the order in which its process sees
    them; `device`: what they are, "cuda", or "cpu" where slots of CPU stand in for GPUs; `env`:
    what its process gets (`CUDA_VISIBLE_DEVICES`); `threads`: for a copy on CPU; `scratch`: a
    folder of its own."""

    gpus: tuple[int, ...]
    device: str
    scratch: str
    env: tuple[tuple[str, str], ...] = ()
    threads: int = 1


@dataclass(frozen=True)
class ServiceRequest:
    """One call of a batch; `arguments` as in `protocol.payload.ServiceCall`."""

    method: str
    arguments: bytes


@dataclass(frozen=True)
class ServiceReply:
    """Its answer (`protocol.value`), or why this one call was wrong (one line), others unharmed."""

    value: bytes = b""
    error: str = ""


class ServiceBackend(Protocol):
    """One copy of a service, from `load` to `close`; parked or on one block of GPUs. One task
    awaits it, one thing at a time: load, then any number of wake, call..., park. Each may raise
    ServiceDied."""

    async def load(self) -> int:
        """Makes it ready, parked in host memory; returns how much of that it takes, in MiB.

        Raises:
            ServiceRefused: it can never be.
        """
        ...

    async def wake(self, gpus: tuple[int, ...]) -> None:
        """Brings it onto this block, by the numbers that the node lends. Raises
        OutOfDeviceMemory."""
        ...

    async def call(self, requests: Sequence[ServiceRequest]) -> list[ServiceReply]:
        """Carries calls out as one batch; replies in their order. Raises OutOfDeviceMemory."""
        ...

    async def park(self) -> None:
        """Leaves the block; the GPUs' memory is free when this returns."""
        ...

    def kill(self) -> None:
        """Ends it at once, whatever it does; what is awaited raises ServiceDied. From the loop's
        thread; twice is harmless."""
        ...

    async def close(self) -> None:
        """Ends it in order and leaves nothing behind."""
        ...


MakeServiceBackend = Callable[[ServiceSpec, ServicePlace], ServiceBackend]


# ---- Slurm -----------------------------------------------------------------------------------


class SlurmRejected(Exception):
    """Slurm refuses this as it is asked (partition, QOS, a limit, a job that is somebody else's);
    its text is one line. Asking again is of no use before something is changed."""


class SlurmTransient(Exception):
    """It was not carried out, or nobody knows whether: the controller is away or late, or the
    budget is used up; its text is one line.

    Args:
        again_ns: epoch; asking before is of no use.
        unsure: it may have been carried out all the same. After a `submit`: look for the job's
            name by `query` before asking again.
    """

    def __init__(self, text: str, again_ns: int = 0, unsure: bool = False) -> None:
        super().__init__(text)
        self.again_ns, self.unsure = again_ns, unsure


SlurmFailure = SlurmRejected | SlurmTransient


class Slurm(Protocol):
    """What a broker asks of Slurm. No call blocks or raises; each is answered once by `then`, on
    the driver's own loop and never before the call has returned. A failure is handed to `then`.

    One budget lies over all of it: one call at a time; queries at least 30 s apart, those asked
    for meanwhile become one; other calls are few (a short burst, then one in 30 s) and get
    SlurmTransient beyond; after a failure nobody calls for a while, which doubles each time.
    """

    def submit(self, order: JobOrder, then: Callable[[int | SlurmFailure], None]) -> None:
        """Submits a batch job; `then` gets its id (of a het job, the leader's)."""
        ...

    def query(self, jobs: Sequence[int],
              then: Callable[[tuple[JobView, ...] | SlurmFailure], None],
              names: Sequence[str] = ()) -> None:
        """What Slurm says of own jobs with these ids or names; `then` gets a row for each job, of a
        het job one for each component, by id and component. A job without a row has ended so long
        ago (MinJobAge) that the controller has forgotten it, or never was. Waits for its turn."""
        ...

    def cancel(self, jobs: Sequence[JobRef],
               then: Callable[[SlurmFailure | None], None]) -> None:
        """Ends jobs or single components of het jobs; `then` gets None when Slurm has been told.
        What is over, or not known, counts as ended. Component 0 is the leader: Slurm ends the
        whole job with it."""
        ...

    def comment(self, job: int, text: str, then: Callable[[SlurmFailure | None], None]) -> None:
        """Puts a line (at most `COMMENT_MAX` characters) behind `tangram:` into the Comment of an
        own job, running or (where there is accounting) over. What others wrote there stays in
        front; an earlier line of ours goes. Of a het job: the leader's."""
        ...

    def calls(self) -> SlurmCalls:
        """What was asked so far."""
        ...

    def close(self) -> None:
        """Ends what is under way; what was not answered gets SlurmTransient."""
        ...


class Store(Protocol):
    """Payloads too large for a frame, under their sha256 and their owner."""

    def put(self, data: Buffer, owner: str = "") -> str:
        """Stores the bytes for an owner; returns their name, which begins with their digest."""
        ...

    def get(self, name: str) -> bytes:
        """The bytes under a name.

        Raises:
            InvalidInput: they are not there or do not match their digest.
        """
        ...

    def drop(self, name: str) -> None:
        """Removes what lies under a name; never fails."""
        ...


class ChannelLost(Exception):
    """The way to the broker is gone; another may be open. Never reaches a user."""


class Channel(Protocol):
    """A client's way to the broker. Every call but `wake` comes from one thread, the client's own;
    MPI allows nothing else."""

    via: str

    def send(self, frame: list[Buffer]) -> None:
        """Queues one frame; it leaves during this call or the next `wait`.

        Raises:
            ChannelLost: the way is gone.
        """
        ...

    def wait(self, timeout_s: float, busy: bool) -> Iterable[Parcel]:
        """What came in; returns when something did, when woken, or after `timeout_s`. `busy`
        says that answers are awaited, which a polling transport may spend CPU on.

        Raises:
            ChannelLost: the way is gone.
        """
        ...

    def wake(self) -> None:
        """Ends a `wait`; from any thread."""
        ...

    def close(self) -> None:
        """Ends the conversation."""
        ...

    def abandon(self) -> None:
        """In the child of a fork: lets go of this process's copies of what the parent speaks by,
        and sends nothing. No other call follows."""
        ...


Dial = Callable[[], Channel]
