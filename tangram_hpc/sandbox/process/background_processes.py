"""What a session's processes that outlived their action may do until its next action, and where
their output goes.

With "stop" they are stopped and cost nothing. With "share" they run for a twentieth of the time,
SHARE_NS out of every 20 SHARE_NS, on the cores of the session's last action. With "run" they get
CPUs of their own while one of them can run (`leased_background`). While an action runs they run too
and are not touched.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable

from ...domain.states import ActionState
from ...protocol.process_frames import KillCommand
from ..shells.shells import SparingProcesses
from .leased_background import LeasedBackground, Unstoppable

SHARE_NS = 10_000_000
_END_NS = 1_000_000_000  # for the end of what an action left, before the next one begins
_LOOK_S = 0.001  # between two looks whether it has ended
_TURN_NS = 20 * SHARE_NS
_PIECE = 1 << 16


class BackgroundProcesses:
    """The background processes of one sandbox. Call `tick` at `due`.

    Attributes:
        leased: the background processes if the session has `background="run"`.
        output: the pipes to which they may write.
    """

    def __init__(self, processes: SparingProcesses, leased: LeasedBackground,
                 output: LeftoverOutput) -> None:
        self._processes = processes
        self.leased, self.output = leased, output
        self._there = False
        self._due = self._left_by = 0
        self._running = self._still = False

    @property
    def there(self) -> bool:
        """Whether there are any."""
        return self._there or self.leased.there

    @property
    def due(self) -> int:
        """When `tick` must be called (monotonic ns); 0 for never."""
        return 0 if self._still else self._due or self.leased.due

    def begin(self, how: str, lease: int) -> None:
        """Notes that the action of a lease left processes behind; `how` is "stop", "share" or
        "run". With "stop" and "share" they are stopped.
        """
        self._left_by = lease
        if how == "run":
            return self.leased.begin()
        self._processes.stop()
        self._there, self._running = True, False
        self._due = time.monotonic_ns() + _TURN_NS if how == "share" else 0

    def wake(self) -> None:
        """Continues the processes, as an action begins."""
        self.release()
        self._left_by = 0
        if self.leased.there:
            return self.leased.wake()
        if self._there:
            self._processes.go_on()
        self._there, self._due = False, 0

    def end(self, order: KillCommand) -> None:
        """Ends a lease of the processes. If the lease is that of the action which ended last, and
        the worker knows that the kernel has ended it for its memory, kills what the action left. An
        order for another reason came too late to stop that action.

        Raises:
            Unstoppable: only ending the init helps.
        """
        if order.lease != self._left_by or order.state is not ActionState.OUT_OF_MEMORY:
            return self.leased.end(order)
        until = time.monotonic_ns() + _END_NS
        try:
            self._processes.kill_latest()
            while not self._processes.latest_gone() and time.monotonic_ns() < until:
                time.sleep(_LOOK_S)
                self._processes.kill_latest()
        except OSError as error:
            raise Unstoppable(f"the sandbox's processes could not be killed ({error.strerror})"
                              ) from None

    def freeze(self) -> None:
        """Stops the processes until the next action, also those that have a share. Those that hold
        CPUs go on: what runs under a lease is ended when it uses too much, and not frozen.
        """
        if self.leased.there:
            return self.leased.freeze()
        if self._running:
            self._processes.stop()
        self._running, self._due = False, 0

    def hold_still(self) -> None:
        """Stops the processes until `release`, even if they hold CPUs. Meanwhile none of them gets
        its turn to run.

        Raises:
            OSError: the process that would stop them cannot be started.
        """
        if self.there:
            self._processes.stop()
        self._still = True

    def release(self) -> None:
        """Lets the processes that `hold_still` stopped go on as before."""
        if self._still and (self._running or (self.leased.there and not self.leased.held)):
            self._processes.go_on()
        self._still = False

    def tick(self) -> None:
        """Lets the processes run for their share of the time, or stops them, when that is due."""
        if self.leased.there:
            return self.leased.tick()
        if not self._due or (now := time.monotonic_ns()) < self._due:
            return
        if self._processes.alone():
            self._there, self._due = False, 0
        elif self._running:
            self._processes.stop()
            self._running, self._due = False, now + _TURN_NS - SHARE_NS
        else:
            self._processes.go_on()
            self._running, self._due = True, now + SHARE_NS


class LeftoverOutput:
    """The pipes of actions that have ended, to which background processes may still write.

    Such a process would end by SIGPIPE at its next line if they were closed (`nohup server &`
    redirects only the output to a terminal). So they stay open, and what comes is read and thrown
    away, so that a full pipe stops no process.

    Args:
        poll: what the sandbox's init waits with; the pipes are registered there.

    Attributes:
        fds: their descriptors, each until the last process that could write to it has ended.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self.fds = set[int]()

    def keep(self, pipes: Iterable[int]) -> None:
        """Keeps copies of the open ones of these pipes of an action; -1 stands for a closed one.

        The action still reads what they hold at its end, and closes its own.
        """
        for pipe in pipes:
            if pipe >= 0:
                fd = os.dup(pipe)
                self.fds.add(fd)
                self._poll.register(fd, select.POLLIN)

    def read(self, fd: int) -> None:
        """Reads what a pipe holds now."""
        try:
            if os.read(fd, _PIECE):
                return
        except BlockingIOError:
            return
        self.fds.discard(fd)
        self._poll.unregister(fd)
        os.close(fd)
