"""A terminal of the E2B wire: a command of the session that runs on a pty, as one action."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable

from ... import Future, InvalidInput, Session
from .running_command import CommandConfig, SandboxProcess
from .wire_errors import RpcError

# ids on the wire, above all process ids of Linux, for what has no process id that is known: the
# commands of terminals, and programs that could not be started
numbers = itertools.count(1 << 22)
WRITE_S = 10.0  # the longest wait for a program to read its input


class SandboxTerminal(SandboxProcess):
    """A command on a terminal, as a process of the wire.

    Args:
        session: the sandbox's session.
        config: the command.
        user: the user as which it runs; empty for the session's.
        size: rows and columns.
        cpus: the fewest and the most CPUs.
        timeout_s: its longest run time; None for no limit.

    Raises:
        InvalidInput: an argument is wrong; the message names it.
    """

    def __init__(self, session: Session, config: CommandConfig, user: str, size: tuple[int, int],
                 cpus: tuple[int, int], timeout_s: float | None) -> None:
        super().__init__(config, True)
        self.pid = next(numbers)
        self._loop = asyncio.get_running_loop()
        self._pty = session.pty([config.cmd, *config.args], rows=size[0], cols=size[1], echo=True,
                                cwd=config.directory, env=config.envs, cpus=cpus, timeout=timeout_s,
                                name="terminal", user=user)
        self.future = self._pty.future
        self.ready.set()
        self._reader = threading.Thread(target=self._read, daemon=True, name="e2b-terminal")
        self._reader.start()

    def _read(self) -> None:
        for data in self._pty:
            self._loop.call_soon_threadsafe(self.output, "pty", data)

    async def read_to_its_end(self) -> None:
        """Returns when its action has ended and all of its output was passed on."""
        await asyncio.to_thread(self._reader.join)

    def over(self, then: Callable[[SandboxTerminal, Future], None], future: Future) -> None:
        """Calls `then` after all output of the action, which has ended, was passed on."""
        async def wait() -> None:
            await self.read_to_its_end()
            then(self, future)

        self._waiting = asyncio.ensure_future(wait())

    async def write(self, data: bytes) -> None:
        """Sends input to the command.

        Raises:
            RpcError: the command has ended, or does not read its input in time.
        """
        try:
            await asyncio.to_thread(self._pty.write, data, WRITE_S)
        except TimeoutError as error:
            raise RpcError("deadline_exceeded", str(error)) from None
        except InvalidInput as error:
            raise RpcError("failed_precondition", str(error)) from None

    def resize(self, rows: int, cols: int) -> None:
        """Changes the size of the terminal.

        Raises:
            RpcError: the size is out of bounds.
        """
        try:
            self._pty.resize(rows, cols)
        except InvalidInput as error:
            raise RpcError("invalid_argument", str(error)) from None

    def hang_up(self) -> None:
        """Ends the input of the command."""
        self._pty.hang_up()

    def close(self) -> None:
        """Ends the command and its terminal."""
        self._pty.close()
