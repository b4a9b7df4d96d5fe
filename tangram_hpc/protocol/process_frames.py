"""The messages between a worker, its fork server and its execution processes, and their framing.
Pure.

These messages stay on one machine and are never stored. Worker and execution process exchange a
stream of frames over a socket pair; each frame is a little-endian u32 length and one msgpack
message. Worker and fork server exchange one msgpack message per packet of a `SOCK_SEQPACKET` pair.

A runner runs its user's code. So the worker believes only those of its messages that concern leases
which it gave to that runner.

A runner receives calls before it can begin them. With its Setup it gets a counter (an eventfd) and
a pipe. The worker adds one token to the counter for each call. Before each call the runner takes
one token, reads what the worker has sent meanwhile, and only then begins. A worker that takes
tokens back, and sends Drop before it adds new ones, therefore knows which calls never begin. The
runner writes to the pipe when results are ready, so that its worker is woken once for many results.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, Union

import msgspec

from ..domain.outcome import Outcome
from ..domain.session import Network
from ..domain.states import ActionState
from ..errors import ProtocolError
from .reading import reader

FRAME_MAX = 512 * 1024 * 1024  # bytes
# bytes of a call, a function or a result; the rest of a frame is for what surrounds it
PAYLOAD_MAX = FRAME_MAX - (1 << 20)
FILE_MAX = 256 * 1024 * 1024  # bytes; the largest file that one FileCall reads
PACKET_MAX = 64 * 1024  # bytes of one packet to or from the fork server
TAIL = 4096  # bytes of a function's own output that are kept for its error
RECEIVE = 1 << 16  # bytes a read; equals `protocol.frame.RECEIVE`, but imports no messages
OUTPUT = ".tangram-output"  # where a runner's stdout and stderr go, in its scratch directory

INIT = "init"
RUNNER = "runner"
NEVER_BUILT = 78  # exit status of an init whose sandbox no other init can build either


class ProcessFrame(msgspec.Struct, frozen=True, array_like=True, tag_field="k"):
    """The root of all messages of this module."""


# ---- worker -> execution process ----


class SandboxSpec(msgspec.Struct, frozen=True, array_like=True):
    """How a sandbox is built. Sandboxes of equal boxes are interchangeable until they are used.

    Attributes:
        backend: the isolation backend; empty for a runner, which has none.
        trusted: whether its code may see the files of its user.
        network: what its code may reach; see `domain.session.Network`.
        image: the container image or root directory; empty for the node's own programs.
        writable: whether it may write the image's root, of which it then has its own changes.
        env: variables that the image's programs expect, as NAME=VALUE.
        workdir: the directory of the image in which commands begin, and to which paths are
            relative; empty for the session's directory.
        user: the user of the image as which a command runs that names no user; empty for user 0.
    """

    backend: str = ""
    trusted: bool = True
    network: Network = True
    image: str = ""
    writable: bool = False
    env: tuple[str, ...] = ()
    workdir: str = ""
    user: str = ""


class SandboxLimits(msgspec.Struct, frozen=True, array_like=True):
    """What one sandbox may use besides cores; 0 means no limit.

    Attributes:
        mem_mib: memory, in MiB.
        disk_mib: space on disk, in MiB.
        pids: processes at once.
    """

    mem_mib: int = 0
    disk_mib: int = 0
    pids: int = 0


class Setup(ProcessFrame, frozen=True, tag=1):
    """The first message to an execution process.

    Attributes:
        kill_wait_ns: time between SIGTERM and SIGKILL, in ns.
        output_max: bytes of one output stream that are kept.
        box: how its sandbox is built.
        read: paths of the node that its sandbox may see.
        etc: a directory to mount in place of the paths of `read` that are in /etc.
        watch: the process itself must limit memory and the number of processes, as no cgroup does.
        origin: a directory whose files it begins with a copy of; empty for none.
        enforcement: how its CPUs are enforced, for records.
        joins: the files by which it enters its cgroups.
        compiled: whether the fast path (`_fast_path.c`) may serve plain commands.
        cpu_file: the file in which the kernel counts the CPU time of its cgroup; empty for none.
        output_bound: bytes of one output stream that a call may ask to keep.
        root: how this node lets a sandbox write its image, one of `image_root.WAYS`; empty where
            the sandbox must not.
        users: which users of the node are the users of a sandbox that writes its image, as the two
            fields of `user_namespace.UserMap`; empty for user 0 alone.
        keep_outputs: whether the output of every command is sent while it runs, for the node's log.
        old_bwrap: whether the node's bwrap is older than 0.8; see `ContainerSpec`.
        resets_sigchld: whether the node's bwrap resets SIGCHLD; see `ContainerSpec`.
    """

    kill_wait_ns: int
    output_max: int
    box: SandboxSpec = SandboxSpec()
    read: tuple[str, ...] = ()
    etc: str = ""
    watch: bool = True
    origin: str = ""
    enforcement: str = ""
    joins: tuple[str, ...] = ()
    compiled: bool = True
    cpu_file: str = ""
    output_bound: int = 64 << 20
    root: str = ""
    users: tuple[str, ...] = ()
    keep_outputs: bool = False
    old_bwrap: bool = False
    resets_sigchld: bool = False


class RunAction(ProcessFrame, frozen=True, tag=2):
    """Runs the payload that a client sent.

    Attributes:
        lease: the lease that the action holds.
        payload: an encoded call.
        gpus: the value of CUDA_VISIBLE_DEVICES.
        units: CPUs that it holds now.
        most: CPUs that it may hold while it runs.
        timeout_ns: time limit in ns; 0 for none.
        keep: whether the files stay for the next action of its session.
        background: what its background processes may do until then.
        limits: of memory, disk and processes.
    """

    lease: int
    payload: bytes
    gpus: str
    units: int
    most: int
    timeout_ns: int
    keep: bool
    background: str
    limits: SandboxLimits


class KillCommand(ProcessFrame, frozen=True, tag=3):
    """Ends what runs under a lease, which is then reported with `state` and `reason`."""

    lease: int
    state: ActionState
    reason: str


class Units(ProcessFrame, frozen=True, tag=4):
    """Tells a running action how many CPUs it holds now."""

    lease: int
    units: int


class LoadFunction(ProcessFrame, frozen=True, tag=5):
    """Gives a runner a function to keep under its digest. `drop` is the digest of one to forget, or
    empty.
    """

    digest: str
    blob: bytes
    drop: str


class Drop(ProcessFrame, frozen=True, tag=7):
    """Tells a runner to forget these calls, whose tokens were taken back."""

    leases: tuple[int, ...]


class ExitProcess(ProcessFrame, frozen=True, tag=6):
    """Tells an execution process to end all its descendants, remove its directory and exit."""


# ---- execution process -> worker ----


class FreezeBackground(ProcessFrame, frozen=True, tag=8):
    """Tells an init that the node is short of memory: it stops its background processes, whatever
    their session was promised.
    """


class GiveInput(ProcessFrame, frozen=True, tag=11):
    """Gives input to the command that runs under a lease; see `protocol/input_flow.py`.

    Attributes:
        lease: the lease.
        kind: what it is, a number of `input_flow`.
        data: bytes for the command's terminal.
        number: a signal, or rows; `other`: columns.
    """

    lease: int
    kind: int
    data: bytes = b""
    number: int = 0
    other: int = 0


class SessionSecrets(ProcessFrame, frozen=True, tag=9):
    """Gives an init the variables of its session whose values are secret. It is sent once, before
    the session's first action, and is written nowhere.
    """

    values: dict[str, str]

    def __repr__(self) -> str:
        return f"SessionSecrets({', '.join(self.values)})"


class LeaseBackground(ProcessFrame, frozen=True, tag=10):
    """Tells an init that its background processes hold CPUs from now on.

    Attributes:
        lease: the lease under which they run, until its Ended.
        units: CPUs that they hold now.
        limits: of memory, disk and processes.
    """

    lease: int
    units: int
    limits: SandboxLimits


class HoldStill(ProcessFrame, frozen=True, tag=80):
    """Tells an init to stop all background processes, even those that hold CPUs, while the files of
    its sandbox are frozen; the init answers with HeldStill. With `hold` false the processes go on,
    and the init does not answer.
    """

    hold: bool = True


class HeldStill(ProcessFrame, frozen=True, tag=81):
    """Tells the worker that no process of the sandbox runs. If one may still run, `why` says the
    reason in one line; otherwise it is empty.
    """

    why: str = ""


class ConnectPort(ProcessFrame, frozen=True, tag=85):
    """Tells an init to connect a port stream to a port of its sandbox (`protocol/port_flow.py`). It
    answers with PortCredit or PortEnded.
    """

    stream: int
    port: int


class PortBytes(ProcessFrame, frozen=True, tag=86):
    """Bytes of a port stream, to or from an init; with `last` the sender sends no more of them."""

    stream: int
    data: bytes
    last: bool = False


class PortCredit(ProcessFrame, frozen=True, tag=87):
    """Allows `count` more bytes of a port stream to be sent to the side that sends this message."""

    stream: int
    count: int


class PortEnded(ProcessFrame, frozen=True, tag=88):
    """Tells the other side that a port stream has ended; see `message.StreamEnded`."""

    stream: int
    reason: str = ""
    code: str = ""


class BackgroundRunnable(ProcessFrame, frozen=True, tag=25):
    """Tells the worker that background processes could run and hold no CPUs."""


class Ready(ProcessFrame, frozen=True, tag=23):
    """The execution process accepts orders. `isolation` names what really isolates its sandbox."""

    isolation: str


class Broken(ProcessFrame, frozen=True, tag=24):
    """The sandbox could not be built, or has broken down. The execution process ends."""

    text: str


class Ended(ProcessFrame, frozen=True, tag=20):
    """The result of an action.

    Attributes:
        lease: the lease that it held.
        outcome: how it ended and what it used.
        payload: the encoded return value for its client.
        none_left: whether none of its processes is left; otherwise Gone follows.
        process_cpu_ns: of a runner, the CPU time in ns that it has used since it was forked.
    """

    lease: int
    outcome: Outcome
    payload: bytes | None
    none_left: bool
    process_cpu_ns: int = 0


class Gone(ProcessFrame, frozen=True, tag=21):
    """No process is left of an action whose Ended had `none_left` false."""

    lease: int


class OutputChunk(ProcessFrame, frozen=True, tag=22):
    """A part of the output of a command that is streamed, or that is kept on the node.

    Attributes:
        lease: the lease of the command.
        stream: 1, or 2 for the error stream.
        data: the bytes.
        kept_only: whether it is for the node's log alone, as nobody streams the command.
    """

    lease: int
    stream: int
    data: bytes
    kept_only: bool = False


class CreditInput(ProcessFrame, frozen=True, tag=26):
    """Allows `count` more bytes of input for the command that runs under a lease."""

    lease: int
    count: int


# ---- worker -> fork server ----


class Fork(ProcessFrame, frozen=True, tag=40):
    """Forks an execution process.

    Attributes:
        number: the number by which worker and fork server know it.
        kind: INIT or RUNNER.
        home: the name of its directory.
        fresh: whether that directory is to be made; otherwise a dead process has left it.
    """

    number: int
    kind: str
    home: str
    fresh: bool


class KillProcess(ProcessFrame, frozen=True, tag=41):
    """Sends SIGKILL to an execution process. Died follows."""

    number: int


class RemoveDirectory(ProcessFrame, frozen=True, tag=42):
    """Removes the directory of a dead execution process."""

    home: str


# ---- fork server -> worker ----


class Forked(ProcessFrame, frozen=True, tag=50):
    """The execution process lives. The worker's end of its control socket comes with this packet.
    """

    number: int
    pid: int


class Unforked(ProcessFrame, frozen=True, tag=51):
    """The execution process could not be forked; `text` says why."""

    number: int
    text: str


class Died(ProcessFrame, frozen=True, tag=52):
    """An execution process ended.

    Attributes:
        number: which one.
        status: its wait status.
        none_left: whether all of its descendants have ended too; otherwise DescendantsEnded
            follows.
        tail: the end of a runner's output.
    """

    number: int
    status: int
    none_left: bool
    tail: str


class DescendantsEnded(ProcessFrame, frozen=True, tag=53):
    """All descendants of an execution process have ended that died with `none_left` false."""

    number: int


# unions by tag, which msgspec reads from typing.Union
ToProcess = Union[Setup, RunAction, KillCommand, Units, LoadFunction, Drop,  # noqa: UP007
                  ExitProcess, FreezeBackground, SessionSecrets, LeaseBackground, GiveInput,
                  HoldStill, ConnectPort, PortBytes, PortCredit, PortEnded]
FromProcess = Union[Ready, Broken, Ended, Gone, OutputChunk, BackgroundRunnable,  # noqa: UP007
                    CreditInput, HeldStill, PortBytes, PortCredit, PortEnded]
ToForkServer = Union[Fork, KillProcess, RemoveDirectory]  # noqa: UP007
FromForkServer = Union[Forked, Unforked, Died, DescendantsEnded]  # noqa: UP007

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_to_process = reader(ToProcess)
_from_process = reader(FromProcess)

decode_to_fork_server = reader(ToForkServer)
decode_from_fork_server = reader(FromForkServer)
packet = _encoder.encode


def frame(message: ProcessFrame) -> bytes:
    """Returns a message as one frame for a control socket."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


