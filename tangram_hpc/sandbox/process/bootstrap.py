"""Owns: what every execution process is before it runs anything - its own process session, limits,
descriptors - and the system calls for it. Must not know what an execution process is for.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket

from ...protocol.process_frames import INIT
from ..files import scratch

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
CONTROL = 3  # the descriptor of an execution process's control socket
MODES = 4  # and of the socket on which an init hands over the listener of its filter


def guard(name: str, when_parent_ends: int) -> None:
    """Makes this process a subreaper that cannot be traced or dumped by its own user's programs
    and that gets a signal when its parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, when_parent_ends, 0, 0, 0)
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)


def become(control: socket.socket, modes: int, highest: int, home: str, kind: str, parent: int
           ) -> socket.socket:
    """Turns a fresh fork of the fork server into an execution process and returns its control
    socket. Closes all descriptors inherited from the fork server (`highest` is the largest), except
    the control socket and, in an init, `modes`, which becomes descriptor MODES.

    Raises:
        OSError: its directory cannot be entered.
        SystemExit: the fork server ended meanwhile.
    """
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    guard(f"tangram-{kind}", signal.SIGTERM if kind == INIT else signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)
    wanted = (control.fileno(), modes) if kind == INIT else (control.fileno(),)
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, MODES + 1) for fd in wanted]
    control.detach()
    for number, fd in enumerate(kept, CONTROL):
        os.dup2(fd, number, inheritable=False)
    os.closerange(CONTROL + len(kept), max(highest, *kept, 1023) + 1)  # none may reach a command
    control = socket.socket(fileno=CONTROL)
    control.setblocking(True)
    os.chdir(scratch.home(home))
    return control


def open_oom_score() -> int:
    """A descriptor of this process's oom_score_adj."""
    return open_of_self("oom_score_adj")


def open_of_self(name: str) -> int:
    """Opens a file of this process in /proc for writing. Root owns these files while the process is
    not dumpable, so it is made dumpable for a moment. Call it before any user's code runs."""
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    try:
        return os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
    finally:
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
