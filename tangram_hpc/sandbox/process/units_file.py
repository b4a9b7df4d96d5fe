"""The small file that tells a running command how many CPUs it has now.

The file is opened once, and its first line is written in place by one call. So it can be shown
read-only in a sandbox whose init can no longer open anything outside. Its modification time is when
the number began to hold, in ns. It lies beside the directories that belong to the sandbox.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress


def path_of(home: str) -> str:
    """The path of the file that belongs to a scratch directory."""
    return f"{home}/cpus"


class UnitsFile:
    """The file of one sandbox. A command finds its path in `TANGRAM_CPUS_FILE`; the first line is
    the whole number of CPUs that it has now, or 0 while it is suspended.

    Attributes:
        fd: the open file.
        now: the number that was written last; -1 before.
    """

    __slots__ = ("fd", "now")

    def __init__(self, home: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path_of(home), flags, 0o600)
        os.fchmod(self.fd, 0o644)  # for all users of a sandbox; the folder above is closed
        self.now = -1
        with suppress(OSError):  # a file that has a block can be written on a full disk, too
            os.pwrite(self.fd, b"0\n", 0)

    def write(self, units: int) -> None:
        """Writes the number of CPUs from now on. A full disk is no reason to fail an action, so
        errors are ignored.
        """
        now = time.time_ns()
        try:
            if units != self.now:
                text = f"{units}\n".encode()
                os.pwrite(self.fd, text, 0)
                os.ftruncate(self.fd, len(text))  # before, the old number's rest may follow
                self.now = units
            os.utime(self.fd, ns=(now, now))
        except OSError:
            pass

