"""Defines what clients and workers put into payloads. Pure.

The broker never decodes a payload. A payload holds msgpack and raw array buffers only, and nothing
here unpickles. A pickle is bytes here. Only the runner of a function opens one (its call), and a
client that said `trusted=True` (its result). A payload of more than `INLINE_MAX` bytes travels as a
`Stored` reference to an entry in the job's store.
"""

from __future__ import annotations

import hashlib
from typing import Union

import msgspec

from ..domain.action import Action
from ..domain.ids import COUNTER_BITS, client_of
from .reading import reader

# Which part of a long output stream is kept: the first bytes, the last bytes, or the first half and
# the last half of as many bytes.
KEEPS = ("head", "tail", "both")


class Payload(msgspec.Struct, frozen=True, array_like=True, tag_field="p", gc=False):
    """The base class of all payloads."""


class Stored(Payload, frozen=True, tag=1):
    """Refers to the real payload, `size` bytes in the job's store.

    `digest` is the entry's name: a sha256 in hex, then the owner for whom the entry is kept (see
    `owner_of_result`).
    """

    digest: str
    size: int


class ExecCall(Payload, frozen=True, tag=2):
    """A command for a sandbox.

    Attributes:
        argv: the command and its arguments; empty if `shell` is set.
        shell: text for `/bin/sh -c`; empty if `argv` is set.
        env: variables that are added to the sandbox's own.
        cwd: working directory, relative to the session's directory unless it is absolute.
        stdin: what the command reads.
        files: content of files that are written before the start, by path.
        stream: whether its output is sent while it runs.
        clean_env: whether the sandbox's own variables are set; if not, `env` is the whole
            environment.
        output_max: bytes of each output stream that are kept; 0 for the site's default.
        keep: which part of a longer stream is kept: one of `KEEPS`.
        user: the user that it runs as, a name or a number; empty for the sandbox's own.
        real_user: whether it fails where it could not have that user's number.
    """

    argv: tuple[str, ...] = ()
    shell: str = ""
    env: dict[str, str] = {}
    cwd: str = ""
    stdin: bytes = b""
    files: dict[str, bytes] = {}
    stream: bool = False
    clean_env: bool = True  # False: `env` is the whole environment
    output_max: int = 0
    keep: str = "head"
    user: str = ""
    real_user: bool = False


class FileCall(Payload, frozen=True, tag=3):
    """An operation on the files of a session's sandbox.

    Attributes:
        path: which file or folder.
        data: what to write; None to read.
        mode: mode of the file that is written.
        op: empty to read or write one file; `list` for all that is beneath a folder, and `stat`
            for what the path itself is (both are answered by FileList); `mkdir` to make a folder
            and its parents; `remove` to remove a file or a tree; `move` to give it the name
            `target`.
        offset: the first byte that is read or written. A write at 0 begins the file anew; a later
            one only adds to a file of exactly this size.
        length: the most bytes that are read; negative for all that follow.
        depth: the levels of a list; 0 for all.
        target: the new name of what is moved.
    """

    path: str
    data: bytes | None = None
    mode: int = 0o644
    op: str = ""
    offset: int = 0
    length: int = -1
    depth: int = 0
    target: str = ""


class FunctionCall(Payload, frozen=True, tag=4):
    """A call of a Python function.

    Attributes:
        digest: name of the function's cloudpickle in the store.
        arguments: pickle of (args, kwargs).
        pickled: whether the result may travel as a pickle.
    """

    digest: str
    arguments: bytes
    pickled: bool = False


class ServiceCall(Payload, frozen=True, tag=5):
    """A call of a service.

    Attributes:
        method: what the service is asked to do.
        arguments: its arguments, encoded by `protocol.value`.
        tokens: how many tokens they are, which counts against the limit of a batch.
    """

    method: str
    arguments: bytes
    tokens: int = 0


class ShellCall(Payload, frozen=True, tag=6):
    """A command for a shell of a session, or the opening or the end of that shell.

    Attributes:
        op: `open`, `run` or `close`. A shell is closed at once, beside the command that runs in it.
        shell: the shell's number, which its client chose.
        text: what the shell runs.
        stdin: what the commands of `text` read.
        stream: whether the output is sent while the command runs.
        start: whether a new shell is started if there is none; if not, that is an error.
        program: the shell's program, by its name or path; empty for bash, or sh without one.
        cwd: the directory in which the shell begins, as for `ExecCall`.
        env: variables that the shell begins with, besides the sandbox's own.
        size: rows and columns of its terminal; (0, 0) for no terminal.
        echo: whether the terminal echoes what is written to it.
        user: the user that the shell begins as, as for `ExecCall`.
        output_max, keep: how much of the command's output is kept, as for `ExecCall`.
    """

    op: str
    shell: int
    text: str = ""
    stdin: bytes = b""
    stream: bool = False
    start: bool = False
    program: str = ""
    cwd: str = ""
    env: dict[str, str] = {}
    size: tuple[int, int] = (0, 0)
    echo: bool = False
    user: str = ""
    output_max: int = 0
    keep: str = "head"


class TerminalCall(Payload, frozen=True, tag=7):
    """A command that runs on a terminal of its own, whose output is streamed.

    It is no field of `ExecCall`, since the fast path in C knows the layout of that.

    Attributes:
        command: what runs.
        size: rows and columns of the terminal.
        echo: whether the terminal echoes what is written to it.
    """

    command: ExecCall
    size: tuple[int, int] = (24, 80)
    echo: bool = False


