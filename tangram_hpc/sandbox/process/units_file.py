"""Owns: the small file in which a running command finds how many CPUs it has now.

Law: it is opened once and its first line written in place, in one call, so that it can be shown
read-only inside a sandbox whose init can open nothing outside any more; its time of modification is
when the number began to hold, to the nanosecond. It lies beside the directories that
are its sandbox's own.
"""

from __future__ import annotations

import os
import time


def path_of(home: str) -> str:
    """Where the file of a sandbox's directory lies."""
    return f"{home}/cpus"


class UnitsFile:
    """One sandbox's. A command's environment names it as `TANGRAM_CPUS_FILE`: the whole number of
    CPUs that it has now, in its first line; 0 while it is suspended."""

    __slots__ = ("fd", "now")

    def __init__(self, home: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path_of(home), flags, 0o600)
        self.now = -1

    def write(self, units: int) -> None:
        """From now on it is so many. A disk that is full is no reason to fail an action."""
        now = time.time_ns()
        try:
            if units != self.now:
                text = f"{units}\n".encode()
                os.pwrite(self.fd, text, 0)
                os.ftruncate(self.fd, len(text))  # until then a rest may follow the first line
                self.now = units
            os.utime(self.fd, ns=(now, now))
        except OSError:
            pass

