"""System calls for which Python has no function, made by number; errors are raised as OSError."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from contextlib import suppress

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_V3 = 0x20080522
_MACHINES = ("x86_64", "aarch64")


def machine() -> str:
    """The machine whose system call numbers hold for this process: "x86_64" or "aarch64"; empty for
    another.
    """
    name = platform.machine()
    wide = sys.maxsize > 1 << 32 and sys.byteorder == "little"  # not x32, not a 32-bit Python
    return name if wide and name in _MACHINES else ""


def call(number: int, *args: int) -> int:
    """Makes one system call. A pointer is given as its address.

    Raises:
        OSError: the kernel's answer.
    """
    done = int(_libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, args)))
    _check(done < 0)
    return done


def renounce() -> None:
    """Gives up this process's capabilities for good, and that a program which it runs may gain
    rights.

    Root without capabilities is a user like others. With them it could read the environment and the
    memory map of processes outside, whatever Landlock says of tracing (CAP_PERFMON).

    Raises:
        OSError: the kernel refuses, or this process has threads, which would keep their rights.
    """
    with suppress(FileNotFoundError):  # behind a pid namespace's /proc, which does not show us
        if len(os.listdir("/proc/self/task")) != 1:
            raise OSError(errno.EBUSY, "a process restricts itself before it starts threads")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    none = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, none) != 0)


def _check(failed: bool) -> None:
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
