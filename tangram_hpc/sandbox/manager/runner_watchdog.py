"""Notices runners that take long for one call while other calls wait behind it.

The calls that wait could run elsewhere. This module only notices such a runner; the executor gives
its waiting calls back. Before that the runner is read, because a runner tells of results that it
had within a millisecond at once, and of none while it is at a call: the long call may be the next
one, for whose end the results would wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...ports import GIVE_BACK_S
from .execution_processes import ExecutionProcess


class RunnerWatchdog:
    """Calls `free` with each watched runner that is at the same call for GIVE_BACK_S or longer.
    Results that it has not told of are read within twice this time."""

    def __init__(self, free: Callable[[ExecutionProcess], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._free = free
        # by number: the runner, and the lease that it was at when it was last looked at
        self._at: dict[int, tuple[ExecutionProcess, int]] = {}

    def watch(self, process: ExecutionProcess) -> None:
        """Watches a runner, in which calls wait from now on, until none waits any more."""
        if not self._at:
            self._loop.call_later(GIVE_BACK_S, self._tick)
        self._at.setdefault(process.number, (process, 0))

    def _tick(self) -> None:
        for process, was in list(self._at.values()):
            if next(iter(process.leases), 0) == was:
                process.read()  # the call may have ended: the runner may be at the next one
        watched, self._at = self._at, {}
        for number, (process, was) in watched.items():
            first = next(iter(process.leases), 0)
            if first and first == was:
                self._free(process)
            if len(process.leases) > 1:
                self._at[number] = process, first
        if self._at:
            self._loop.call_later(GIVE_BACK_S, self._tick)