class DetachableCall(Payload, frozen=True, tag=8):
    """A command that can go to the background (`sandbox/shells/detachable_command.py`).

    It is no field of `ExecCall` for the same reason as `TerminalCall`.

    Attributes:
        command: what runs.
        reads_input: whether its input is a FIFO; otherwise it reads nothing.
    """

    command: ExecCall
    reads_input: bool = False


class SnapshotCall(Payload, frozen=True, tag=43):
    """Takes a snapshot of a session under a name that its client chose."""

    name: str


class SnapshotReturn(Payload, frozen=True, tag=44):
    """Tells the client that the snapshot of this name was taken."""

    name: str


class ExecReturn(Payload, frozen=True, tag=10):
    """The output of a command, cut to a limit.

    Attributes:
        stdout, stderr: what was kept.
        cut: how many bytes of each were dropped.
    """

    stdout: bytes = b""
    stderr: bytes = b""
    cut: tuple[int, int] = (0, 0)


class FileReturn(Payload, frozen=True, tag=11):
    """The content of a file, or a part of it.

    Attributes:
        data: the bytes.
        size: of the whole file, in bytes.
        stamp: changes when the file's content changes.
    """

    data: bytes = b""
    size: int = 0
    stamp: int = 0


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """One file or folder in a listing.

    Attributes:
        name: its path from the listed folder; empty if the listed path itself is a file.
        kind: `file`, `dir`, `link` or `other`. Whatever has a name that is not UTF-8 is `other`,
            since no call can name it; `name` has `\\xe4` for such a byte.
        size: in bytes.
        mode: its permission bits.
        mtime_ns: when its content changed last, in ns since the epoch.
        target: what a link leads to, as it is written; empty otherwise, and if it is not UTF-8.
        uid, gid: the numbers of its owner and group, as the sandbox sees them.
    """

    name: str
    kind: str
    size: int = 0
    mode: int = 0o644
    mtime_ns: int = 0
    target: str = ""
    uid: int = 0
    gid: int = 0


class FileList(Payload, frozen=True, tag=14):
    """All that is beneath a folder, links not followed; or one file.

    The names come from a sandbox, so whoever writes files of these names must check them.
    """

    entries: tuple[FileEntry, ...]
    one: bool = False  # it answers `stat`: the value is the one entry


class ValueReturn(Payload, frozen=True, tag=12):
    """The result of a function, as msgpack, or as a pickle if `pickled`."""

    data: bytes
    pickled: bool = False


SHELL_ENDED = "ShellEnded"  # `ErrorReturn.kind` of a command whose shell is not there


class ErrorReturn(Payload, frozen=True, tag=13):
    """The exception of a function, as text only; or why a command found no shell."""

    kind: str
    text: str
    trace: str = ""


class DirectReturn(Payload, frozen=True, tag=15):
    """What an action returns that served direct calls (`protocol/direct_frames.py`).

    Attributes:
        calls: how many calls have begun.
        run_ns: their run time, in sum.
        unreachable: why it could not connect to its client; empty if it could.
    """

    calls: int = 0
    run_ns: int = 0
    unreachable: str = ""


AnyPayload = Union[  # noqa: UP007
    Stored,
    ExecCall,
    FileCall,
    FunctionCall,
    ServiceCall,
    ShellCall,
    TerminalCall,
    DetachableCall,
    ExecReturn,
    FileReturn,
    FileList,
    ValueReturn,
    ErrorReturn,
    DirectReturn,
    SnapshotCall,
    SnapshotReturn,
]


class SessionContext(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a client that attaches to a shared session is told of it by the client that opened it.

    The values of variables may be secrets, so this is in no event and in no journal.

    Attributes:
        env: variables of all commands of the session.
        trajectory: the trajectory whose tools run in the session; empty for none.
    """

    env: dict[str, str] = {}
    trajectory: str = ""


def owner_of_result(action: Action, lease: int) -> str:
    """Returns for whom the result of an action is kept in the job's store: its client, or its
    idempotency key. Each attempt has an entry of its own, since a late attempt must not replace
    what a client is about to read.
    """
    if action.once:
        return owner_by_name(action.once)
    return f"{owner_by_client(client_of(action.id))}{action.id & (1 << COUNTER_BITS) - 1}.{lease}"


def owner_by_client(client: int) -> str:
    """Returns the prefix of all owners for whom entries of this client are kept."""
    return f"{client}."


def owner_by_name(once: str) -> str:
    """Returns the owner of the entries of an idempotency key.

    They outlive the client, and go when the key is forgotten.
    """
    return f"once-{hashlib.sha256(once.encode()).hexdigest()[:32]}"


_encoder = msgspec.msgpack.Encoder()
_read = reader(AnyPayload)


def encode(payload: Payload) -> bytes:
    """Returns the bytes of a payload."""
    return _encoder.encode(payload)


def decode(data: bytes | memoryview) -> AnyPayload:
    """Returns the payload in these bytes.

    Raises:
        msgspec.DecodeError: the bytes are not a payload.
    """
    payload: AnyPayload = _read(data)
    return payload
