"""Confines this process, and everything it starts, to some paths by Landlock.

Landlock needs neither root nor namespaces, and can never be undone. It restricts opening, running,
making, moving and removing files; tracing, and /proc/PID/environ, mem, fd and root of a process
outside; from ABI 4 on TCP; from ABI 6 on signals and abstract Unix sockets. It does not restrict
what needs no open file: stat, chmod, chown, utime and extended attributes by a path, and connecting
to a Unix socket that has a path. The system call filter takes these away, except utime and stat. So
the user's other files can be neither read nor changed, except for their times.

The caller decides which paths these are.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Sequence

from .. import kernel

# the same numbers on every machine
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_REMOVE_FILE = 1 << 5
_MAKE_CHAR = 1 << 6
_MAKE_REG = 1 << 8
_MAKE_BLOCK = 1 << 11
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15

_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # ABI -> how many file rights it knows
_ABI_TCP, ABI_SCOPES = 4, 6
_TCP_BIND_CONNECT = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11

_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_OF_DEVICES = _WRITE_FILE | _READ_FILE | _IOCTL_DEV
_OF_NAMES = _WRITE_FILE | _READ_FILE | _TRUNCATE | _MAKE_REG | _REMOVE_FILE
_NEVER = _MAKE_CHAR | _MAKE_BLOCK  # a device node made by root would bypass every rule
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP}


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"  # what `_pack_` means; Python 3.19 wants it said
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def abi() -> int:
    """The kernel's version of Landlock: 0 for none; from 6 on it restricts signals too."""
    try:
        return kernel.call(_CREATE_RULESET, 0, 0, _ASK_VERSION) if kernel.machine() else 0
    except OSError:
        return 0


def restrict(read: Sequence[str], write: Sequence[str], *, network: bool,
             unlisted: Sequence[str] = ()) -> int:
    """Confines this process and everything it starts to these paths; returns the Landlock ABI in
    force.

    A path that does not exist or cannot be reached is left out. A rule holds for what is at its
    path now: a directory that is made anew there is not accessible.

    Args:
        read: files and directories to read and run.
        write: directories beneath which everything is allowed but making device nodes; files;
            devices.
        network: false refuses TCP, where the ABI is 4 or later.
        unlisted: directories whose files can be made, used and removed by name but not listed, such
            as /dev/shm, which POSIX semaphores need.

    Raises:
        OSError: the kernel has no Landlock (ENOSYS) or refuses; all paths are still accessible.
    """
    level = abi()
    if level < 1:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock")
    known = (1 << _RIGHTS.get(level, _RIGHTS[max(_RIGHTS)])) - 1
    rules = _Ruleset(fs=known)
    size = 8
    if level >= _ABI_TCP:
        rules.net, size = 0 if network else _TCP_BIND_CONNECT, 16
    if level >= ABI_SCOPES:
        rules.scoped, size = _ABSTRACT_SOCKETS_AND_SIGNALS, 24
    ruleset = kernel.call(_CREATE_RULESET, ctypes.addressof(rules), size, 0)
    try:
        for paths, rights in ((read, _READ), (write, known & ~_NEVER), (unlisted, _OF_NAMES)):
            for path in paths:
                _allow(ruleset, path, rights & known)
        kernel.renounce()
        kernel.call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return level


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _ABSENT:
            return
        raise
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISDIR(mode):
            rights &= _OF_DEVICES if stat.S_ISCHR(mode) else _OF_FILES
        beneath = _PathBeneath(allowed=rights, parent=fd)
        kernel.call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.addressof(beneath), 0)
    finally:
        os.close(fd)
