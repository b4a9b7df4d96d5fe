"""Owns: processes that wait for work, by what they were built as, and how many are being built at
once. Must not do any I/O: processes are asked for through the call that it was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .execution_processes import ExecutionProcess
from .node_attempts import NodeAttempt

Fork = Callable[[], ExecutionProcess]


class StartLimiter:
    """At most `limit` processes are being built at a time; the others wait their turn, in order."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._building: set[int] = set()
        self._waiting: deque[Callable[[], ExecutionProcess | None]] = deque()

    def ask(self, begin: Callable[[], ExecutionProcess | None]) -> None:
        """Begins one, at once or later; `begin` gives None when it is not wanted any more."""
        self._waiting.append(begin)
        self._more()

    def over(self, process: ExecutionProcess) -> None:
        """A process stands, or never will."""
        if process.number in self._building:
            self._building.discard(process.number)
            self._more()

    def _more(self) -> None:
        while self._waiting and len(self._building) < self._limit:
            process = self._waiting.popleft()()
            if process is not None:
                self._building.add(process.number)


class Pool:
    """Processes of one kind and box that serve one action at a time; grows to `limit` as they are
    needed.

    Attributes:
        warm: how many it wants to have before they are asked for.
        free: those that wait for an action, or for a session to take them away.
        waiting: actions that wait for one.
    """

    def __init__(self, fork: Fork, limiter: StartLimiter, limit: int, warm: int) -> None:
        self._fork = fork
        self._limiter = limiter
        self._limit = limit
        self.warm = warm
        self._asked = 0
        self._booting: set[int] = set()
        self._size = 0
        self.free: list[ExecutionProcess] = []
        self.waiting: deque[NodeAttempt] = deque()

    def warm_up(self) -> None:
        """Asks for what is missing: one for each attempt that waits, and the warm ones."""
        want = len(self.waiting)
        if self._size < self.warm:
            want = max(want, self.warm - self._size)
        coming = self._asked + len(self._booting)
        for _ in range(min(want, self._limit - self._size) - coming):
            self._asked += 1
            self._limiter.ask(self._begin)

    def _begin(self) -> ExecutionProcess:
        self._asked -= 1
        process = self._fork()
        self._booting.add(process.number)
        return process

    def booted(self, process: ExecutionProcess) -> None:
        """A process of it lives."""
        self._booting.discard(process.number)
        self._size += 1

    def lost(self, process: ExecutionProcess) -> bool:
        """A process of it ended, or never came up; returns whether there is none at all now."""
        if process.number in self._booting:
            self._booting.discard(process.number)
        else:
            self._size -= 1
        if process in self.free:
            self.free.remove(process)
        return not self._booting and not self._size and not self._asked

    def cool(self) -> list[ExecutionProcess]:
        """Wants no warm ones any more; returns those that wait, for its owner to end."""
        self.warm = 0
        idle, self.free = self.free, []
        return idle

    def give_away(self) -> ExecutionProcess | None:
        """Takes an idle process out of the pool for good."""
        if not self.free:
            return None
        self._size -= 1
        return self.free.pop()
