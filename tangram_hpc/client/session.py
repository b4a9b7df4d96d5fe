"""`Session`: a trajectory's stateful sandbox, as its client holds it.

Law: what is submitted to a session runs in order, one at a time; files stay between its actions;
leaving the `with` block closes it and ends what still runs in it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..domain.action import Kind
from ..domain.ids import show
from ..domain.session import SessionSpec
from ..errors import InfeasibleRequest, SessionLost
from ..wire import message as ms
from ..wire import payload as pl
from .future import Future
from .request import Options, Work

if TYPE_CHECKING:
    from .client import Client


class Session:
    """Made by `Client.session`. Every method that acts returns a Future: `.result()` it, or
    await it."""

    def __init__(self, client: Client, spec: SessionSpec) -> None:
        self.spec = spec
        self.node = ""
        self.wait_s = 0.0  # how long it waited for admission
        self.opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.closed: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._client = client

    @property
    def id(self) -> str:
        """The session's id as commands and accounting show it."""
        return show(self.spec.id)

    def submit(self, work: Work, *args: Any, **options: Any) -> Future:
        """`Client.submit` inside this session."""
        return self._client.submit(work, *args, session=self, **options)

    def exec(self, command: Sequence[str] | str, **options: Any) -> Future:
        """A Future of the ExecResult of a command in this session; see `Client.submit`."""
        return self.submit(command, **options)

    def write(self, path: str, data: bytes | str, mode: int = 0o644) -> Future:
        """Writes a file below the session's directory; parents are made."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        return self._file(pl.FileCall(path, raw, mode), "write")

    def read(self, path: str) -> Future:
        """A Future of the bytes of a file below the session's directory."""
        return self._file(pl.FileCall(path), "read")

    def close(self) -> None:
        """Ends the session; `closed` tells when its memory is free. Twice is harmless."""
        self._client._release(self.spec.id)

    def _file(self, call: pl.FileCall, what: str) -> Future:
        return self._client._send_action(Kind.FILE, Options(), self, what, call)

    def __enter__(self) -> Session:
        self.opened.result()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Session:
        await asyncio.wrap_future(self.opened)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    # ---- the client's thread -----------------------------------------------------------------

    def _up(self, message: ms.SessionUp) -> None:
        self.node, self.wait_s = message.node, message.wait_ns / 1e9
        if not self.opened.done():
            self.opened.set_result(None)

    def _down(self, reason: str, never: bool = False) -> None:
        if not self.opened.done():
            kind = InfeasibleRequest if never else SessionLost
            self.opened.set_exception(kind(reason or f"session {self.id} was closed"))
        if not self.closed.done():
            self.closed.set_result(reason)


