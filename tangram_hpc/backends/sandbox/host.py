"""Owns: what every host is before it runs anything - its own process session, limits, descriptors -
and the system calls for it. Must not know what a host is for.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket

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
    os.chdir(home)
    return control


class Binding:
    """Which cores this process is bound to; what it starts inherits them."""

    __slots__ = ("_all", "_now")

    def __init__(self) -> None:
        self._all = tuple(sorted(os.sched_getaffinity(0)))
        self._now = self._all

    def set(self, cores: tuple[int, ...]) -> str:
        """Binds to these cores, or to all of the start when there are none; returns what is
        enforced by it: "affinity" or "counted"."""
        want = cores or self._all
        if want != self._now:
            try:
                os.sched_setaffinity(0, want)
            except OSError:  # a core went away, or never was this job's
                self._now = ()
                return "counted"
            self._now = want
        return "affinity" if cores else "counted"

    def moved(self, cores: tuple[int, ...]) -> None:
        """Someone else has bound this process to `cores`."""
        self._now = cores
