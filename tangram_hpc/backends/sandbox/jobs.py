"""Owns: the worker's notes on leases, sessions and idle hosts. Must not do any I/O: a pool asks for
hosts through the call that it was given.
"""

from __future__ import annotations

import os
import signal
import time
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable

from ...domain.outcome import Outcome
from ...domain.states import ActionState
from ...wire.message import Start
from .hosts import Host
from .hostwire import RUNNER


class Job:
    """What the worker knows of a lease.

    `live` until its outcome is on its way up. `open` until nothing of it is left. `stop` is how it
    must be reported when someone ended it.
    """

    __slots__ = (
        "blob", "cores", "digest", "gone", "host", "live", "order", "payload", "started_ns",
        "stop", "storing", "timer",
    )  # fmt: skip

    def __init__(self, order: Start) -> None:
        self.order = order
        self.cores = order.cores
        self.payload = b""
        self.digest = ""
        self.blob = b""
        self.host: Host | None = None
        self.live = True
        self.storing = False
        self.gone = False
        self.started_ns = 0
        self.stop: tuple[ActionState, str] | None = None
        self.timer: TimerHandle | None = None

    def end_timer(self) -> None:
        """Its limit no longer counts."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def unstarted(self, state: ActionState, reason: str) -> Outcome:
        """Its outcome when it never ran."""
        return Outcome(state, reason=reason)

    def orphaned(self, host: Host, status: int, reason: str, enforcement: str) -> Outcome:
        """Its outcome when its host died under it."""
        state = self.stop[0] if self.stop else ActionState.FAILED
        number = os.WTERMSIG(status) if status >= 0 and os.WIFSIGNALED(status) else 0
        code = os.WEXITSTATUS(status) if status >= 0 and not number else 0
        if host.kind != RUNNER and not self.stop:
            number = code = 0  # its init's end, not the command's own
        return Outcome(
            state,
            exit_code=code,
            signal=number,
            exec_ns=time.monotonic_ns() - self.started_ns,
            reason=self.stop[1] if self.stop else reason,
            isolation="process",
            enforcement=enforcement,
        )


class Session:
    """A session's host, and what waits for it."""

    __slots__ = ("closing", "host", "id", "running", "up", "waiting")

    def __init__(self, session: int, host: Host) -> None:
        self.id = session
        self.host = host
        self.up = False
        self.closing = False
        self.running = 0  # the lease of its command
        self.waiting: deque[Job] = deque()


class Pool:
    """Hosts of one kind that serve one action at a time; grows to `limit` as they are needed."""

    def __init__(self, fork: Callable[[], Host], limit: int, warm: int) -> None:
        self._fork = fork
        self._limit = limit
        self._warm = warm
        self._booting: set[int] = set()
        self._size = 0
        self.free: list[Host] = []
        self.waiting: deque[Job] = deque()

    def warm_up(self, at_least: int = 0) -> None:
        """Asks for what is missing: one for each job that waits, and the warm ones."""
        want = len(self.waiting) + max(0, at_least - self._size)
        if self._size < self._warm:
            want = max(want, self._warm - self._size)
        missing = min(want, self._limit - self._size) - len(self._booting)
        for _ in range(missing):
            self._booting.add(self._fork().number)

    def booted(self, host: Host) -> None:
        """A host of it lives."""
        self._booting.discard(host.number)
        self._size += 1

    def failed(self, host: Host) -> bool:
        """A host of it could not be forked; returns whether there is none at all now."""
        self._booting.discard(host.number)
        return not self._booting and not self._size

    def lost(self, host: Host) -> None:
        """A host of it died."""
        if host.number in self._booting:
            self._booting.discard(host.number)
        else:
            self._size -= 1
        if host in self.free:
            self.free.remove(host)

    def give_away(self) -> Host | None:
        """Takes an idle host out of the pool for good."""
        if not self.free:
            return None
        self._size -= 1
        return self.free.pop()


def cause(status: int) -> str:
    """A wait status for people; -1: not known."""
    if status < 0:
        return "with its nursery"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"signal {number}, {signal.Signals(number).name}"
        except ValueError:
            return f"signal {number}"
    return f"exit code {os.WEXITSTATUS(status)}"
