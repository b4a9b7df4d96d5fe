"""The system call filter of a sandbox: which calls are refused, and how a process puts it on.

The filter is a binary search over ranges of call numbers, which `bpf` assembles. Most calls are
answered without a look at their arguments, and the kernel (5.11 and later) then remembers the
answer for each number. A filter sees numbers only, so it cannot judge paths or anything else in
memory. Calls newer than the table, and calls of the x32 ABI, get ENOSYS, which is what programs
expect of an older kernel. Programs for another machine (32-bit ones) get ENOSYS for everything.

In a session whose root can be written and that has user 0 alone, calls that change a user, a group
or the owner of a file succeed without effect, as in Charliecloud, because package managers stop
where such a call fails.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from functools import lru_cache
from itertools import product

from .. import kernel
from ..bpf import (
    ARCH_AT,
    NUMBER_AT,
    FilterStep,
    answer,
    any_bit,
    assemble,
    binary_search,
    equal,
    high,
    load,
    low,
    masked,
    one_of,
)
from ..files import modes
from ..syscalls import BOTH, NEWEST, NUMBERS

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_ERRNO, _NOTIFY = 0x00050000, 0x7FC00000
_ALLOWED = answer(0x7FFF0000)
_REFUSED, _DENIED = answer(_ERRNO | errno.EPERM), answer(_ERRNO | errno.EACCES)
_NO_CALL = answer(_ERRNO | errno.ENOSYS)

_NEW_NAMESPACE = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET
_NEW_TIME = 0x80  # CLONE_NEWTIME, for unshare only: these bits of clone hold the signal
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_SETLEASE, _SETDELEG = 1024, 1040  # a process that opens such a file waits: an init would hang
_SET_DUMPABLE = 4  # prctl: a process that is not dumpable hides its open files from its init
_EVERYBODY = _UNCHANGED = 0xFFFFFFFF  # -1 to kill, and to chown
_SET_ID = 0o6000  # set-uid and set-gid: whoever runs such a file runs it as its owner
_MAKES_A_FILE = 0o100 | 0o20000000  # O_CREAT, __O_TMPFILE: without them open reads no mode
# frequent calls whose arguments are examined, so that the kernel does not remember the answer
_OFTEN = ("openat", "ioctl", "fcntl")
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
# an access control list is an attribute, and it changes the mode as well
_ATTRIBUTES = """setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr setxattrat
    removexattrat file_setattr"""
# Landlock does not judge a watch, which tells the names in a folder that may not be listed
_WATCHES = ("inotify_init", "inotify_init1", "inotify_add_watch")
# they succeed without effect where user 0 is the only one
_OF_USERS = """setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid
    capset chown lchown fchown fchownat"""
_FAKED = answer(_ERRNO)  # the caller sees success, and the kernel does nothing
_S_IFMT, _DEVICES = 0o170000, (0o020000, 0o060000)  # character and block devices
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


def restrict(*, namespaced: bool, network: bool, sampled: bool = False, rootlike: bool = False,
             trusted: bool = False, several: bool = False) -> int:
    """Takes from this process, and everything it starts, the calls that no program in a sandbox
    needs, for good.

    Set-uid and set-gid bits can be given to a file only with `rootlike`, and processes cannot be
    bound to cores from within.

    Args:
        namespaced: the process has mount, pid and network namespaces of its own. Without them the
            filter also refuses what reaches other processes and files of the same user: tracing,
            priorities, extended attributes, owners and groups of files, watches of files, memory
            and queues shared by a key, and all Unix sockets but pairs.
        network: false refuses all sockets of a process without namespaces. A network namespace has
            only a loopback, so nothing more is refused there.
        sampled: memory is measured by what processes map, so calls that hold memory without a
            process get ENOSYS.
        rootlike: the process is user 0 of a user namespace, and its mounts ignore set-uid bits.
            Calls that make a device file succeed without effect, and set-uid bits may be given.
            This process keeps its capabilities.
        trusted: with `rootlike`: the filter answers those calls and refuses nothing.
        several: with `rootlike`, whether the namespace has other users than user 0. If not, calls
            that change users and owners succeed without effect.

    Returns:
        -1; without `namespaced` the listener that every change of a file's mode waits for. Hand it
            to a `ModeKeeper`.

    Raises:
        OSError: this machine cannot filter (ENOSYS) or the kernel refuses; nothing is restricted
            then. EBUSY: another filter of this process has a listener already, and the kernel
            allows one.
    """
    here = kernel.machine()
    if not here:
        raise OSError(errno.ENOSYS, "no system call numbers of this machine are known")
    code = program(here, namespaced=namespaced, network=network, gid=os.getegid(),
                   uid=os.geteuid(), sampled=sampled, rootlike=rootlike, trusted=trusted,
                   several=several, password=None if namespaced else modes.new_password())
    # struct sock_fprog: the number of instructions and their address
    text = ctypes.create_string_buffer(code, len(code))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8,
                                                      ctypes.addressof(text)))
    if not rootlike:  # else `join` has left it a few, and no way to more
        kernel.renounce()
    if namespaced:
        kernel.call(_SECCOMP[here], _SET_MODE_FILTER, 0, ctypes.addressof(filter_))
        return -1
    return kernel.call(_SECCOMP[here], _SET_MODE_FILTER, _NEW_LISTENER | _WAIT_KILLABLE,
                       ctypes.addressof(filter_))


def prepare() -> None:
    """Makes the filters that this process and its forks may need: making one takes 0.3 ms of CPU,
    and using one that exists a hundredth of that.
    """
    if here := kernel.machine():
        for namespaced, network, sampled in product((False, True), repeat=3):
            program(here, namespaced=namespaced, network=network, gid=os.getegid(),
                    uid=os.geteuid(), sampled=sampled, password=None if namespaced else (0, 0))
        for network, sampled, trusted, several in product((False, True), repeat=4):
            program(here, namespaced=True, network=network, gid=0, sampled=sampled, rootlike=True,
                    trusted=trusted, several=several)


def program(machine: str, *, namespaced: bool, network: bool, gid: int, uid: int = 0,
            sampled: bool = False, rootlike: bool = False, trusted: bool = False,
            several: bool = False, password: _Password | None = None) -> bytes:
    """Returns the filter's instructions, 8 bytes each. Pure.

    Args:
        machine: "x86_64" or "aarch64".
        namespaced: as for `restrict`; so are `network`, `sampled`, `rootlike`, `trusted` and
            `several`.
        gid: the group that the process runs as; `uid` the user.
        password: lets a change of a file's mode pass, see `modes.change`.
    """
    ids = (0, 0) if namespaced else (uid, gid)
    code, holes = _template(machine, namespaced, network, ids, sampled, password is not None,
                            (rootlike, trusted, several))
    if password is None:
        return code
    filled = bytearray(code)
    for at, word in zip(holes, struct.unpack("4I", struct.pack("<2Q", *password)), strict=True):
        struct.pack_into("I", filled, at, word)
    return bytes(filled)


@lru_cache(maxsize=64)
def _template(machine: str, namespaced: bool, network: bool, ids: tuple[int, int], sampled: bool,
              password: bool, root: tuple[bool, bool, bool]) -> tuple[bytes, list[int]]:
    """Returns a filter without a password, and the offsets at which the words of a password are to
    be filled in. `root` holds the arguments `rootlike`, `trusted` and `several` of `program`.
    """
    column = list(_AUDIT_ARCH).index(machine)
    rootlike, trusted, several = root
    special = {} if trusted else _special(namespaced, network, ids, sampled, password)
    if rootlike:
        special |= _like_root(trusted, several)
        if several and sampled and not trusted:
            special |= _small_shared_memory()
    numbers = {NUMBERS[name][column] if name in NUMBERS else BOTH[name]: step
               for name, step in special.items()}
    numbers.pop(-1, None)  # calls that this machine does not have
    ranges: list[tuple[int, FilterStep]] = [(0, _ALLOWED)]
    for number, step in sorted(numbers.items()):
        if ranges[-1] == (number, _ALLOWED):
            ranges.pop()
        if not ranges or ranges[-1][1] != step:
            ranges.append((number, step))
        if number + 1 not in numbers:
            ranges.append((number + 1, _ALLOWED))
    unknown = _ALLOWED if trusted else _NO_CALL
    ranges.append((NEWEST + 1, unknown))
    often = [NUMBERS[name][column] for name in _OFTEN]
    return assemble(load(ARCH_AT, equal(_AUDIT_ARCH[machine],
                                        load(NUMBER_AT, binary_search(ranges, often)), unknown)))


def _special(namespaced: bool, network: bool, ids: tuple[int, int], sampled: bool,
             password: bool) -> dict[str, FilterStep]:
    """The calls that are not simply allowed, by name."""
    table: dict[str, FilterStep] = dict.fromkeys(_NEVER.split(), _REFUSED)
    table["clone3"] = _NO_CALL  # a filter cannot read its flags; libc falls back to clone
    table["clone"] = _refuse_bits(0, _NEW_NAMESPACE)
    table["unshare"] = _refuse_bits(0, _NEW_NAMESPACE | _NEW_TIME)
    table["fcntl"] = _refuse_values(1, _SETLEASE, _SETDELEG)
    table["ioctl"] = _refuse_values(1, _TIOCSTI, _TIOCLINUX)
    table["prctl"] = _stays_dumpable()
    table["socket"] = _families(namespaced, network)
    table.update(_file_modes(namespaced, password))
    if sampled:
        table.update(dict.fromkeys(f"{_UNOWNED} {_SHARED_BY_KEY}".split(), _NO_CALL))
    if namespaced:
        return table
    table.update(dict.fromkeys(_NOT_TO_NEIGHBOURS.split(), _REFUSED))
    table.update(dict.fromkeys(_ATTRIBUTES.split(), answer(_ERRNO | errno.EOPNOTSUPP)))
    table.update(dict.fromkeys((*_SHARED_BY_KEY.split(), *_WATCHES), _NO_CALL))
    for name, owner in {"chown": 1, "lchown": 1, "fchown": 1, "fchownat": 2}.items():
        table[name] = _keeps_owner(owner, *ids)
    table["kill"] = _refuse_values(0, _EVERYBODY)
    table["setpriority"] = _own_priority()
    table["prlimit64"] = _own_limits()
    table["socketpair"] = _pairs()
    if not network:
        table["connect"] = _DENIED
    return table


def _like_root(trusted: bool, several: bool) -> dict[str, FilterStep]:
    """The calls that user 0 makes and that have no effect where it is the only user. The rest of
    the file modes is free: no mount of such a sandbox honours set-uid bits.
    """
    table = {} if several else dict.fromkeys(_OF_USERS.split(), _FAKED)
    for name, mode in {"mknod": 1, "mknodat": 2}.items():
        table[name] = low(mode, masked(_S_IFMT, one_of(_DEVICES, _FAKED, _ALLOWED)))
    free = "chmod fchmod fchmodat fchmodat2 creat mkdir mkdirat open openat openat2"
    return table if trusted else table | dict.fromkeys(free.split(), _ALLOWED)


def _small_shared_memory() -> dict[str, FilterStep]:
    """Allows System V shared memory in segments of less than a page, because PostgreSQL needs one
    as a lock. This memory is not measured, but the kernel's 4096 segments take 16 MiB at most.
    """
    above = any_bit(0xFFFFFFFF, _NO_CALL, _ALLOWED)
    return {"shmget": low(1, any_bit(0xFFFFF000, _NO_CALL, high(1, above))),
            "shmat": _ALLOWED, "shmctl": _ALLOWED}


# ---- what decides by the arguments of a call ----


def _refuse_bits(argument: int, bits: int) -> FilterStep:
    return low(argument, any_bit(bits, _REFUSED, _ALLOWED))


def _refuse_values(argument: int, *values: int) -> FilterStep:
    """Refuses some values of an argument. The kernel takes these arguments as 32-bit numbers, so
    the upper half must not count.
    """
    return low(argument, one_of(values, _REFUSED, _ALLOWED))


def _file_modes(namespaced: bool, password: bool) -> dict[str, FilterStep]:
    """The calls that give a file its mode: set-uid and set-gid bits are refused. Without namespaces
    a `ModeKeeper` changes modes, as it sees where the file lies.
    """
    changed = _ALLOWED if namespaced else answer(_NOTIFY)
    mode_at = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2}
    table = {name: _without_set_id(at, changed) for name, at in mode_at.items()}
    if password:
        table["fchmodat"] = _without_set_id(2, _lets_pass(changed))
    made_at = {"creat": 1, "mkdir": 1, "mkdirat": 2, "mknod": 1, "mknodat": 2}
    table |= {name: _without_set_id(at, _ALLOWED) for name, at in made_at.items()}
    for name, at in {"open": 1, "openat": 2}.items():
        table[name] = low(at, any_bit(_MAKES_A_FILE, _without_set_id(at + 1, _ALLOWED), _ALLOWED))
    table["openat2"] = _NO_CALL  # its mode is in memory; programs then use openat
    return table


def _without_set_id(mode: int, otherwise: FilterStep) -> FilterStep:
    return low(mode, any_bit(_SET_ID, _REFUSED, otherwise))


def _lets_pass(otherwise: FilterStep) -> FilterStep:
    """Allows a call that carries the password in its last two arguments. The four words of the
    password are holes, so that one filter serves many sandboxes.
    """
    step = high(5, equal(-4, _ALLOWED, otherwise))
    step = low(5, equal(-3, step, otherwise))
    step = high(4, equal(-2, step, otherwise))
    return low(4, equal(-1, step, otherwise))


def _families(namespaced: bool, network: bool) -> FilterStep:
    """Which sockets can be created.

    Common families get EACCES, which socket(2) gives for "not allowed": programs then go on without
    a network, or say so. All others get EAFNOSUPPORT, as from a kernel without them. A Unix socket
    could connect to anything that this user runs (munge, D-Bus), which Landlock does not see.
    """
    inet, unix = [socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK], [socket.AF_UNIX]
    rest = one_of(unix, _ALLOWED if namespaced else _DENIED, answer(_ERRNO | errno.EAFNOSUPPORT))
    return low(0, one_of(inet, _ALLOWED if namespaced or network else _DENIED, rest))


def _pairs() -> FilterStep:
    """Allows pairs of connected Unix sockets, but no datagrams: those could still be sent anywhere.
    """
    connected = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
    kind = low(1, masked(0xF, one_of(connected, _ALLOWED, _DENIED)))
    return low(0, equal(socket.AF_UNIX, kind, _DENIED))


def _keeps_owner(argument: int, uid: int, gid: int) -> FilterStep:
    """Answers a change to the own user and group with success, without a call: a real call would
    clear the set-id bits of the named file, or change its group, wherever it lies. Others are
    refused.
    """
    group = low(argument + 1, one_of((gid, _UNCHANGED), answer(_ERRNO), _REFUSED))
    return low(argument, one_of((uid, _UNCHANGED), group, _REFUSED))


def _stays_dumpable() -> FilterStep:
    """Answers a wish to be not dumpable with success, without a call. Programs that keep keys make
    it, and go on as they do where it fails; the sandbox's init must see which files they hold open.
    """
    return low(0, equal(_SET_DUMPABLE, low(1, equal(1, _ALLOWED, _FAKED)), _ALLOWED))


def _own_priority() -> FilterStep:
    return low(0, equal(0, low(1, equal(0, _ALLOWED, _REFUSED)), _REFUSED))


def _own_limits() -> FilterStep:
    """Allows limits of pid 0, and reading: libc's setrlimit and the shells need no more."""
    read = low(2, equal(0, high(2, equal(0, _ALLOWED, _REFUSED)), _REFUSED))
    return low(0, equal(0, _ALLOWED, read))
