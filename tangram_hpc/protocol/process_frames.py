"""Pure. What worker, fork server and execution processes say to each other on one machine, and how
it is framed.

Law: nothing here is ever sent to another machine or kept. Worker and execution process: a stream of
frames, each a little-endian u32 length and one msgpack message. Worker and fork server: one msgpack
message a packet (a `SOCK_SEQPACKET` pair). A runner runs its user's code, so the worker believes of
its messages only what concerns the leases that it was given.

A runner is given calls ahead; a counter (an eventfd) and a pipe come with its Setup. Each call has
a token on the counter; the runner takes one, then reads what its worker has said meanwhile, and
only then begins. So a worker that takes tokens back, and says Drop before it gives new ones, knows
which calls never begin. The pipe is a bell that the runner rings when there are results to read:
its worker is woken once for many.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Union

import msgspec

from ..domain.outcome import Outcome
from ..domain.states import ActionState
from ..errors import ProtocolError
from .reading import reader

FRAME_MAX = 512 * 1024 * 1024  # bytes
FILE_MAX = 256 * 1024 * 1024  # bytes; the largest file that one FileCall reads
PACKET_MAX = 64 * 1024  # bytes
TAIL = 4096  # bytes; what is kept of a function's own output
RECEIVE = 1 << 16  # bytes a read; as `protocol.frame.RECEIVE`, without importing all messages
OUTPUT = ".tangram-output"  # where a runner's stdout and stderr go, in its scratch directory

INIT = "init"
RUNNER = "runner"


class Frame(msgspec.Struct, frozen=True, array_like=True, tag_field="k"):
    """The common head of all messages of this file."""


# ---- worker -> execution process ----


class Box(msgspec.Struct, frozen=True, array_like=True):
    """How a sandbox is built; sandboxes of one box are interchangeable until they are used.
    `backend` is empty for a runner, which has none."""

    backend: str = ""
    trusted: bool = True
    network: bool = True
    image: str = ""


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """What one sandbox may use beside cores; 0: no limit."""

    mem_mib: int = 0
    disk_mib: int = 0
    pids: int = 0


class Setup(Frame, frozen=True, tag=1):
    """First message to an execution process. `read`: the host's paths that its sandbox may see;
    `etc`: a directory to mount for those in /etc; `watch`: memory and processes are limited by
    nobody else; `origin`: a directory whose files it begins with; `enforcement`: how its units are
    held, and `joins` the files by which it enters what holds it; `compiled`: plain commands may be
    served by `_fast_path.c`; `cpu_file`: where the kernel counts the CPU time of what holds it, or
    ""."""

    kill_wait_ns: int
    output_max: int
    box: Box = Box()
    read: tuple[str, ...] = ()
    etc: str = ""
    watch: bool = True
    origin: str = ""
    enforcement: str = ""
    joins: tuple[str, ...] = ()
    compiled: bool = True
    cpu_file: str = ""


class Run(Frame, frozen=True, tag=2):
    """Carry a client's payload out. `gpus`: what CUDA_VISIBLE_DEVICES says of those it holds.
    `units` are granted now, `most` at most while it runs. With `keep` the files stay for the
    session's next action, and what its processes left behind may do until then is `background`."""

    lease: int
    payload: bytes
    gpus: str
    units: int
    most: int
    timeout_ns: int
    keep: bool
    background: str
    limits: Limits


class Kill(Frame, frozen=True, tag=3):
    """End what runs under a lease and report `state`."""

    lease: int
    state: ActionState
    reason: str


class Units(Frame, frozen=True, tag=4):
    """A lease has so many units now."""

    lease: int
    units: int


class Load(Frame, frozen=True, tag=5):
    """A function for a runner to keep under its digest; `drop` is one to forget, or empty."""

    digest: str
    blob: bytes
    drop: str


class Drop(Frame, frozen=True, tag=7):
    """Forget these calls: their tokens are taken."""

    leases: tuple[int, ...]


class Close(Frame, frozen=True, tag=6):
    """End all beneath, remove the directory, exit."""


# ---- execution process -> worker ----


