"""`Session`: a trajectory's stateful sandbox, as its client holds it.

Law: what is submitted to a session runs in order, one at a time; files stay between its actions;
leaving the `with` block closes it and ends what still runs in it. `upload` and `download` are many
actions and block; all else that acts returns a Future.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ..domain.action import Kind
from ..domain.ids import show
from ..domain.session import SessionSpec, why_ended
from ..errors import InfeasibleRequest, InvalidInput, SessionLost, TangramError
from ..protocol import message as ms
from ..protocol import payload as pl
from .future import Future
from .request import Options, Work, environment, raw_bytes, session_spec, trajectory_name
from .transfer import download, upload

if TYPE_CHECKING:
    from .client import Client


class Session:
    """Made by `Client.session`. Every method that acts returns a Future: `.result()` it, or
    await it."""

    def __init__(self, client: Client, spec: SessionSpec, env: dict[str, str],
                 trajectory: str = "") -> None:
        self.spec, self.env, self.trajectory = spec, env, trajectory
        self.first: list[Future] = []  # the files it was opened with, being written
        self.node = ""
        self.why_ended = ""  # one line, once it has ended
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
        """A Future of the ExecResult of a command in this session; see `Client.submit` for
        `stdin`, `cwd`, `env`, `timeout`, `cpus` and the rest."""
        return self.submit(command, **options)

    def write(self, path: str, data: bytes | str, mode: int = 0o644) -> Future:
        """Writes a file below the session's directory; parents are made."""
        return self._file(pl.FileCall(path, raw_bytes(data, "data"), mode), "write")

    def read(self, path: str) -> Future:
        """A Future of the bytes of a file below the session's directory."""
        return self._file(pl.FileCall(path), "read")

    def listing(self, path: str = "") -> Future:
        """A Future of all that lies beneath a folder, or of one file: a tuple of entries (`name`,
        `kind`, `size` in bytes, `mode`). The names are the sandbox's own and may be anything."""
        return self._file(pl.FileCall(path, op="list"), "list")

    def mkdir(self, path: str) -> Future:
        """Makes a folder below the session's directory, and its parents."""
        return self._file(pl.FileCall(path, op="mkdir"), "mkdir")

    def upload(self, local: str | os.PathLike[str], path: str = "") -> int:
        """Writes a local file, or all that a local folder holds, to `path`; returns the number of
        files. A file without a path (or to one that ends in /) keeps its name.

        Raises:
            InvalidInput: something there cannot be read, or is neither file nor folder.
            ActionFailed: the session could not write one.
        """
        return upload(self, _local(local), _below(path))

    def download(self, path: str, local: str | os.PathLike[str], *, max_bytes: int = 1 << 30,
                 skip_others: bool = False) -> int:
        """Writes a file, or all that a folder of the session holds, below `local`; returns the
        number of files. Nothing is written outside it, whatever the sandbox lists.

        Args:
            local: for a folder: the folder; for a file: its new name, or a folder to put it into.
            max_bytes: refuse more than that.
            skip_others: leave out links and what else is neither file nor folder.

        Raises:
            InvalidInput: the sandbox lists what must not be written, or too much.
            ActionFailed: the session could not read it.
        """
        return download(self, _below(path), _local(local), max_bytes, skip_others)

    def fork(self, *, env: Mapping[str, str] | None = None,
             files: Mapping[str, bytes | str] | None = None, trajectory: str | int = "",
             **overrides: Any) -> Session:
        """A new session beside this one that begins with its files, as they are between two of its
        actions, when all that was submitted to it before has ended. It is as this one but for
        `overrides`, the arguments of `Client.session`; `env` is added to this one's, and
        `trajectory` is its own.

        Raises:
            InvalidInput: an argument is wrong; names it.
        """
        try:
            spec = session_spec(self.spec, **overrides)
        except TypeError as error:
            raise InvalidInput(f"fork: {error}") from None
        spec = msgspec.structs.replace(spec, origin=self.spec.id)
        env = {**self.env, **environment(env)}
        return self._client._open_session(spec, env, files, trajectory)

    def renew(self) -> None:
        """Says that it is still wanted: what `idle_s` counts begins again."""
        self._client._renew(self.spec.id)

    def close(self) -> None:
        """Ends the session; `closed` tells when its memory is free. Twice is harmless."""
        self._client._release(self.spec.id)

    def _file(self, call: pl.FileCall, what: str) -> Future:
        return self._client._send_action(Kind.FILE, Options(), self, what, call)

    def __reduce__(self) -> NoReturn:
        raise InvalidInput("a session cannot be sent to another process; call "
                           f"{self._client._again} there for a client with sessions of its own")

    def __enter__(self) -> Session:
        try:
            self.opened.result()
            for each in self.first:
                each.result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Session:
        try:
            await asyncio.wrap_future(self.opened)
            for each in self.first:
                await each
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    # ---- the client's thread -----------------------------------------------------------------

    def _up(self, message: ms.SessionUp) -> None:
        self.node = message.node  # another one after a move
        if not self.opened.done():
            self.wait_s = message.wait_ns / 1e9
            self.opened.set_result(None)

    def _down(self, reason: str, never: bool = False, error: TangramError | None = None) -> None:
        """It has ended. `error`: raised by a pending `opened` when the client failed and not the
        session."""
        self.why_ended = why_ended(self.spec.id, reason)
        if not self.opened.done():
            own = InfeasibleRequest(reason) if never else SessionLost(self.why_ended)
            self.opened.set_exception(error or own)
        if not self.closed.done():
            self.closed.set_result(reason)


def _local(path: Any) -> str:
    """A path of this machine. Raises InvalidInput."""
    if isinstance(path, str | os.PathLike):
        text = os.fspath(path)
        if isinstance(text, str) and "\0" not in text:
            return text
    raise InvalidInput(f"local: {path!r:.60} is no path")


def _below(path: Any) -> str:
    """A path of the session. Raises InvalidInput."""
    if not isinstance(path, str):
        raise InvalidInput(f"path: {path!r:.60} is not a text")
    return path


def chosen_trajectory(own: str | int | None, session: Session | None) -> str:
    """The trajectory of an action: the one that its caller names (`own`, empty for none), else that
    of its session.

    Raises:
        InvalidInput: the name is too long, or cannot be sent.
    """
    if own is None:
        return session.trajectory if session is not None else ""
    return trajectory_name(own) if own != "" else ""
