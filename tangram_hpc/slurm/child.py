"""A helper program that answers orders in JSON lines, run as a child process with a deadline.

One order is under way at a time. A child that does not answer within the deadline, or answers with
something other than a JSON object, is killed; the next order starts a new one. This module knows
nothing of what the orders mean.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_LINE_MAX = 1 << 26  # bytes of one answer
_TAIL = 4096  # bytes of the child's standard error that are kept


class ChildLate(Exception):
    """Raised when the child did not answer in time and was killed.

    The child may have carried the order out.
    """


class ChildGone(Exception):
    """Raised when the child ended by itself, or cannot be started.

    The text is the last line of the child's standard error, where there is one.
    """


class Child:
    """One program, which is started by the first order.

    Args:
        argv: the command. The program first writes one line by itself, its greeting.
        env: the program's whole environment.
        deadline_s: how long each answer may take, seconds; the greeting counts as an answer.

    Attributes:
        greeting: the program's first line; empty while none was read.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], deadline_s: float) -> None:
        self._argv, self._env, self.deadline_s = tuple(argv), dict(env), deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self._heard = b""  # the last bytes of the child's standard error
        self._listener: asyncio.Task[None] | None = None
        self.greeting: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """The child's process id; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    async def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Sends one order and returns the answer; starts the program if it does not run.

        Raises:
            ChildLate: no answer within the deadline.
            ChildGone: the program ended, cannot be started, or its answer is no JSON object.
        """
        answered = False
        try:
            if self._process is None:
                await self._start()
                self.greeting = await self._line()
            assert self._process is not None and self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            answer = await self._line()
            answered = True
            return answer
        except asyncio.TimeoutError:
            raise ChildLate(f"no answer in {self.deadline_s:g} s") from None
        finally:
            if not answered:
                await self.kill()

    async def kill(self) -> None:
        """Kills the program and its process group; returns when it has been reaped."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None

    async def _start(self) -> None:
        self._heard, self.greeting = b"", {}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, env=self._env, start_new_session=True, limit=_LINE_MAX,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE)
        except OSError as error:
            raise ChildGone(f"{self._argv[0]}: {error.strerror}") from None
        assert self._process.stderr is not None
        self._listener = asyncio.get_running_loop().create_task(
            self._listen(self._process.stderr))

    async def _line(self) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), self.deadline_s)
        except ValueError:
            raise ChildGone(f"an answer of more than {_LINE_MAX} bytes") from None
        if not line.endswith(b"\n"):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), 1.0)
            raise ChildGone(await self._last_words(process))
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ChildGone(f"answered with something other than a JSON object: {line[:80]!r}")
        return answer

    async def _last_words(self, process: asyncio.subprocess.Process) -> str:
        if self._listener is not None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._listener), 1.0)
        lines = self._heard.decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last or f"it ended with status {process.returncode}"

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(_TAIL):
            self._heard = (self._heard + piece)[-_TAIL:]
