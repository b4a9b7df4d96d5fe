"""The program that stands for an action: it counts its work down at the rate of what it is granted.

Law: it starts from nothing of ours (the text runs under a bare interpreter), uses next to no CPU
time, and believes only `TANGRAM_CPUS_FILE`: how many CPUs it has now, and since when.
Progress on u units is 1 / (work * (serial + (1 - serial) / u)); on 0 units there is none. The time
since the file was written for it counts, so the interpreter's own start is part of the work.
"""

from __future__ import annotations

import sys

POLL_S = 0.008  # less than half of the least time between two resizes: none is missed

TEXT = """
import posix, sys, time
work, serial, poll = float(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
path = posix.environ[b"TANGRAM_CPUS_FILE"]
left, since, units = 1.0, 0, 0
while True:
    fd = posix.open(path, posix.O_RDONLY)
    at, told = posix.fstat(fd).st_mtime_ns, posix.read(fd, 32)
    posix.close(fd)
    if at != since:
        if units:
            left -= (at - since) / length
        since, units = at, int(told.split()[0])
        length = work * (serial + (1.0 - serial) / units) * 1e9 if units else 0.0
    rest = poll
    if units:
        rest = (since + max(0.0, left) * length - time.time_ns()) / 1e9
        if rest <= 0:
            break
    time.sleep(min(rest, poll) if poll else rest)
"""


def command(work_s: float, serial: float, resizable: bool) -> list[str]:
    """The command of an action with so much work, in wall time. One that is never resized sleeps
    once; others look at their file every few ms."""
    poll = POLL_S if resizable else 0.0
    return [sys.executable, "-I", "-S", "-c", TEXT, repr(work_s), repr(serial), repr(poll)]
