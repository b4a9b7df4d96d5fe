"""What a session's processes that outlived their action may do until its next action.

With "stop" they are stopped and cost nothing. With "share" they run for a twentieth of the time,
SHARE_NS out of every 20 SHARE_NS, on the cores of the session's last action. While an action runs
they run too and are not touched.
"""

from __future__ import annotations

import time

from .sandbox_processes import SandboxProcesses

SHARE_NS = 10_000_000
_TURN_NS = 20 * SHARE_NS


class BackgroundProcesses:
    """The background processes of one sandbox. Call `tick` at `due`.

    Attributes:
        there: whether there are any.
        due: when `tick` must be called (monotonic ns); 0 for never.
    """

    def __init__(self, processes: SandboxProcesses) -> None:
        self._processes = processes
        self.there = False
        self.due = 0
        self._running = False

    def begin(self, how: str) -> None:
        """Stops the processes that an action left behind; `how` is "stop" or "share"."""
        self._processes.stop()
        self.there, self._running = True, False
        self.due = time.monotonic_ns() + _TURN_NS if how == "share" else 0

    def wake(self) -> None:
        """Continues the processes, as an action begins."""
        if self.there:
            self._processes.go_on()
        self.there, self.due = False, 0

    def freeze(self) -> None:
        """Stops the processes until the next action, also those that have a share."""
        if self._running:
            self._processes.stop()
        self._running, self.due = False, 0

    def tick(self) -> None:
        """Begins or ends a turn of theirs when it is due."""
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
