"""Pure. What clients and workers put into payloads; the broker never decodes one.

Law: msgpack and raw array buffers only. Nothing here unpickles; a pickle is bytes that only the
function runner (its call) or a client that said `trusted=True` (its result) opens. A payload over
`INLINE_MAX` travels as a `Stored` reference: the bytes lie in the job's store under their digest.
"""

from __future__ import annotations

import hashlib
from typing import Union

import msgspec

from ..domain.action import Action
from ..domain.ids import COUNTER_BITS, client_of
from .reading import reader


class Payload(msgspec.Struct, frozen=True, array_like=True, tag_field="p", gc=False):
    """The common head of all payloads."""


class Stored(Payload, frozen=True, tag=1):
    """The real payload lies in the store, `size` bytes under this name: a sha256 hex digest, and
    for whom it is kept there (`owner_of_result`)."""

    digest: str
    size: int


class ExecCall(Payload, frozen=True, tag=2):
    """A command for a sandbox.

    `argv` runs as it is, or `shell` through /bin/sh -c (exactly one is set). `env` adds to the
    sandbox's own. `cwd` is relative to the session's directory unless absolute. `files` are
    written before the start (path -> bytes). `stream` sends output while it runs.
    """

    argv: tuple[str, ...] = ()
    shell: str = ""
    env: dict[str, str] = {}
    cwd: str = ""
    stdin: bytes = b""
    files: dict[str, bytes] = {}
    stream: bool = False
    clean_env: bool = True  # False: `env` is the whole environment


class FileCall(Payload, frozen=True, tag=3):
    """Read (`data` is None) or write one file of a session's sandbox; or, as `op` says, `list`
    what lies at `path` (answered by FileList) or `mkdir` it and its parents."""

    path: str
    data: bytes | None = None
    mode: int = 0o644
    op: str = ""


class FunctionCall(Payload, frozen=True, tag=4):
    """A Python function: `digest` names its cloudpickle in the store; `arguments` is a pickle of
    (args, kwargs). `pickled` allows the result to travel as a pickle."""

    digest: str
    arguments: bytes
    pickled: bool = False


class ServiceCall(Payload, frozen=True, tag=5):
    """A call of a service: what it is asked to do, with what (`protocol.value`), and how many
    tokens that is, for the budget of a batch."""

    method: str
    arguments: bytes
    tokens: int = 0


class ExecReturn(Payload, frozen=True, tag=10):
    """A command's output, capped; `cut` counts the bytes that were dropped of each stream."""

    stdout: bytes = b""
    stderr: bytes = b""
    cut: tuple[int, int] = (0, 0)


class FileReturn(Payload, frozen=True, tag=11):
    """A file's content."""

    data: bytes = b""


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """One thing beneath a listed folder. `name`: its path from there, empty for the listed thing
    itself when that is a file; `kind`: `file`, `dir`, `link` or `other`; `size` in bytes."""

    name: str
    kind: str
    size: int = 0
    mode: int = 0o644


class FileList(Payload, frozen=True, tag=14):
    """All that lies beneath a folder, links not followed; or one file. The names are a sandbox's:
    whoever writes to them checks them."""

    entries: tuple[FileEntry, ...]


class ValueReturn(Payload, frozen=True, tag=12):
    """A function's result as msgpack, or as a pickle when `pickled`."""

    data: bytes
    pickled: bool = False


class ErrorReturn(Payload, frozen=True, tag=13):
    """A function's exception, as text only."""

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
    """Whose a result is in the job's store: its client's, or its own name's. Each attempt has an
    entry of its own, since a late one must not replace what a client is about to read."""
    if action.once:
        return owner_by_name(action.once)
    return f"{owner_by_client(client_of(action.id))}{action.id & (1 << COUNTER_BITS) - 1}.{lease}"


def owner_by_client(client: int) -> str:
    """How the owners of all that a client keeps in the store begin."""
    return f"{client}."


def owner_by_name(once: str) -> str:
    """The owner of what an action with a name of its own keeps in the store. It outlives the
    client, and goes when the name is forgotten."""
    return f"once-{hashlib.sha256(once.encode()).hexdigest()[:32]}"


_encoder = msgspec.msgpack.Encoder()
_read = reader(AnyPayload)


def encode(payload: Payload) -> bytes:
    """The payload's bytes."""
    return _encoder.encode(payload)


def decode(data: bytes | memoryview) -> AnyPayload:
    """The payload in these bytes.

    Raises:
        msgspec.DecodeError: they are not a payload.
    """
    payload: AnyPayload = _read(data)
    return payload
