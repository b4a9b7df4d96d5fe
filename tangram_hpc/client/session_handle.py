"""`SessionHandle`: what another process needs to use a session, small enough to send anywhere.

A handle is a plain value: it can be pickled, sent through Ray, MPI or a queue, and written as text.
Whoever has it can use the session, so treat it like a password. Its `repr` shows no token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ..domain.session_token import TOKEN_MAX
from ..errors import InvalidInput
from .request import utf8


@dataclass(frozen=True)
class SessionHandle:
    """The name and a token of a shared session; made by `Session.handle`.

    Attributes:
        name: the session's name, unique in its job while it is open.
        token: what proves that its holder may attach. Keep it out of logs.
        job: the job of the session; empty if that is not known.

    Example:
        queue.put(session.handle().text)                          # one process
        with client.attach(queue.get()) as session:               # another one
            report = session.read("report.json").result()
    """

    name: str
    token: str = field(repr=False)
    job: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidInput("name: a session is attached to by its name; take it from "
                               "`session.handle()`")
        utf8(self.name, "name")
        if not (isinstance(self.token, str) and self.token.isascii() and self.token.isprintable()
                and 0 < len(self.token) <= TOKEN_MAX):
            raise InvalidInput("token: it is not the token of a session; take it from "
                               "`session.handle()`")

    @property
    def text(self) -> str:
        """The handle as one line of JSON, which `Client.attach` takes too. It holds the token."""
        return json.dumps({"name": self.name, "token": self.token, "job": self.job})


def read_handle(handle: SessionHandle | str | None, name: str, token: str) -> SessionHandle:
    """Returns the handle that a caller of `Client.attach` gave.

    Args:
        handle: a handle or its text; None where `name` and `token` are given.
        name, token: those of the session; empty where `handle` is given.

    Raises:
        InvalidInput: neither or both were given, or one of them is wrong.
    """
    if (handle is not None) == bool(name or token):
        raise InvalidInput("handle: give either a handle, or name and token")
    if handle is None:
        return SessionHandle(name, token)
    if isinstance(handle, SessionHandle):
        return handle
    try:
        known = json.loads(handle)
        return SessionHandle(known["name"], known["token"], str(known.get("job", "")))
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
        raise InvalidInput("handle: it is neither a SessionHandle nor the text of one") from None