class FreezeBackground(Frame, frozen=True, tag=8):
    """The node is short of memory: what idles here stops, whatever its session was promised."""


class Ready(Frame, frozen=True, tag=23):
    """The execution process takes orders; its sandbox has this isolation."""

    isolation: str


class Broken(Frame, frozen=True, tag=24):
    """The sandbox could not be built, or does not stand any more; the execution process ends."""

    text: str


class Ended(Frame, frozen=True, tag=20):
    """A lease's outcome and the payload for its client; `none_left`: nothing of it is left.
    `process_cpu_ns`: of a runner, the CPU time that it has used in its life."""

    lease: int
    outcome: Outcome
    payload: bytes | None
    none_left: bool
    process_cpu_ns: int = 0


class Gone(Frame, frozen=True, tag=21):
    """Nothing is left of a lease that ended without `none_left`."""

    lease: int


class Piece(Frame, frozen=True, tag=22):
    """A piece of a streamed command's output."""

    lease: int
    stream: int
    data: bytes


# ---- worker -> fork server ----


class Fork(Frame, frozen=True, tag=40):
    """Fork an execution process of this kind under this number, in the directory named `home`: a
    `fresh` one, which is made, or that of an execution process that died."""

    number: int
    kind: str
    home: str
    fresh: bool


class End(Frame, frozen=True, tag=41):
    """SIGKILL an execution process; Died follows."""

    number: int


class RemoveDirectory(Frame, frozen=True, tag=42):
    """Nobody needs the directory of this dead execution process any more."""

    home: str


# ---- fork server -> worker ----


class Forked(Frame, frozen=True, tag=50):
    """The execution process lives; the worker's end of its control socket comes with this
    packet."""

    number: int
    pid: int


class Unforked(Frame, frozen=True, tag=51):
    """The execution process could not be forked."""

    number: int
    text: str


class Died(Frame, frozen=True, tag=52):
    """An execution process ended with this wait status. `none_left`: so did all that was beneath
    it. `tail` is the end of a runner's output."""

    number: int
    status: int
    none_left: bool
    tail: str


class DescendantsEnded(Frame, frozen=True, tag=53):
    """All that was beneath an execution process that died without `none_left` has ended."""

    number: int


# unions by tag, which msgspec reads from typing.Union
ToProcess = Union[Setup, Run, Kill, Units, Load, Drop, Close, FreezeBackground]  # noqa: UP007
FromProcess = Union[Ready, Broken, Ended, Gone, Piece]  # noqa: UP007
ToForkServer = Union[Fork, End, RemoveDirectory]  # noqa: UP007
FromForkServer = Union[Forked, Unforked, Died, DescendantsEnded]  # noqa: UP007

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_to_process = reader(ToProcess)
_from_process = reader(FromProcess)

decode_to_fork_server = reader(ToForkServer)
decode_from_fork_server = reader(FromForkServer)
packet = _encoder.encode


def frame(message: Frame) -> bytes:
    """A message as it goes through a control socket."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class _Inbox:
    """Cuts a stream into frames; keeps what is incomplete."""

    __slots__ = ("_kept", "_need", "_read")

    def __init__(self, read: Callable[[memoryview], Any]) -> None:
        self._read = read
        self._kept = bytearray()
        self._need = 4

    @property
    def empty(self) -> bool:
        """Whether it keeps no part of a frame."""
        return not self._kept

    def _cut(self, data: bytes) -> Iterator:
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


class ProcessInbox(_Inbox):
    """What an execution process reads."""

    def __init__(self) -> None:
        super().__init__(_to_process)

    def feed(self, data: bytes) -> Iterator[ToProcess]:
        """Yields the messages that are complete.

        Raises:
            ProtocolError: the bytes are not frames.
        """
        return self._cut(data)


class WorkerInbox(_Inbox):
    """What a worker reads of an execution process."""

    def __init__(self) -> None:
        super().__init__(_from_process)

    def feed(self, data: bytes) -> Iterator[FromProcess]:
        """Yields the messages that are complete.

        Raises:
            ProtocolError: the bytes are not frames.
        """
        return self._cut(data)
