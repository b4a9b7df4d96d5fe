"""One command or terminal of a sandbox: its state, and the listeners that follow its events.

Listeners get the events of E2B's `process.ProcessEvent` in order. A listener that does not read is
dropped when `BACKLOG_MAX` bytes wait for it, so that it holds up nobody else.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ... import Future
from .started_command import Started
from .wire_errors import RpcError

BACKLOG_MAX = 64 << 20  # bytes of output that may wait for one listener
WireEvent = dict[str, Any]


@dataclass(frozen=True)
class CommandConfig:
    """The command that a client asked to run; the fields are those of `process.ProcessConfig`.

    Attributes:
        cmd: the program.
        args: its arguments.
        envs: environment variables besides the sandbox's.
        cwd: its directory, as the client named it; empty for the session's.
        tag: a name that the client gave it; empty for none.
        user: the user that the client asked for; empty for the sandbox's.
        listed: whether clients see it among the commands that run.
    """

    cmd: str
    args: tuple[str, ...] = ()
    envs: dict[str, str] = field(default_factory=dict)
    cwd: str = ""
    tag: str = ""
    user: str = ""
    listed: bool = True

    @property
    def directory(self) -> str:
        """Its directory, from the session's, at which `~` begins, too."""
        return self.cwd[1:].lstrip("/") if f"{self.cwd}/".startswith("~/") else self.cwd

    def told(self) -> WireEvent:
        """Returns the configuration as the wire writes it."""
        known: WireEvent = {"cmd": self.cmd, "args": list(self.args), "envs": self.envs}
        return {**known, "cwd": self.cwd} if self.cwd else known


class EventListener:
    """One stream of a client that follows a process."""

    def __init__(self) -> None:
        self._events: deque[WireEvent | RpcError | None] = deque()
        self._bytes, self._over = 0, False
        self._changed = asyncio.Event()

    def put(self, event: WireEvent | RpcError | None, size: int = 0) -> None:
        """Adds an event; None or an error ends the stream."""
        if self._over:
            return
        self._bytes += size
        if self._bytes > BACKLOG_MAX:
            event = RpcError("resource_exhausted", f"more than {BACKLOG_MAX >> 20} MiB of output "
                                                   "wait for this stream; connect again")
        self._over = event is None or isinstance(event, RpcError)
        self._events.append(event)
        self._changed.set()

    @property
    def has_events(self) -> bool:
        """Whether `get` returns at once."""
        return bool(self._events)

    async def get(self) -> WireEvent | None:
        """Returns the next event; None at the end of a process that has ended.

        Raises:
            RpcError: the stream has failed.
        """
        while not self._events:
            self._changed.clear()
            await self._changed.wait()
        event = self._events.popleft()
        if isinstance(event, RpcError):
            raise event
        data = (event or {}).get("data")
        self._bytes -= sum(map(len, data.values())) if data else 0
        return event


class SandboxProcess:
    """A command or a terminal that runs in a sandbox; made by `Processes`.

    Attributes:
        config: the command.
        pid: its number on the wire; 0 before it has started.
        started: the content of its first line; None for a terminal, and before the start.
        reads_input: whether it reads what clients send.
        future: the action in which it runs, or in which it began.
        detached: whether it goes on as a background process.
        taken: how many bytes of stdout and stderr were passed on to listeners.
        ready: set when it has started, or could not be started.
        left: set when its action has ended.
        failure: the error by which it could not be started or was lost; None otherwise.
        ended: whether it has ended.
        timer: ends it when its time is over; None without a limit. It is cancelled at the end,
            because it keeps the command in memory.
    """

    def __init__(self, config: CommandConfig, reads_input: bool) -> None:
        self.config, self.reads_input = config, reads_input
        self.pid, self.detached = 0, False
        self.started: Started | None = None
        self.future: Future
        self.taken = [0, 0]
        self.ready, self.left = asyncio.Event(), asyncio.Event()
        self.failure: RpcError | None = None
        self.ended = False
        self.timer: asyncio.TimerHandle | None = None
        self._listeners: list[EventListener] = []

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def listen(self) -> EventListener:
        """Adds a listener for everything that follows."""
        listener = EventListener()
        self._listeners.append(listener)
        return listener

    def unlisten(self, listener: EventListener) -> None:
        """Removes a listener."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def output(self, name: str, data: bytes) -> None:
        """Passes output on; `name` is `stdout`, `stderr` or `pty`."""
        if data and self._listeners:
            text = base64.b64encode(data).decode()
            self._tell({"data": {name: text}}, len(text))

    def end(self, code: int, error: str = "") -> None:
        """Tells the listeners that the command has ended.

        Args:
            code: its exit code.
            error: one line that says why it ended with this code; if empty, a line is made from the
                code.
        """
        if self.ended:
            return
        self.ended = True
        status = f"exit status {code}" if code <= 128 else f"signal: {code - 128}"
        told: WireEvent = {"exitCode": code, "exited": code <= 128, "status": status}
        if code:
            told["error"] = error or status
        self._tell({"end": told})
        self._tell(None)
        self._over()

    def fail(self, error: RpcError) -> None:
        """Ends all streams with an error; if the command has not started yet, `Processes.start`
        raises it."""
        if self.ended:
            return
        self.ended, self.failure = True, error
        self._tell(error)
        self._over()

    def _over(self) -> None:
        self._listeners.clear()
        if self.timer is not None:
            self.timer.cancel()
        self.ready.set()
        self.left.set()

    def _tell(self, event: WireEvent | RpcError | None, size: int = 0) -> None:
        for listener in list(self._listeners):
            listener.put(event, size)
