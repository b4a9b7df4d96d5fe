"""Owns: the system calls that a sandbox may not make: the filter, and putting it on this process
and all it starts. Must not hold paths, nor what needs memory to be read: a filter sees numbers.

The filter is a binary search over ranges of call numbers, so most calls are answered without a look
at their arguments, which the kernel (5.11 and later) then remembers per number. Numbers newer
than the table do not exist (ENOSYS), which is what programs expect of an older kernel; so do those
of x32. Programs for another machine (32-bit ones) get ENOSYS for everything.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Sequence

from . import kernel, modes
from .syscalls import BOTH, NEWEST, NUMBERS

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_ALLOW, _ERRNO, _NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000

# instructions: the kernel's struct sock_filter is (code, jump if true, jump if false, value)
_Code = tuple[tuple[int, int, int, int], ...]
_LOAD, _RETURN, _AND, _JUMP = 0x20, 0x06, 0x54, 0x05
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16

_NEW_NAMESPACE = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET
_NEW_TIME = 0x80  # of unshare only; clone has the signal there
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_SETLEASE, _SETDELEG = 1024, 1040  # who opens such a file waits for its holder: an init, a copy
_EVERYBODY = _UNCHANGED = 0xFFFFFFFF  # -1 to kill, and to chown
_SET_ID = 0o6000  # set-uid and set-gid: whoever runs such a file runs it as its owner
_MAKES_A_FILE = 0o100 | 0o20000000  # O_CREAT, __O_TMPFILE: without them open reads no mode
_Password = tuple[int, int]

_NEVER = """mount umount2 pivot_root move_mount open_tree open_tree_attr fsopen fsmount fsconfig
    fspick mount_setattr chroot setns bpf perf_event_open userfaultfd io_uring_setup
    io_uring_enter io_uring_register keyctl add_key request_key kexec_load kexec_file_load
    create_module init_module finit_module delete_module reboot swapon swapoff acct quotactl
    quotactl_fd syslog open_by_handle_at process_madvise pidfd_getfd kcmp iopl ioperm settimeofday
    clock_settime clock_adjtime adjtimex sethostname setdomainname vhangup lookup_dcookie
    nfsservctl fanotify_init sched_setaffinity"""
_NOT_TO_NEIGHBOURS = """ptrace process_vm_readv process_vm_writev sched_setscheduler
    sched_setparam sched_setattr ioprio_set migrate_pages move_pages"""
# an access list is an attribute, and changes the mode with it
_ATTRIBUTES = """setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr setxattrat
    removexattrat file_setattr"""
_UNOWNED = "memfd_create memfd_secret"  # memory that belongs to no process
_SHARED_BY_KEY = """shmget shmat shmctl semget semop semctl semtimedop msgget msgsnd msgrcv msgctl
    mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr"""


def available() -> bool:
    """Whether this kernel and machine can filter system calls."""
    here = kernel.machine()
    action = ctypes.c_uint32(_ERRNO)
    try:
        return bool(here) and not kernel.call(
            _SECCOMP[here], _GET_ACTION_AVAIL, 0, ctypes.addressof(action))
    except OSError:
        return False


def restrict(*, namespaced: bool, network: bool, sampled: bool = False) -> int:
    """Takes from this process, and all it will start, what no program in a sandbox needs; for good.
    Returns -1; without `namespaced` the listener that every change of a file's mode waits for, to
    be handed to a `ModeKeeper`.

    `namespaced`: it has mount, pid and network namespaces of its own. Without, what reaches other
    processes and files of the same user goes too: tracing, priorities, extended attributes,
    owners and groups of files, memory and queues shared by a key, and every way to a Unix socket
    but pairs. Binding to cores is left to who is outside, in both cases. Without `network` and
    namespaces no socket is made; a namespace of its own has a loopback only, so nothing more is
    refused there. `sampled`: memory is measured by what processes map; so what would hold memory
    without one is answered as by a kernel that has it not. Nowhere can a set-uid or set-gid bit
    be given to a file.

    Raises:
        OSError: this machine cannot (ENOSYS), or the kernel refuses; nothing is restricted then.
            EBUSY: a filter that already holds this process has a listener, and there can be one.
    """
    here = kernel.machine()
    if not here:
        raise OSError(errno.ENOSYS, "no system call numbers of this machine are known")
    code = program(here, namespaced=namespaced, network=network, gid=os.getegid(),
                   uid=os.geteuid(), sampled=sampled,
                   password=None if namespaced else modes.new_password())
    # struct sock_fprog: how many, and where
    text = ctypes.create_string_buffer(code, len(code))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8,
                                                      ctypes.addressof(text)))
    kernel.renounce()
    if namespaced:
        kernel.call(_SECCOMP[here], _SET_MODE_FILTER, 0, ctypes.addressof(filter_))
        return -1
    return kernel.call(_SECCOMP[here], _SET_MODE_FILTER, _NEW_LISTENER | _WAIT_KILLABLE,
                       ctypes.addressof(filter_))


def program(machine: str, *, namespaced: bool, network: bool, gid: int, uid: int = 0,
            sampled: bool = False, password: _Password | None = None) -> bytes:
    """Pure. The filter's instructions for "x86_64" or "aarch64", 8 bytes each, for a process of
    this user and group. `password`: lets a change of a file's mode pass, see `modes.change`."""
    column = list(_AUDIT_ARCH).index(machine)
    numbers = {NUMBERS[name][column] if name in NUMBERS else BOTH[name]: code
               for name, code in _special(namespaced, network, gid, uid, sampled,
                                           password).items()}
    numbers.pop(-1, None)  # this machine has it not
    ranges: list[tuple[int, _Code]] = [(0, _answer(0))]
    for number, code in sorted(numbers.items()):
        if ranges[-1] == (number, _answer(0)):
            ranges.pop()
        if not ranges or ranges[-1][1] != code:
            ranges.append((number, code))
        if number + 1 not in numbers:
            ranges.append((number + 1, _answer(0)))
    ranges.append((NEWEST + 1, _answer(errno.ENOSYS)))
    lines = ((_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
             *_answer(errno.ENOSYS), (_LOAD, 0, 0, _NUMBER_AT), *_search(ranges))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _special(namespaced: bool, network: bool, gid: int, uid: int, sampled: bool,
             password: _Password | None) -> dict[str, _Code]:
    """What is answered otherwise than by "allowed", by name."""
    eperm, enosys = _answer(errno.EPERM), _answer(errno.ENOSYS)
    table: dict[str, _Code] = dict.fromkeys(_NEVER.split(), eperm)
    table["clone3"] = enosys  # its flags lie in memory; libc then uses clone
    table["clone"] = _refuse_bits(0, _NEW_NAMESPACE)
    table["unshare"] = _refuse_bits(0, _NEW_NAMESPACE | _NEW_TIME)
    table["fcntl"] = _refuse_values(1, _SETLEASE, _SETDELEG)
    table["ioctl"] = _refuse_values(1, _TIOCSTI, _TIOCLINUX)
    table["socket"] = _families(namespaced, network)
    table.update(_file_modes(namespaced, password))
    if sampled:
        table.update(dict.fromkeys(f"{_UNOWNED} {_SHARED_BY_KEY}".split(), enosys))
    if namespaced:
        return table
    table.update(dict.fromkeys(_NOT_TO_NEIGHBOURS.split(), eperm))
    table.update(dict.fromkeys(_ATTRIBUTES.split(), _answer(errno.EOPNOTSUPP)))
    table.update(dict.fromkeys(_SHARED_BY_KEY.split(), enosys))
    for name, owner in {"chown": 1, "lchown": 1, "fchown": 1, "fchownat": 2}.items():
        table[name] = _keeps_owner(owner, uid, gid)
    table["kill"] = _refuse_values(0, _EVERYBODY)
    table["setpriority"] = _own_priority()
    table["prlimit64"] = _own_limits()
    table["socketpair"] = _pairs()
    if not network:
        table["connect"] = _answer(errno.EACCES)
    return table


# ---- answers; each ends in a return ----


def _answer(code: int) -> _Code:
    return ((_RETURN, 0, 0, _ERRNO | code if code else _ALLOW),)


def _low(argument: int) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, _ARGS_AT + 8 * argument)


