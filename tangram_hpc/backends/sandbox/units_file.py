"""Owns: the small file in which a running command finds how many CPUs it has now.

Law: it is replaced in one step, so a reader sees the old number or the new one; its time of
modification is when that number began to hold, to the nanosecond. It lies beside the sandbox's
directory, so that what is in there stays the user's alone.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress


class UnitsFile:
    """One sandbox's. A command's environment names it as `TANGRAM_CPUS_FILE`: the whole number of
    CPUs that it has now, in one line; 0 while it is suspended."""

    __slots__ = ("_fresh", "_now", "path")

    def __init__(self, home: str) -> None:
        self.path, self._fresh = f"{home}.cpus", f"{home}.cpus~"
        self._now = -1

    def write(self, units: int) -> None:
        """From now on it is so many. A disk that is full is no reason to fail an action."""
        now = time.time_ns()
        with suppress(OSError):
            if units == self._now:
                os.utime(self.path, ns=(now, now))
                return
            with open(self._fresh, "w") as file:
                file.write(f"{units}\n")
            os.utime(self._fresh, ns=(now, now))
            os.rename(self._fresh, self.path)
            self._now = units

    def remove(self) -> None:
        """The sandbox is gone."""
        for path in (self.path, self._fresh):
            with suppress(OSError):
                os.unlink(path)
