"""`Shell`: a shell of a session that lives on between its commands, as its user holds it.

Each command is one action. It waits for cores, is lent them, timed, accounted and cancelled like
any other action of the session, and the session runs one action at a time. Between its commands the
shell is stopped, as background processes are.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from ...domain.action import Kind
from ...errors import ActionFailed, InvalidInput, TangramError
from ...protocol import input_flow
from ...protocol import payload as pl
from ..command_names import name_of
from ..connection import Connection
from ..future import Future
from ..request import (
    Cpus,
    Options,
    command_user,
    environment,
    folder_text,
    kept_output,
    raw_bytes,
    tool_of,
)
from ..session_record import SessionRecord

# The end of `with` waits at most for so long for that of the shell itself: the session often ends
# at once after it, and the accounting would show the shell's end as cancelled.
_CLOSING_S = 1.0


class Shell:
    """A shell in a session; made by `Session.shell`. All methods may be called from any thread.

    A command that ends the shell (`exit 3`, `exec`, a signal) has the shell's exit status as its
    own. Commands after it raise ShellEnded, unless the shell was opened with `restart`.

    Args:
        connection, session: of the session that it lives in.
        cwd: the directory in which it begins, as for `Session.exec`.
        env: variables that it begins with, besides those of the session.
        program: "bash", "sh", or a path of one of them; empty for bash, or sh where there is none.
        pty: whether its commands run on a terminal of `rows` rows and `cols` columns. stdout and
            stderr are then one stream, and commands read the terminal where they have no `stdin`.
        echo: whether the terminal echoes what is written to it.
        restart: whether a command that finds that the shell has ended begins in a new one.
        user: the user that it begins as, a name or a number, as for `Session.exec`; empty for the
            session's.

    Attributes:
        opened: a Future that ends when the shell is there. Its result fails if it cannot be.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
    """

    def __init__(self, connection: Connection, session: SessionRecord, *, cwd: str = "",
                 env: Mapping[str, str] | None = None, program: str = "", pty: bool = False,
                 rows: int = 24, cols: int = 80, echo: bool = False,
                 restart: bool = False, user: str | int = "") -> None:
        size = (rows, cols) if pty else (0, 0)
        if pty and (why := wrong_size(rows, cols)):
            raise InvalidInput(why)
        self._connection, self._session = connection, session
        self._restart, self._closed = restart, False
        self._closing: Future | None = None
        # in order; those that have ended leave at the left
        self._futures: deque[Future] = deque()
        self._begin = pl.ShellCall(
            "open", connection.new_id(), start=True, program=str(program), cwd=folder_text(cwd),
            env={**session.env, **environment(env)}, size=size, echo=bool(echo),
            user=command_user(user, session.spec))
        self.opened = self._submit(self._begin, Options(), "shell", None)

    def run(self, command: str, *, stdin: bytes | str = b"", timeout: float | None = None,
            cpus: Cpus = 1, mem: int | str = 0, gpus: int = 0, name: str = "",
            resizable: bool = True, once: str = "", trajectory: str | int | None = None,
            on_output: Callable[[int, bytes], None] | None = None, output_max: int = 0,
            keep: str = "head") -> Future:
        """Runs a command in the shell after those before it; returns at once.

        Args:
            command: text of any length for the shell, such as several lines.
            stdin: what the command reads; without it, nothing (or the terminal).
            timeout: the longest run time in seconds. Then the command gets SIGINT, after the
                `kill_wait_s` of the settings all processes of the session but its shells get
                SIGKILL, and after as long again so does the shell. None for no limit.
            cpus, mem, gpus, name, resizable, once, trajectory, on_output, output_max, keep: as for
                `Client.submit`.

        Returns:
            A Future of an ExecResult, as of `Session.exec`. What background jobs have written since
            the command before is at the beginning of the output. It raises ShellEnded if the shell
            is not there, and SessionLost if the session has ended.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
        """
        if not isinstance(command, str):
            raise InvalidInput(f"command: {command!r:.60} is not a text for the shell")
        if "\0" in command:
            raise InvalidInput("command: it has a null byte, which no shell can read")
        if on_output is not None and not callable(on_output):
            raise InvalidInput(f"on_output: {on_output!r:.60} is not a function of (stream, bytes)")
        whose = self._session.trajectory if trajectory is None else tool_of(trajectory)
        options = Options(cpus, mem, gpus, timeout, name, None, resizable, once=once,
                          trajectory=whose)
        # how a shell begins is told only where a command may have to begin one
        begin = self._begin if self._restart else pl.ShellCall("run", self._begin.shell)
        call = msgspec.structs.replace(begin, op="run", text=command, stream=on_output is not None,
                                       stdin=raw_bytes(stdin, "stdin"), keep=keep,
                                       output_max=kept_output(output_max, keep,
                                                              on_output is not None))
        return self._submit(call, options, name_of(command, ()) or "shell", on_output)

    def _submit(self, call: pl.ShellCall, options: Options, what: str,
                on_output: Callable[[int, bytes], None] | None) -> Future:
        if self._closed:
            raise InvalidInput("shell: it was closed; open another one with Session.shell")
        future = self._connection.submit(Kind.EXEC, options, self._session, what, call,
                                         on_output=on_output)
        self._forget_ended()
        self._futures.append(future)
        return future

    def _forget_ended(self) -> None:
        while self._futures and self._futures[0].done():
            self._futures.popleft()

    def interrupt(self) -> bool:
        """Sends SIGINT to the command that runs in the foreground; returns at once. Its exit status
        is then 130, unless it takes the signal otherwise, and the shell goes on. A command that
        still waits for cores gets it when it starts.

        Returns:
            False if no command of this shell runs or waits.
        """
        self._forget_ended()
        return bool(self._futures) and self._futures[0].interrupt()

    def write(self, data: bytes | str) -> None:
        """Raises InvalidInput always: a command of a shell reads only its `stdin`. Use
        `Session.pty` for a program that takes input while it runs."""
        raise InvalidInput("write: a shell takes no input while a command runs; give the command "
                           "its stdin=, or run the program by Session.pty")

    def resize(self, rows: int, cols: int) -> None:
        """Changes the size of the terminal while a command runs; its processes get SIGWINCH.

        Raises:
            InvalidInput: the shell has no terminal, or the size is out of bounds.
        """
        if self._begin.size == (0, 0):
            raise InvalidInput("resize: this shell has no terminal; open one with pty=True")
        if why := wrong_size(rows, cols):
            raise InvalidInput(why)
        self._forget_ended()
        if self._futures:
            self._connection.send_input(self._futures[0].action, input_flow.RESIZE, rows, cols)

    def close(self) -> None:
        """Ends the shell with its background jobs, and cancels its commands that have not ended;
        returns at once. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for future in self._futures:
            future.cancel()
        self._futures.clear()
        try:
            self._closing = self._connection.submit(
                Kind.FILE, Options(), self._session, "shell close",
                pl.ShellCall("close", self._begin.shell))
        except TangramError:
            pass  # the client or the session has ended, and so has the shell

    def _check(self, opened: Any) -> None:
        if not opened.ok:
            self.close()
            raise ActionFailed(f"shell: it cannot be opened: {opened.reason or opened.exit_code}",
                               opened)

    def __reduce__(self) -> NoReturn:
        raise InvalidInput("a shell cannot be sent to another process")

    def __enter__(self) -> Shell:
        try:
            self._check(self.opened.result())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close()
        if kind is None and self._closing is not None:  # see _CLOSING_S
            concurrent.futures.wait([self._closing], _CLOSING_S)

    async def __aenter__(self) -> Shell:
        try:
            self._check(await self.opened)
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close()
        if kind is None and self._closing is not None:
            closing = asyncio.wrap_future(self._closing)
            # asyncio logs an error that nobody has looked at, also where this wait ends before it
            closing.add_done_callback(lambda each: each.cancelled() or each.exception())
            await asyncio.wait([closing], timeout=_CLOSING_S)


def wrong_size(rows: object, cols: object) -> str:
    """What is wrong with the size of a terminal, as a line; empty if nothing is."""
    if type(rows) is not int or type(cols) is not int:
        return f"rows, cols: {rows!r}, {cols!r} are not whole numbers"
    return input_flow.wrong_size((rows, cols))
