"""What each execution process does first: its own process session, limits and descriptors.

A fork of the fork server inherits its descriptors and signal handlers. None of them may reach a
command, and no program of the same user may trace or dump an execution process. What the process is
for is not known here.
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
CONTROL = 3  # the descriptor of the control socket
MODES = 4  # and of the socket on which an init hands over its filter's listener


def guard(name: str, when_parent_ends: int) -> None:
    """Makes this process a subreaper that programs of its user cannot trace or dump, and that gets
    the signal `when_parent_ends` at its parent's end.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, when_parent_ends, 0, 0, 0)
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)


def become(control: socket.socket, modes: int, highest: int, home: str, kind: str, parent: int
           ) -> socket.socket:
    """Turns a fresh fork of the fork server into an execution process; returns its control socket.

    Closes all inherited descriptors except the control socket and, in an init, `modes`, which
    becomes descriptor MODES.

    Args:
        control: its end of the control socket.
        modes: the socket on which an init hands over the listener of its filter.
        highest: the largest descriptor in use.
        home: its scratch directory.
        kind: INIT or RUNNER.
        parent: the process id of the fork server.

    Raises:
        OSError: its directory cannot be entered.
        SystemExit: the fork server ended meanwhile.
    """
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as functions of users expect it
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
    try:
        os.chdir(scratch.home(home))
    except PermissionError:  # it belongs to another user of a sandbox; the init enters it as root
        os.chdir(home)
    return control


def open_oom_score() -> int:
    """A descriptor of this process's `oom_score_adj`."""
    return open_of_self("oom_score_adj")


def open_of_self(name: str) -> int:
    """Opens a file of this process in /proc for writing. Root owns these files while a process is
    not dumpable, so this one is made dumpable for a moment. Call it before any user's code runs.
    """
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    try:
        return os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
    finally:
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
