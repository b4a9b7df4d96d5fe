"""The program that stands for an action in a replay: it counts its work down at its granted rate.

Progress on u units is 1 / (work * (serial + (1 - serial) / u)) per second; on 0 units there is
none. The time since `TANGRAM_CPUS_FILE` was written counts, so the start of the interpreter is part
of the work.

The program must not import anything of this package (it runs under a bare interpreter), must use
next to no CPU time, and reads the number of its CPUs, and the time of the last change, from
`TANGRAM_CPUS_FILE` alone.
"""

from __future__ import annotations

import sys

POLL_S = 0.008  # less than half of the least time between two resizes, so that none is missed

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
    """The command of an action with `work` in wall time.

    An action that is never resized sleeps once; the others read their file every few ms.
    """
    poll = POLL_S if resizable else 0.0
    return [sys.executable, "-I", "-S", "-c", TEXT, repr(work_s), repr(serial), repr(poll)]
