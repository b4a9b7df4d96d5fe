"""`Session`: a trajectory's stateful sandbox, as its user holds it.

What is submitted to a session runs in order, one action at a time, and files stay between its
actions. Leaving the `with` block closes the session and cancels what still runs in it. `upload` and
`download` are many actions each and block; every other method that acts returns a Future at once.

The session's state is its record, which the connection keeps until the session's end is known.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from ..domain.action import Kind
from ..domain.ids import show
from ..domain.session import SessionSpec
from ..errors import InvalidInput
from ..protocol import message as ms
from ..protocol import payload as pl
from .actions import submit
from .connection import Connection
from .future import Future
from .request import (
    Options,
    Work,
    environment,
    raw_bytes,
    raw_files,
    session_spec,
    tool_of,
)
from .session_record import SessionRecord
from .transfer import download, upload


class Session:
    """A stateful sandbox on one node; made by `Client.session` and `Session.fork`.

    A session holds memory from its admission to its end, and CPUs only while an action runs in it.
    `with session:` (or `async with`) waits for its admission and closes it at the end.

    Example:
        with client.session(mem="1G", files={"t.py": "print(1 + 1)"}) as session:
            assert session.exec(["python3", "t.py"]).result().text == "2\\n"

    Attributes:
        first: the Futures of the files that the session was opened with, in their order.
    """

    def __init__(self, connection: Connection, record: SessionRecord) -> None:
        self.first: list[Future] = []
        self._connection, self._record = connection, record

    @property
    def id(self) -> str:
        """The session's id, as commands and accounting show it."""
        return show(self._record.spec.id)

    @property
    def spec(self) -> SessionSpec:
        """What was requested: memory in MiB, backend, image, idle time in ns, and so on."""
        return self._record.spec

    @property
    def env(self) -> dict[str, str]:
        """The environment variables of all commands of this session."""
        return self._record.env

    @property
    def trajectory(self) -> str:
        """The trajectory whose tools run in this session; empty for none."""
        return self._record.trajectory

    @property
    def node(self) -> str:
        """The node that the session is on. Empty before its admission; after a move, the new
        node."""
        return self._record.node

    @property
    def image_digest(self) -> str:
        """The digest of the image that the session runs in. Empty before its admission, and for a
        session without an image or with a plain folder."""
        return self._record.image_digest

    @property
    def wait_s(self) -> float:
        """How long the session waited for its admission, in seconds; 0.0 before it."""
        return self._record.wait_s

    @property
    def why_ended(self) -> str:
        """One line that says why the session ended; empty while it has not."""
        return self._record.why_ended

    @property
    def opened(self) -> concurrent.futures.Future[None]:
        """A future that ends when the session is admitted. It raises InfeasibleRequest if the
        session can never be admitted, and SessionLost if it ended before."""
        return self._record.opened

    @property
    def closed(self) -> concurrent.futures.Future[str]:
        """A future of the reason for the session's end; it ends when the memory is free again."""
        return self._record.closed

    def submit(self, work: Work, *args: Any, **options: Any) -> Future:
        """Submits one action that runs inside this session; returns at once.

        Args:
            work: what runs, as for `Client.submit`.
            args: the arguments of a function.
            options: every other argument of `Client.submit`. Without `retries`, the action is not
                started again when its node fails, because the session's state is gone then.

        Returns:
            A Future, as for `Client.submit`. It raises SessionLost when the session has ended.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
        """
        return submit(self._connection, work, args, self._record, **options)

    def exec(self, command: Sequence[str] | str, **options: Any) -> Future:
        """Runs a command in this session; returns at once.

        Args:
            command: an argv list, or a line for the shell.
            options: `cwd`, `env`, `stdin`, `timeout`, `cpus` and every other argument of
                `Client.submit`. A relative `cwd` is below the session's directory.

        Returns:
            A Future of an ExecResult. A command that fails is a result, not an exception.

        Raises:
            InvalidInput: an argument is wrong; the message names it.

        Example:
            result = session.exec("make -j4 test", cpus=(1, 4), timeout=300).result().check()
        """
        return self.submit(command, **options)

    def write(self, path: str, data: bytes | str, mode: int = 0o644) -> Future:
        """Writes a file; missing parent folders are made. Returns at once.

        Args:
            path: the file, below the session's directory.
            data: the content; a str is written as UTF-8.
            mode: the file's permission bits.

        Returns:
            A Future that ends when the file is written. It raises ActionFailed when that failed.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
        """
        return self._file(pl.FileCall(path, raw_bytes(data, "data"), mode), "write")

    def read(self, path: str) -> Future:
        """Reads a file; returns at once.

        Args:
            path: the file, below the session's directory.

        Returns:
            A Future of bytes. It raises ActionFailed when the file could not be read.
        """
        return self._file(pl.FileCall(path), "read")

    def listing(self, path: str = "") -> Future:
        """Lists a folder and everything below it, or one file; returns at once.

        Args:
            path: the folder or file, below the session's directory; empty for that directory.

        Returns:
            A Future of a tuple of entries with `name`, `kind` ("file", "dir", "link" or "other"),
            `size` in bytes and `mode`. The sandbox chose the names: check one before you use it as
            a path of your own.
        """
        return self._file(pl.FileCall(path, op="list"), "list")

    def mkdir(self, path: str) -> Future:
        """Makes a folder and its missing parents, below the session's directory; returns at once.

        Returns:
            A Future that ends when the folder is there. It raises ActionFailed when that failed.
        """
        return self._file(pl.FileCall(path, op="mkdir"), "mkdir")

    def upload(self, local: str | os.PathLike[str], path: str = "") -> int:
        """Copies a local file, or everything in a local folder, into the session; blocks.

        Args:
            local: the file or folder on this machine.
            path: the target, below the session's directory. If it is empty or ends in "/", a file
                keeps its own name.

        Returns:
            The number of files.

        Raises:
            InvalidInput: something cannot be read, or is neither a file nor a folder.
            ActionFailed: the session could not write a file.
        """
        return upload(self, _local(local), _below(path))

    def download(self, path: str, local: str | os.PathLike[str], *, max_bytes: int = 1 << 30,
                 skip_others: bool = False) -> int:
        """Copies a file, or everything in a folder, out of the session; blocks. Nothing is written
        outside `local`, whatever names the sandbox lists.

        Args:
            path: the file or folder, below the session's directory.
            local: for a folder: the target folder; for a file: its new name, or a folder.
            max_bytes: the most bytes that are copied; more are refused.
            skip_others: whether to leave out links and everything else that is neither a file nor
                a folder, instead of refusing them.

        Returns:
            The number of files.

        Raises:
            InvalidInput: the sandbox lists a name that must not be written, or too much.
            ActionFailed: the session could not read a file.
        """
        return download(self, _below(path), _local(local), max_bytes, skip_others)

    def fork(self, *, env: Mapping[str, str] | None = None,
             files: Mapping[str, bytes | str] | None = None, trajectory: str | int = "",
             **overrides: Any) -> Session:
        """Opens a new session that begins with a copy of this session's files; returns at once.
        The files are copied after everything that was submitted to this session before has ended.

        Args:
            env: environment variables in addition to this session's.
            files: path -> content; written before anything else happens in the new session.
            trajectory: the trajectory whose tools run in the new session; empty for none.
            overrides: arguments of `Client.session` in which the new session differs from this one.

        Returns:
            The new session.

        Raises:
            InvalidInput: an argument is wrong; the message names it.

        Example:
            with session.fork(mem="2G") as branch:
                branch.exec("git apply attempt.patch && make test").result()
        """
        try:
            spec = session_spec(self.spec, **overrides)
        except TypeError as error:
            raise InvalidInput(f"fork: {error}") from None
        spec = msgspec.structs.replace(spec, origin=self.spec.id)
        return open_session(self._connection, spec, {**self.env, **environment(env)}, files,
                            trajectory)

    def renew(self) -> None:
        """Restarts the idle time of a session that was opened with `idle_s`; returns at once."""
        session = self.spec.id
        self._connection.send_of_session(session, ms.RenewSession(session))

    def close(self) -> None:
        """Ends the session; returns at once. What still runs in it is cancelled; `closed` ends when
        the memory is free. A second call does nothing."""
        session = self.spec.id
        self._connection.send_of_session(session, ms.ReleaseSession(session))

    def _file(self, call: pl.FileCall, what: str) -> Future:
        return self._connection.submit(Kind.FILE, Options(), self._record, what, call)

    def __reduce__(self) -> NoReturn:
        raise InvalidInput("a session cannot be sent to another process; call "
                           f"{self._connection.again} there for a client with sessions of its own")

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


def open_session(connection: Connection, spec: SessionSpec, env: Mapping[str, str] | None,
                 files: Mapping[str, bytes | str] | None, trajectory: str | int) -> Session:
    """Requests a session and submits the writing of its first files; returns at once.

    Args:
        connection: the connection of the client that owns the session.
        spec: what the session needs; its id is ignored.
        env, files, trajectory: as for `Client.session`.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
    """
    raw, env = raw_files(files), environment(env)
    session = Session(connection, connection.open_session(spec, env, tool_of(trajectory)))
    session.first = [session.write(path, data) for path, data in raw.items()]
    return session


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
