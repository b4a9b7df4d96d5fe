"""Changes file modes for programs in `process` sandboxes.

The kernel hands every `chmod` of a sandboxed program to the fork server (seccomp user
notification), where a `ModeKeeper` answers it. Landlock does not check `chmod`, so code in a
sandbox could change the mode of any file that its user owns, wherever it lies. A filter alone
cannot help, as it sees the address of a path and not the path.

The keeper opens the file that the caller named, checks where the opened file lies, and changes the
mode of that open file. It never lets the kernel continue the caller's own call, as the caller could
exchange the path in between. Only files beneath the sandbox's own directories are changed. Set-uid
and set-gid bits never come here: the filter refuses them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from .. import kernel
from ..files import scratch
from ..files.modes import AT_FDCWD, syscall_number
from ..syscalls import BOTH

_RECEIVE, _ANSWER, _STILL_VALID = 0xC0502100, 0xC0182101, 0x40082102  # ioctls of a listener
_NOTICE = struct.Struct("<QIIiIQ6Q")  # struct seccomp_notif
_REPLY = struct.Struct("<QqiI")  # struct seccomp_notif_resp
_HOW = struct.Struct("<QQQ")  # struct open_how
_NO_MAGIC_LINKS = 0x02  # a /proc link must not lead to the keeper's own files
_AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH = 0x100, 0x1000
_PATH_MAX = 4096
_A_DESCRIPTOR = re.compile(rb"/(?:proc/(?:self|thread-self|\d+)/fd|dev/fd)/(\d{1,9})")
_TURN_MAX = 64  # answers in one turn of the loop, because the fork server has other work as well
_CALLS = ("chmod", "fchmod", "fchmodat", "fchmodat2")
_NO_NAME = ctypes.create_string_buffer(b"")


class ModeKeeper:
    """Answers for many sandboxes, in the process that created it. A sandbox is served for as long
    as a process of it lives.

    Args:
        home_of: returns the scratch directory of the init with a process id; empty for an unknown
            one.

    Attributes:
        door: the socket that each init inherits to hand over its listener.
    """

    def __init__(self, home_of: Callable[[int], str]) -> None:
        self._home_of = home_of
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.door = there
        self._epoll = select.epoll()
        self._epoll.register(self._here.fileno(), select.EPOLLIN)
        self._own: dict[int, tuple[bytes, ...]] = {}  # listener -> its sandbox's directories

    def fileno(self) -> int:
        """A descriptor that is readable when `turn` has something to do."""
        return self._epoll.fileno()

    @property
    def highest(self) -> int:
        """The largest descriptor in use here."""
        return max(self._own, default=0)

    def close(self) -> None:
        """Closes all listeners. Sandboxed programs that then change a mode get ENOSYS."""
        for listener in self._own:
            os.close(listener)
        self._own.clear()
        self._epoll.close()
        self._here.close()
        self.door.close()

    def turn(self) -> None:
        """Answers what waits, at most one call of each sandbox."""
        for fd, what in self._epoll.poll(0, _TURN_MAX):
            if fd == self._here.fileno():
                self._admit()
            elif what & select.EPOLLIN:
                self._answer(fd)
            else:  # no process is left behind this filter
                self._forget(fd)

    def _admit(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._here, 16, 1, socket.MSG_DONTWAIT)
        for listener in fds:
            os.set_inheritable(listener, False)
            home = self._home_of(int.from_bytes(data, "little"))
            if not home:  # it has ended meanwhile
                os.close(listener)
                continue
            self._own[listener] = tuple(os.fsencode(os.path.realpath(part)) for part in
                                        (scratch.home(home), scratch.tmp(home)))
            self._epoll.register(listener, select.EPOLLIN)

    def _forget(self, listener: int) -> None:
        self._epoll.unregister(listener)
        del self._own[listener]
        os.close(listener)

    def _answer(self, listener: int) -> None:
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
        except OSError:  # the caller was killed, or a signal came and we are called again
            return
        id_, tid, _, call, _, _, *args = _NOTICE.unpack(notice)

        def waits() -> bool:
            """Whether the caller still waits, so that `tid` was its number until now."""
            with suppress(OSError):
                fcntl.ioctl(listener, _STILL_VALID, struct.pack("<Q", id_))
                return True
            return False

        try:
            _carry_out(tid, call, args, self._own[listener], waits)
            code = 0
        except OSError as error:
            code = error.errno or errno.EPERM
        with suppress(OSError):  # the caller was killed meanwhile
            fcntl.ioctl(listener, _ANSWER, _REPLY.pack(id_, 0, -code, 0))


def _carry_out(tid: int, call: int, args: list[int], own: tuple[bytes, ...],
               waits: Callable[[], bool]) -> None:
    """Makes the call for its caller. Raises the OSError that the caller shall see."""
    numbers = {syscall_number(name, kernel.machine()): name for name in _CALLS}
    name = numbers[call]
    if name == "fchmod":
        fd, mode = _descriptor(tid, _signed(args[0])), args[1]
    elif name == "chmod":
        fd, mode = _named(tid, AT_FDCWD, args[0], 0), args[1]
    else:
        flags = args[3] & 0xFFFFFFFF if name == "fchmodat2" else 0
        if flags & ~(_AT_SYMLINK_NOFOLLOW | _AT_EMPTY_PATH):
            raise OSError(errno.EINVAL, "flags")
        fd, mode = _named(tid, _signed(args[0]), args[1], flags), args[2]
    try:
        if not waits():
            raise OSError(errno.ESRCH, "the caller is gone")
        where = os.readlink(b"/proc/self/fd/%d" % fd)
        if not any(where == folder or where.startswith(folder + b"/") for folder in own):
            raise OSError(errno.EPERM, "outside")
        kernel.call(BOTH["fchmodat2"], fd, ctypes.addressof(_NO_NAME), mode & 0o1777,
                    _AT_EMPTY_PATH)
    finally:
        os.close(fd)


def _signed(argument: int) -> int:
    return ctypes.c_int32(argument & 0xFFFFFFFF).value


def _descriptor(tid: int, fd: int) -> int:
    """Opens the file behind a descriptor of the caller."""
    try:
        return os.open(f"/proc/{tid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        raise OSError(errno.EBADF, "no such descriptor") from None


def _named(tid: int, folder: int, address: int, flags: int) -> int:
    """Opens the file that the caller named by a path at `address` in its memory."""
    path = _read_path(tid, address)
    if match := _A_DESCRIPTOR.fullmatch(path):
        # A /proc/PID/fd/N path always means the caller's own descriptor N, whichever PID it names:
        # the caller may not use other processes' descriptors.
        return _descriptor(tid, int(match[1]))
    if not path and not flags & _AT_EMPTY_PATH:
        raise OSError(errno.ENOENT, "no path")
    follow = os.O_NOFOLLOW if flags & _AT_SYMLINK_NOFOLLOW else 0
    if path.startswith(b"/"):
        return _open(AT_FDCWD, path, follow)
    base = _descriptor(tid, folder) if folder != AT_FDCWD else os.open(
        f"/proc/{tid}/cwd", os.O_PATH | os.O_CLOEXEC)
    if not path:
        return base
    try:
        return _open(base, path, follow)
    finally:
        os.close(base)


def _open(folder: int, path: bytes, follow: int) -> int:
    how = ctypes.create_string_buffer(
        _HOW.pack(os.O_PATH | os.O_CLOEXEC | follow, 0, _NO_MAGIC_LINKS), _HOW.size)
    name = ctypes.create_string_buffer(path)
    return kernel.call(BOTH["openat2"], folder, ctypes.addressof(name), ctypes.addressof(how),
                       _HOW.size)


def _read_path(tid: int, address: int) -> bytes:
    with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        try:
            data = os.pread(memory.fileno(), _PATH_MAX, address)
        except (OSError, OverflowError):
            raise OSError(errno.EFAULT, "no such address") from None
    path, end, _ = data.partition(b"\0")
    if not end:
        raise OSError(errno.ENAMETOOLONG if len(data) == _PATH_MAX else errno.EFAULT, "no end")
    return path
