"""Owns: system calls that Python has no function for, by their numbers, their errors as OSError. Must
not know what they are called for.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_PR_GET_NO_NEW_PRIVS = 39
_PR_SET_NO_NEW_PRIVS = 38
_MACHINES = ("x86_64", "aarch64")


def machine() -> str:
    """Whose system call numbers hold for this process: "x86_64", "aarch64", or "" for others."""
    name = platform.machine()
    wide = sys.maxsize > 1 << 32 and sys.byteorder == "little"  # not x32, not a 32-bit Python
    return name if wide and name in _MACHINES else ""


def call(number: int, *args: int) -> int:
    """One system call; a pointer is given as its address.

    Raises:
        OSError: what the kernel answered.
    """
    done = int(_libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, args)))
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return done


def no_new_privileges() -> None:
    """From now on no program gains rights by being set-uid or having capabilities; for good.

    Raises:
        OSError: the kernel refuses, or this process has threads, which would stay as they are.
    """
    if _libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1:
        return
    if len(os.listdir("/proc/self/task")) != 1:
        raise OSError(errno.EBUSY, "a process restricts itself before it starts threads")
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