def _high(argument: int) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, _ARGS_AT + 8 * argument + 4)


def _refuse_bits(argument: int, bits: int) -> _Code:
    return (_low(argument), (_ANY_BIT, 0, 1, bits), *_answer(errno.EPERM), *_answer(0))


def _refuse_values(argument: int, *values: int) -> _Code:
    """The kernel takes these arguments as 32-bit ones, so the upper half must not count."""
    tests = [(_EQUAL, len(values) - n, 0, value) for n, value in enumerate(values)]
    return (_low(argument), *tests, *_answer(0), *_answer(errno.EPERM))


def _file_modes(namespaced: bool, password: _Password | None) -> dict[str, _Code]:
    """What the calls that give a file its mode may do: nothing with set-uid or set-gid bits.
    Without namespaces a mode is changed by a `ModeKeeper` only, which sees where the file lies."""
    changed: _Code = ((_RETURN, 0, 0, _ALLOW if namespaced else _NOTIFY),)
    mode_at = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2}
    table = {name: _without_set_id(at, changed) for name, at in mode_at.items()}
    if password is not None:
        table["fchmodat"] = _without_set_id(2, (*_lets_pass(password), *changed))
    made_at = {"creat": 1, "mkdir": 1, "mkdirat": 2, "mknod": 1, "mknodat": 2}
    table |= {name: _without_set_id(at, _answer(0)) for name, at in made_at.items()}
    for name, at in {"open": 1, "openat": 2}.items():
        refuses = _without_set_id(at + 1, _answer(0))
        table[name] = (_low(at), (_ANY_BIT, 0, len(refuses) - 1, _MAKES_A_FILE), *refuses)
    table["openat2"] = _answer(errno.ENOSYS)  # its mode lies in memory; programs then use openat
    return table


