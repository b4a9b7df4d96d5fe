"""Changes file modes from behind a sandbox's own system call filter, and hands over the filter's
listener.

The filter hands a sandboxed program's changes of modes to the `mode_keeper`. An init changes modes
without it: it puts a secret of 128 random bits into two unused arguments of `fchmodat`, and the
filter allows calls that carry the secret.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

from .. import kernel
from ..syscalls import BOTH, NUMBERS

AT_FDCWD = -100

_password: tuple[int, int] | None = None  # until this process has such a filter


def syscall_number(name: str, machine: str) -> int:
    """The number of a system call on "x86_64" or "aarch64"; -1 where the machine has no such call.
    """
    if name in BOTH:
        return BOTH[name]
    return NUMBERS[name][("x86_64", "aarch64").index(machine)]


def new_password() -> tuple[int, int]:
    """Creates the secret with which `change` in this process passes its filter from now on."""
    global _password
    _password = first, second = struct.unpack("<QQ", os.urandom(16))
    return first, second


def change(path: str, mode: int, dir_fd: int | None = None) -> None:
    """Does what `os.chmod` does, also behind this process's filter.

    Raises:
        OSError: the kernel refuses.
    """
    if _password is None:
        return os.chmod(path, mode, dir_fd=dir_fd)
    name = ctypes.create_string_buffer(os.fsencode(path))
    folder = AT_FDCWD if dir_fd is None else dir_fd
    kernel.call(syscall_number("fchmodat", kernel.machine()), folder, ctypes.addressof(name), mode,
                0, *_password)


def change_open(fd: int, mode: int) -> None:
    """Does what `os.fchmod` does, also behind this process's filter.

    Raises:
        OSError: the kernel refuses.
    """
    if _password is None:  # no /proc: in that of another pid namespace there is no "self"
        return os.fchmod(fd, mode)
    change(f"/proc/self/fd/{fd}", mode)


def hand_over(door: int, listener: int) -> None:
    """Sends the listener of this process's filter to the keeper behind the socket `door`; closes
    both here.

    Raises:
        OSError: nobody is at the other end.
    """
    with socket.socket(fileno=door) as there:
        socket.send_fds(there, [os.getpid().to_bytes(4, "little")], [listener])
    os.close(listener)
