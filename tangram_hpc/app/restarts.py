"""Rules for a parent that starts its broker again: which ends are crashes, how often a broker may
be started again after a crash, and what becomes of its access file when that is over.

A crash is a death by a signal, or a broken invariant (`BROKEN_STATUS`). After every other end
another start would end in the same way: the work is done, a setting or the folder is refused,
another broker serves the job, the disk is full.
"""

from __future__ import annotations

import signal
import socket
import time
from collections import deque
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from ..errors import AccessError
from ..storage.access import mark_ended, read_access

BROKEN_STATUS = 70  # exit status of a driver that met an exception which nobody expected
WINDOW_S = 600.0  # restarts are counted within this time


class RestartLimit:
    """Allows at most `count` restarts within `WINDOW_S`.

    Args:
        count: the largest number of restarts.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._times: deque[float] = deque()  # of the restarts within the window

    def take(self, now_s: float) -> int:
        """Takes one restart.

        Args:
            now_s: the time of the monotonic clock, in seconds.

        Returns:
            How many were taken within the window, with this one; 0 if no more are allowed now.
        """
        while self._times and now_s - self._times[0] > WINDOW_S:
            self._times.popleft()
        if len(self._times) >= self.count:
            return 0
        self._times.append(now_s)
        return len(self._times)


def crashed(status: int) -> bool:
    """Returns whether a broker with this `Popen.returncode` has crashed."""
    return status < 0 or status == BROKEN_STATUS


def how_it_ended(status: int) -> str:
    """Returns in words how a process ended, by its `Popen.returncode`."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"


def writer(access: Path) -> int:
    """Returns the process id of the broker that wrote this access file; 0 if there is no file, or
    if that broker has ended in order, or is on another host.
    """
    try:
        found = read_access(access)
    except AccessError:
        return 0
    return found.pid if found.host == socket.gethostname() else 0


def mark_crashed(access: Path, pids: Container[int]) -> None:
    """Marks an access file as ended if it was left by one of these brokers of this host, which is
    not started again. Without the mark, clients and workers would wait for another broker.
    """
    if writer(access) in pids:
        with suppress(AccessError, OSError):  # a full disk, for example: then they wait in vain
            mark_ended(access, read_access(access).job, time.strftime("%Y-%m-%dT%H:%M:%S"))
