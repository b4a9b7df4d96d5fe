"""A process that serves one sandbox's network from outside of the sandbox's namespaces.

The init forks it before it enters the namespaces, and keeps one end of a pair of sockets. Code in
the sandbox cannot see the process, signal it, or reach its descriptors. The process ends with its
init. Its work is a function of the caller: a proxy (`proxy_process`), or the stack of an open
network (`open_network`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_FDS_MAX = 1 << 16


class HelperProcess:
    """The process, seen from the init that has forked it.

    Attributes:
        pid: its process id.
        link: this end of the pair of sockets.
    """

    def __init__(self, name: str, serve: Callable[[socket.socket], None]) -> None:
        """Forks the process, which must happen before this one enters a namespace.

        Args:
            name: the process's name, of at most 15 characters.
            serve: what it does with its end of the pair; the process ends when this returns.

        Raises:
            OSError: it cannot be forked.
        """
        parent = os.getpid()
        self.link, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _run(theirs.detach(), name, serve, parent)
            finally:
                os._exit(1)
        theirs.close()

    def end(self) -> None:
        """Ends the process; its init waits for it."""
        self.link.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _run(control: int, name: str, serve: Callable[[socket.socket], None], parent: int) -> None:
    """Serves until the init is gone, in the forked process."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    if os.getppid() != parent:
        return
    os.setsid()
    for first, end in ((3, control), (control + 1, _FDS_MAX)):
        os.closerange(first, end)  # among them the init's socket to its worker
    with socket.socket(fileno=control) as link:
        serve(link)
