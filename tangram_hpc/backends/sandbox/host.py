"""Owns: what every host is before it runs anything - its own process session, limits, descriptors -
and the system calls for it. Must not know what a host is for.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket

from . import scratch

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
CONTROL = 3  # the descriptor of a host's control socket


def guard(name: str, when_parent_ends: int) -> None:
    """Makes this process a subreaper that cannot be traced or dumped by its own user's programs
    and that gets a signal when its parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, when_parent_ends, 0, 0, 0)
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)


def become(control: socket.socket, home: str, kind: str, parent: int) -> socket.socket:
    """Turns a fresh fork of the nursery into a host; returns its control socket.

    Raises:
        OSError: its directory cannot be entered.
        SystemExit: the nursery ended meanwhile.
    """
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    guard(f"tangram-{kind}", signal.SIGTERM if kind == "init" else signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)
    if control.fileno() != CONTROL:
        os.dup2(control.fileno(), CONTROL, inheritable=False)
        control.detach()
        control = socket.socket(fileno=CONTROL)
    os.closerange(CONTROL + 1, 1024)  # the nursery holds few; none may reach a command
    control.setblocking(True)
    os.chdir(scratch.home(home))
    return control


def open_oom_score() -> int:
    """A descriptor of this process's oom_score_adj. Who cannot be dumped owns no file of its own in
    /proc, unless it is root, and so can be for a moment."""
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    try:
        return os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    finally:
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
