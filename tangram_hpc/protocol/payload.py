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
    user: str = ""
    real_user: bool = False


class FileCall(Payload, frozen=True, tag=3):
    """An operation on the files of a session's sandbox.

    Attributes:
        path: which file or folder.
        data: what to write; None to read.
        mode: mode of the file that is written.
        op: empty to read or write one file; `list` for all that is beneath a folder (answered by
            FileList); `mkdir` to make a folder and its parents.
    """

    path: str
    data: bytes | None = None
    mode: int = 0o644
    op: str = ""


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
    """The content of a file."""

    data: bytes = b""


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """One file or folder in a listing.

    Attributes:
        name: its path from the listed folder; empty if the listed path itself is a file.
        kind: `file`, `dir`, `link` or `other`.
        size: in bytes.
        mode: its permission bits.
    """

    name: str
    kind: str
    size: int = 0
    mode: int = 0o644


class FileList(Payload, frozen=True, tag=14):
    """All that is beneath a folder, links not followed; or one file.

    The names come from a sandbox, so whoever writes files of these names must check them.
    """

    entries: tuple[FileEntry, ...]


class ValueReturn(Payload, frozen=True, tag=12):
    """The result of a function, as msgpack, or as a pickle if `pickled`."""

    data: bytes
    pickled: bool = False


class ErrorReturn(Payload, frozen=True, tag=13):
    """The exception of a function, as text only."""

    kind: str
    text: str
    trace: str = ""


AnyPayload = Union[  # noqa: UP007
    Stored,
    ExecCall,
    FileCall,
    FunctionCall,
    ServiceCall,
    ExecReturn,
    FileReturn,
    FileList,
    ValueReturn,
    ErrorReturn,
]


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
