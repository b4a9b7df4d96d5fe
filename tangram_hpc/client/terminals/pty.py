"""`Pty`: a command that runs on a terminal of its own, to write to and to read from.

What is written waits here until the command's sandbox has given credit for it
(`protocol/input_flow.py`), so a program that does not read holds its writer back and nobody else.
The connection's thread brings output and credit; any thread may write and read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ...domain.action import Kind
from ...errors import InvalidInput
from ...interrupts import InterruptibleCondition
from ...protocol import input_flow
from ...protocol import payload as pl
from ..connection import Connection
from ..forked import watch_forks
from ..future import Future
from ..request import Cpus, Options, command_user, environment, exec_call, raw_bytes
from ..session_record import SessionRecord
from .shell import wrong_size


class Pty:
    """A command on a terminal; made by `Session.pty` and `Client.pty`.

    Attributes:
        future: ends with the command, with an ExecResult whose output is empty.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.future: Future
        self._changed = InterruptibleCondition(callers=connection._lock)
        self._credit = 0  # bytes that may be sent
        self._granted = 0  # bytes that might be sent in all since the command began
        self._unsent = bytearray()
        self._sent = 0  # bytes that were sent in all
        self._ends: deque[int] = deque()  # after how many bytes in all each end of input follows
        self._pieces: deque[bytes] = deque()  # output that nobody has read
        self._ended = False
        watch_forks(self)

    def disown(self) -> None:
        """Ends the copy in the child of a fork; see `forked`."""
        self._changed, self._ended = InterruptibleCondition(), True
        self._unsent.clear()
        self._ends.clear()
        self._pieces.clear()

    # ---- on the connection's thread ----

    def on_output(self, stream: int, data: bytes) -> None:
        """Keeps a piece of output; for the connection's thread."""
        with self._changed:
            self._pieces.append(data)
            self._changed.notify_all()

    def on_credit(self, total: int) -> None:
        """Sends what waits as far as the credit goes; for the connection's thread. The total may
        come twice, and one of several may be lost with the connection."""
        with self._changed:
            self._credit += max(0, total - self._granted)
            self._granted = max(total, self._granted)
            self._pump()
            self._changed.notify_all()

    def on_end(self, future: Any) -> None:
        """Notes the command's end; for the connection's thread."""
        with self._changed:
            self._ended = True
            self._unsent.clear()
            self._ends.clear()
            self._changed.notify_all()

    def _pump(self) -> None:
        while self._credit and (self._unsent or self._ends):
            before = self._ends[0] - self._sent if self._ends else len(self._unsent)
            if not before:
                self._ends.popleft()
                self._connection.send_input(self.future.action, input_flow.HANGUP)
                continue
            piece = bytes(self._unsent[:min(self._credit, input_flow.PIECE_MAX, before)])
            del self._unsent[:len(piece)]
            self._credit -= len(piece)
            self._sent += len(piece)
            self._connection.send_input(self.future.action, input_flow.DATA, data=piece)

    # ---- for the user ----

    def write(self, data: bytes | str, timeout: float | None = None) -> None:
        """Writes input. Blocks while more than 64 KiB wait for the program to read them.

        Args:
            data: the input; a str is written as UTF-8.
            timeout: the longest wait in seconds; None for no limit. The input is sent later even
                if the wait was too short.

        Raises:
            TimeoutError: the program has not read enough in time.
            InvalidInput: `data` is neither bytes nor str, or the command has ended.
        """
        raw = raw_bytes(data, "data")
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            if self._ended:
                raise InvalidInput("write: the command has ended; see its `future`")
            self._unsent += raw
            self._pump()
            while len(self._unsent) > input_flow.WINDOW and not self._ended:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"{len(self._unsent)} bytes wait for the program to read")
                self._changed.wait(left)

    def read(self, timeout: float | None = None) -> bytes:
        """Returns the output that has come since the last call; waits for some if there is none.

        Args:
            timeout: the longest wait in seconds; None for no limit.

        Returns:
            The output; b"" when the command has ended and all output has been read.

        Raises:
            TimeoutError: no output came in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._pieces or self._ended, timeout):
                raise TimeoutError(f"no output within {timeout} s")
            data = b"".join(self._pieces)
            self._pieces.clear()
            return data

    def __iter__(self) -> Iterator[bytes]:
        """Yields the output as it comes, until the command's end."""
        while data := self.read():
            yield data

    def resize(self, rows: int, cols: int) -> None:
        """Changes the terminal's size; its foreground processes get SIGWINCH.

        Raises:
            InvalidInput: the size is out of bounds.
        """
        if why := wrong_size(rows, cols):
            raise InvalidInput(why)
        self._connection.send_input(self.future.action, input_flow.RESIZE, rows, cols)

    def interrupt(self) -> bool:
        """Sends SIGINT to the terminal's foreground processes; False if the command has ended."""
        return self.future.interrupt()

    def hang_up(self) -> None:
        """Ends the input, as ^D at the beginning of a line does, behind all that was written. What
        is written afterwards is for the next program that reads the terminal."""
        with self._changed:
            if not self._ended:
                self._ends.append(self._sent + len(self._unsent))
                self._pump()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the command's end and returns its exit status.

        Args:
            timeout: the longest wait in seconds; None for no limit.

        Raises:
            TimeoutError: it has not ended in time.
            ActionFailed: it has no exit status; a subclass says why.
        """
        return int(self.future.result(timeout).exit_code)

    def close(self) -> None:
        """Ends the command, if it runs; returns at once."""
        self.future.cancel()

    def __reduce__(self) -> NoReturn:
        raise InvalidInput("a terminal cannot be sent to another process")

    def __enter__(self) -> Pty:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_pty(connection: Connection, session: SessionRecord | None,
             command: Sequence[str] | str, *, rows: int = 24, cols: int = 80, echo: bool = False,
             cwd: str = "", env: Mapping[str, str] | None = None, clean_env: bool = True,
             cpus: Cpus = 1, mem: int | str = 0, gpus: int = 0, timeout: float | None = None,
             name: str = "", component: str = "", trusted: bool = False,
             user: str | int = "") -> Pty:
    """Submits a command that runs on a terminal; see `Session.pty` and `Client.pty`."""
    if why := wrong_size(rows, cols):
        raise InvalidInput(why)
    user = command_user(user, None if session is None else session.spec)
    own = environment(env)
    if session is not None:
        own = {**session.env, **own}
    call, what = exec_call(command, cwd=cwd, env=own, stream=True, clean_env=clean_env,
                           user=user)
    pty = Pty(connection)
    options = Options(cpus, mem, gpus, timeout, name, 0, component=component, trusted=trusted,
                      trajectory=session.trajectory if session is not None else "")
    with pty._changed:  # until `future` is set, credit and output wait
        pty.future = connection.submit(
            Kind.EXEC, options, session, what, pl.TerminalCall(call, (rows, cols), bool(echo)),
            on_output=pty.on_output, on_credit=pty.on_credit)
    pty.future.add_done_callback(pty.on_end)
    return pty
