"""Which ends of a broker are crashes, and how often it may be started again after one.

A crash is a signal that nobody meant for it, or a broken invariant (`BROKEN_STATUS`). After every
other end another start would end in the same way: the work is done, a setting or the folder is
refused, another broker serves the job, the disk is full.
"""

from __future__ import annotations

import signal
from collections import deque

BROKEN_STATUS = 70  # exit status of a driver that met an exception which nobody expected
WINDOW_S = 600.0  # restarts are counted within this time


class RestartLimit:
    """Allows so many restarts within `WINDOW_S`.

    Args:
        count: how many.
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
