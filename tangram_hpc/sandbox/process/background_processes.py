"""Owns: what a session's processes that outlived their action may do until its next one. Must not
touch them while an action runs.

"stop": nothing, at no cost. "share": a twentieth of the time, in turns of SHARE_NS; what they may
use then is the cores of the session's last action.
"""

from __future__ import annotations

import time

from .sandbox_processes import SandboxProcesses

SHARE_NS = 10_000_000
_TURN_NS = 20 * SHARE_NS


class BackgroundProcesses:
    """Those of one sandbox. To be ticked when it is `due` (monotonic ns, 0: never)."""

    def __init__(self, processes: SandboxProcesses) -> None:
        self._processes = processes
        self.there = False
        self.due = 0
        self._running = False

    def begin(self, how: str) -> None:
        """An action ended and left some."""
        self._processes.stop()
        self.there, self._running = True, False
        self.due = time.monotonic_ns() + _TURN_NS if how == "share" else 0

    def wake(self) -> None:
        """An action begins: they go on with it."""
        if self.there:
            self._processes.go_on()
        self.there, self.due = False, 0

    def freeze(self) -> None:
        """No more turns until then."""
        if self._running:
            self._processes.stop()
        self._running, self.due = False, 0

    def tick(self) -> None:
        """Gives or ends a turn when it is due."""
        if not self.due or (now := time.monotonic_ns()) < self.due:
            return
        if self._processes.alone():
            self.there, self.due = False, 0
        elif self._running:
            self._processes.stop()
            self._running, self.due = False, now + _TURN_NS - SHARE_NS
        else:
            self._processes.go_on()
            self._running, self.due = True, now + SHARE_NS
