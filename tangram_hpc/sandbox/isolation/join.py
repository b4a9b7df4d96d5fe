"""Enters another process's namespaces for good, and gives up its powers over them.

A runtime may nest user namespaces: bwrap as a plain user makes the mounts in an outer one and ends
in an inner one. So they are entered from the outside in. At each user namespace all namespaces are
joined that it owns, as only there this process has the capability for it; the innermost comes last.
No process is started here, and which program made the namespaces is not known.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_libc = ctypes.CDLL(None, use_errno=True)
_NS_GET_USERNS, _NS_GET_PARENT = 0xB701, 0xB702
_KINDS = ("mnt", "pid", "net", "ipc", "uts", "cgroup")
_CAP_VERSION_3 = 0x20080522
_CAP_LAST = "/proc/sys/kernel/cap_last_cap"
_PR_GET_PDEATHSIG, _PR_SET_PDEATHSIG = 2, 1
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_PR_CAPBSET_DROP = 24
_PR_SET_SECUREBITS = 28
_PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS = 38, 39
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_SECURE_ALL_LOCKED = 0xEF  # no root powers, no fix-up, no ambient; each with its lock, no keep-caps
_NESTING_MAX = 32  # the kernel's own limit
_MOUNT_SETATTR, _AT_FDCWD = 442, -100
_READ_ONLY = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # struct mount_attr: MOUNT_ATTR_RDONLY is set
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 2, 4, 32
_CLONE_NEWUSER = 0x10000000


@dataclass(frozen=True)
class _Space:
    fd: int
    kind: str
    inode: tuple[int, int]
    owner: tuple[int, int]


def enter(pid: int, cwd: str = "/", root: str = "", keep: Collection[int] = (),
          hold: Collection[int] = (), read_only: Collection[str] = (),
          sizes: Mapping[str, int] = MappingProxyType({}), own_users: bool = False,
          bar_users: bool = False) -> None:
    """Moves this process into the namespaces and the root directory of process `pid`.

    After that, neither this process nor any program that it starts has a capability, except those
    in `keep`, and its children are born in the pid namespace. This process must have one thread. It
    keeps two of its settings: the signal that it gets at its parent's end, and that it cannot be
    traced.

    Args:
        pid: a process inside.
        cwd: the directory to work in.
        root: a directory beneath the root of `pid` that becomes this process's root; empty for that
            root itself. No part of its path may be made by code that is not trusted.
        keep: the numbers of capabilities that this process and its programs keep in the innermost
            user namespace, and nowhere else.
        hold: the numbers of capabilities that only this process keeps there, and no program that it
            starts.
        read_only: mount points in the root of `pid` that are made read-only if they exist, so that
            nobody can change the mode and the times of the file. A device can still be written.
            With a kernel before 5.12 the mount points stay writable.
        sizes: how many bytes a tmpfs that is mounted at a path in the root of `pid` may take.
        own_users: whether this process also makes a user namespace of its own, inside those that
            it entered and with the same user. Nothing in it may trace `pid`, or open files through
            its folder in /proc, even if `pid` has no capability that it lacks.
        bar_users: whether nobody may make further user namespaces inside those that it entered.

    Raises:
        OSError: it could not enter, or is not inside. This process may be half inside and must end.
    """
    last_cap = _last_cap()
    parent_signal, dumpable = _get(_PR_GET_PDEATHSIG), _prctl(_PR_GET_DUMPABLE)
    opened: list[int] = []
    try:
        top = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(top)
        levels = _user_levels(pid, opened)
        spaces = [_space(pid, kind, opened) for kind in _KINDS]
        mine = {s.kind for s in spaces if s.inode == _inode_of("self", s.kind)}
        self_ns = os.open("/proc/self/ns", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(self_ns)
        own = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(own)
        settings = os.open("/proc/sys", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(settings)
        _walk([s for s in spaces if s.kind not in mine], levels, top, read_only, sizes)
        _check(self_ns, spaces, levels)
        if bar_users:
            _bar_more_users(settings, levels)
        if own_users:
            _make_own_users(own)  # before the root changes: a process with another root may not
        os.fchdir(top)
        if "mnt" not in mine:
            os.chroot(".")
        if root:
            os.chroot(root)
        os.chdir(cwd)
    finally:
        for fd in opened:
            os.close(fd)
    _drop(last_cap, keep, hold)
    if dumpable == 0:
        _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_PDEATHSIG, parent_signal)


def capabilities() -> int:
    """All capabilities of this process as bits: effective, permitted and inheritable together."""
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    if _libc.capget(header, data) != 0:
        raise _error("capget")
    low, high = data[0] | data[1] | data[2], data[3] | data[4] | data[5]
    return int(low | high << 32)


# ---- entering ----


def _user_levels(pid: int, opened: list[int]) -> list[int]:
    """The user namespaces between ours and that of `pid`, outermost first; empty when it is ours.
    """
    ours = _inode_of("self", "user")
    levels: list[int] = []
    fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    opened.append(fd)
    while _inode(fd) != ours:
        levels.insert(0, fd)
        if len(levels) > _NESTING_MAX:
            raise OSError(errno.EPERM, "its user namespace is not beneath ours")
        fd = fcntl.ioctl(fd, _NS_GET_PARENT)
        opened.append(fd)
        os.set_inheritable(fd, False)
    return levels


def _space(pid: int, kind: str, opened: list[int]) -> _Space:
    fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    opened.append(fd)
    try:
        owner = fcntl.ioctl(fd, _NS_GET_USERNS)
    except PermissionError:  # it belongs to a user namespace above ours, so it is shared with us
        return _Space(fd, kind, _inode(fd), (0, 0))
    try:
        return _Space(fd, kind, _inode(fd), _inode(owner))
    finally:
        os.close(owner)


def _walk(spaces: list[_Space], levels: list[int], top: int, read_only: Collection[str],
          sizes: Mapping[str, int]) -> None:
    ours = _inode_of("self", "user")
    todo = [s for s in spaces if s.owner != ours]
    for space in spaces:
        if space.owner == ours:
            _setns(space.fd, space.kind)
    for level in levels:
        here = _inode(level)
        _setns(level, "user")
        for space in [s for s in todo if s.owner == here]:
            _setns(space.fd, space.kind)
            todo.remove(space)
            if space.kind == "mnt":  # only here this process has the capability for it
                os.fchdir(top)  # the root of `pid` may be another one than that of its namespace
                for path, size in sizes.items():
                    _limit(path, size)
                for path in read_only:
                    _make_read_only(path)
    if todo:
        raise OSError(errno.EPERM, f"its {todo[0].kind} namespace is not owned by a user namespace "
                                   "that this user may enter (a set-user-ID runtime?)")


def _make_read_only(path: str) -> None:
    """Does it for a path in the root that is the present directory."""
    size = ctypes.sizeof(_READ_ONLY)
    if _libc.syscall(ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD),
                     os.fsencode(path.lstrip("/")), 0,
                     ctypes.byref(_READ_ONLY), ctypes.c_size_t(size)) != 0:
        error = _error(f"{path}: read-only")
        if error.errno not in (errno.ENOSYS, errno.ENOENT, errno.ENOTDIR, errno.EINVAL):
            raise error


def _limit(path: str, size: int) -> None:
    flags = ctypes.c_ulong(_MS_REMOUNT | _MS_NOSUID | _MS_NODEV)
    where = os.fsencode(path.lstrip("/"))
    if _libc.mount(None, where, None, flags, f"size={size}".encode()) != 0:
        raise _error(f"{path} cannot be limited to {size} bytes")


def _bar_more_users(settings: int, levels: list[int]) -> None:
    """Bars further user namespaces in the innermost of `levels`. `settings` is /proc/sys as this
    process saw it before it entered: the one that it sees by now may be read-only.
    """
    if not levels:  # else the whole node could make no user namespaces any more
        raise OSError(errno.EPERM, "it has no user namespace of its own")
    fd = os.open("user/max_user_namespaces", os.O_WRONLY | os.O_CLOEXEC, dir_fd=settings)
    try:
        os.write(fd, b"0")
    finally:
        os.close(fd)


def _make_own_users(own: int) -> None:
    """Makes a user namespace whose only user is this process's own. `own` is its folder in /proc,
    which is not in the /proc that it sees by now.
    """
    maps = {"setgroups": "deny", "uid_map": f"{os.geteuid()} {os.geteuid()} 1",
            "gid_map": f"{os.getegid()} {os.getegid()} 1"}
    if _libc.unshare(_CLONE_NEWUSER) != 0:
        raise _error("a user namespace of its own")
    _prctl(_PR_SET_DUMPABLE, 1)  # else these files belong to root
    for name, text in maps.items():
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=own)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def _setns(fd: int, kind: str) -> None:
    if _libc.setns(fd, 0) != 0:
        raise _error(f"setns of its {kind} namespace")


def _check(self_ns: int, spaces: list[_Space], levels: list[int]) -> None:
    """Compares where this process is with what was opened. /proc is another one by now, in which
    this process has no number, so a descriptor of before is used.
    """
    wanted = {("pid_for_children" if s.kind == "pid" else s.kind): s.inode for s in spaces}
    if levels:
        wanted["user"] = _inode(levels[-1])
    for kind, inode in wanted.items():
        found = os.stat(kind, dir_fd=self_ns)
        if (found.st_dev, found.st_ino) != inode:
            raise OSError(errno.EPERM, f"still outside of its {kind} namespace")


# ---- capabilities ----


def _drop(last_cap: int, keep: Collection[int], hold: Collection[int]) -> None:
    for cap in range(last_cap + 1):
        if cap not in keep and _libc.prctl(_PR_CAPBSET_DROP, cap, 0, 0, 0) != 0:
            raise _error("dropping the bounding set")
    if not keep and not hold:  # user 0 gets what is kept when it starts a program, as root does
        _libc.prctl(_PR_SET_SECUREBITS, _SECURE_ALL_LOCKED, 0, 0, 0)  # one more lock, if allowed
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0)
    kept = sum(1 << cap for cap in {*keep, *hold})
    low, high = kept & 0xFFFFFFFF, kept >> 32
    if _libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)) != 0:
        raise _error("capset")
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _error("no_new_privs")
    if capabilities() != kept or _prctl(_PR_GET_NO_NEW_PRIVS) != 1:
        raise OSError(errno.EPERM, "capabilities are left")


def _last_cap() -> int:
    with open(_CAP_LAST, "rb") as file:
        return int(file.read())


# ---- small calls ----


def _inode(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _inode_of(pid: str, kind: str) -> tuple[int, int]:
    found = os.stat(f"/proc/{pid}/ns/{kind}")
    return found.st_dev, found.st_ino


def _prctl(option: int, value: int = 0) -> int:
    return int(_libc.prctl(option, value, 0, 0, 0))


def _get(option: int) -> int:
    value = ctypes.c_int()
    if _libc.prctl(option, ctypes.byref(value), 0, 0, 0) != 0:
        raise _error("prctl")
    return value.value


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
