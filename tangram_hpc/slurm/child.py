"""A helper program that answers JSON lines, as a child with a deadline.

Law: one order at a time; a child that is late, or says what is no answer, is killed and started
anew for the next order. Knows nothing of what is asked.
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
_TAIL = 4096  # bytes of its standard error that are kept


class ChildLate(Exception):
    """No answer within the deadline; it was killed and may have carried the order out."""


class ChildGone(Exception):
    """It ended by itself, or cannot be started; its text is the last line that it said."""


class Child:
    """One program, started when it is first asked.

    Args:
        argv, env: how it is started; it first writes one line by itself, its greeting.
        deadline_s: for each answer, the greeting included.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], deadline_s: float) -> None:
        self._argv, self._env, self.deadline_s = tuple(argv), dict(env), deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self._heard = b""  # the end of its standard error
        self._listener: asyncio.Task[None] | None = None
        self.greeting: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """Its process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    async def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer to one order.

        Raises:
            ChildLate, ChildGone: there is none; the next call starts it anew.
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
        """Ends it at once; returns when nothing of it is left."""
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
            told = json.loads(line)
        except ValueError:
            raise ChildGone(f"said what is no answer: {line[:80]!r}") from None
        if not isinstance(told, dict):
            raise ChildGone(f"said what is no answer: {line[:80]!r}")
        return told

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