_Message = TypeVar("_Message")


class _Inbox(Generic[_Message]):
    """Cuts a stream of bytes into frames and keeps what is incomplete."""

    __slots__ = ("_kept", "_need", "_read")

    def __init__(self, read: Callable[[memoryview], Any]) -> None:
        self._read = read
        self._kept = bytearray()
        self._need = 4

    @property
    def empty(self) -> bool:
        """Whether no part of a frame is kept."""
        return not self._kept

    def feed(self, data: bytes) -> Iterator[_Message]:
        """Yields the messages that are complete.

        Raises:
            ProtocolError: the bytes are no frames of this protocol.
        """
        if self._kept:
            self._kept += data
            if len(self._kept) < self._need:
                return
            data = bytes(self._kept)
            self._kept = bytearray()
        view, at, end = memoryview(data), 0, len(data)
        while end - at >= 4:
            size = _LENGTH.unpack_from(view, at)[0]
            if size > FRAME_MAX:
                raise ProtocolError(f"a frame of {size} bytes is not in the protocol")
            if end - at - 4 < size:
                break
            try:
                yield self._read(view[at + 4 : at + 4 + size])
            except msgspec.DecodeError as error:
                raise ProtocolError(f"a message is not in the protocol: {error}") from None
            at += 4 + size
        if at < end:
            self._kept = bytearray(view[at:])
            self._need = 4 + _LENGTH.unpack_from(view, at)[0] if end - at >= 4 else 4


class ProcessInbox(_Inbox[ToProcess]):
    """Reads the messages that a worker sends to an execution process."""

    def __init__(self) -> None:
        super().__init__(_to_process)


class WorkerInbox(_Inbox[FromProcess]):
    """Reads the messages that an execution process sends to its worker."""

    def __init__(self) -> None:
        super().__init__(_from_process)
