"""Pools of execution processes that wait for work, and a limit on how many are built at once.

A process takes milliseconds to build and a sandbox with mounts more, so some are built before they
are needed. This module does no I/O: it asks for a process through a call that it is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .execution_processes import ExecutionProcess
from .node_attempts import NodeAttempt

ForkFunction = Callable[[], ExecutionProcess]


class StartLimiter:
    """Lets at most `limit` execution processes be built at a time; further ones wait in order."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._building: set[int] = set()
        self._waiting: deque[Callable[[], ExecutionProcess | None]] = deque()

    def ask(self, begin: Callable[[], ExecutionProcess | None]) -> None:
        """Begins one now or later. `begin` returns None when its process is not wanted any more."""
        self._waiting.append(begin)
        self._more()

    def over(self, process: ExecutionProcess) -> None:
        """Notes that a process is ready, or has failed."""
        if process.number in self._building:
            self._building.discard(process.number)
            self._more()

    def _more(self) -> None:
        while self._waiting and len(self._building) < self._limit:
            process = self._waiting.popleft()()
            if process is not None:
                self._building.add(process.number)


class Pool:
    """Execution processes of one kind and box that serve one action at a time.

    Attributes:
        warm: how many processes to have before they are needed.
        cooled: whether `cool` gave up its warm processes since `warm` was last set.
        free: processes that wait for an action, or for a session to take them.
        waiting: attempts that wait for a process.

    Args:
        fork: forks one process for this pool.
        limiter: limits how many are built at a time.
        limit: the most processes that the pool may have.
        warm: see above.
    """

    def __init__(self, fork: ForkFunction, limiter: StartLimiter, limit: int, warm: int) -> None:
        self._fork = fork
        self._limiter = limiter
        self._limit = limit
        self.warm = warm
        self.cooled = False
        self._asked = 0
        self._booting: set[int] = set()
        self._size = 0
        self.free: list[ExecutionProcess] = []
        self.waiting: deque[NodeAttempt] = deque()

    def warm_up(self) -> None:
        """Asks for the processes that are missing: one for each waiting attempt, and the warm ones.
        """
        want = len(self.waiting)
        if self._size < self.warm:
            want = max(want, self.warm - self._size)
        coming = self._asked + len(self._booting)
        for _ in range(min(want, self._limit - self._size) - coming):
            self._asked += 1
            self._limiter.ask(self._begin)

    def heat(self, warm: int) -> None:
        """Sets how many processes the pool has before they are needed."""
        self.warm, self.cooled = warm, False

    def _begin(self) -> ExecutionProcess | None:
        self._asked -= 1
        if self.cooled and not self.waiting:
            return None
        process = self._fork()
        self._booting.add(process.number)
        return process

    def booted(self, process: ExecutionProcess) -> None:
        """Notes that a process of this pool is ready."""
        self._booting.discard(process.number)
        self._size += 1

    def lost(self, process: ExecutionProcess) -> bool:
        """Notes that a process of this pool ended or failed to start; returns whether the pool has
        none at all now.
        """
        if process.number in self._booting:
            self._booting.discard(process.number)
        else:
            self._size -= 1
        if process in self.free:
            self.free.remove(process)
        return not self._booting and not self._size and not self._asked

    def cool(self) -> list[ExecutionProcess]:
        """Gives up warm processes; returns those that wait, for the caller to end. The caller also
        ends each later one for which nothing waits.
        """
        self.warm, self.cooled = 0, True
        idle, self.free = self.free, []
        return idle

    def give_away(self) -> ExecutionProcess | None:
        """Takes a free process out of the pool for good; None when none is free."""
        if not self.free:
            return None
        self._size -= 1
        return self.free.pop()