def _without_set_id(mode: int, otherwise: _Code) -> _Code:
    return (_low(mode), (_ANY_BIT, 0, 1, _SET_ID), *_answer(errno.EPERM), *otherwise)


def _lets_pass(password: _Password) -> _Code:
    """Allows who knows the password, which stands in the last two arguments."""
    words = [word for half in password for word in (half & 0xFFFFFFFF, half >> 32)]
    loads = [load for argument in (4, 5) for load in (_low(argument), _high(argument))]
    tests: list[tuple[int, int, int, int]] = []
    for n, (load, word) in enumerate(zip(loads, words, strict=True)):
        tests += [load, (_EQUAL, 0, 2 * (len(words) - 1 - n) + 1, word)]
    return (*tests, *_answer(0))


def _families(namespaced: bool, network: bool) -> _Code:
    """Which sockets can be made.

    Of the common families EACCES, which socket(2) gives for "not allowed": programs go on without
    a network, or say so. Of all others EAFNOSUPPORT, as from a kernel without them. A Unix socket
    could be connected to anything that this user runs (munge, D-Bus), which Landlock does not see.
    """
    inet, unix = [socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK], [socket.AF_UNIX]
    allowed = [*(inet if namespaced or network else []), *(unix if namespaced else [])]
    known = [*inet, *unix]
    tests = [(_EQUAL, len(known) - n + (family not in allowed), 0, int(family))
             for n, family in enumerate(known)]
    return (_low(0), *tests, *_answer(errno.EAFNOSUPPORT), *_answer(0), *_answer(errno.EACCES))


def _pairs() -> _Code:
    """Pairs of connected Unix sockets, but no datagrams: those could still be sent anywhere."""
    return (_low(0), (_EQUAL, 0, 4, int(socket.AF_UNIX)),
            _low(1), (_AND, 0, 0, 0xF),
            (_EQUAL, 2, 0, int(socket.SOCK_STREAM)), (_EQUAL, 1, 0, int(socket.SOCK_SEQPACKET)),
            *_answer(errno.EACCES), *_answer(0))


def _keeps_owner(argument: int, uid: int, gid: int) -> _Code:
    """Own user and own group only, and then success without a call: a real call would clear the
    set-id bits of the named file, or change its group, wherever the file lies."""
    return (_low(argument), (_EQUAL, 1, 0, uid), (_EQUAL, 0, 3, _UNCHANGED),
            _low(argument + 1), (_EQUAL, 2, 0, gid), (_EQUAL, 1, 0, _UNCHANGED),
            *_answer(errno.EPERM), (_RETURN, 0, 0, _ERRNO))


def _own_priority() -> _Code:
    return (_low(0), (_EQUAL, 0, 2, 0), _low(1), (_EQUAL, 1, 0, 0), *_answer(errno.EPERM),
            *_answer(0))


def _own_limits() -> _Code:
    """Limits of pid 0, or only read: so do libc's setrlimit and the shells."""
    return (_low(0), (_EQUAL, 5, 0, 0), _low(2), (_EQUAL, 0, 2, 0), _high(2), (_EQUAL, 1, 0, 0),
            *_answer(errno.EPERM), *_answer(0))


def _search(ranges: Sequence[tuple[int, _Code]]) -> _Code:
    """The code of the range that the loaded number lies in."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    first = ranges[middle][0]
    if len(below) < 256:
        return ((_AT_LEAST, len(below), 0, first), *below, *above)
    return ((_AT_LEAST, 0, 1, first), (_JUMP, 0, 0, len(below)), *below, *above)
