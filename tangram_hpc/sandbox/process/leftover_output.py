"""The outputs of actions that have ended and left background processes behind.

Such a process goes on with the pipes of its action as its output, and would end by SIGPIPE at its
next line if they were closed (`nohup server &` redirects only the output to a terminal). So they
stay open, and what comes is read and thrown away, so that a full pipe stops no process.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

_PIECE = 1 << 16


class LeftoverOutput:
    """The pipes of one sandbox that background processes may still write to.

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
