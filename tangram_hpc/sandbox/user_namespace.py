"""Maps users of a sandbox to users of the node, and makes user namespaces with such maps.

An ordinary user may map one user number without help: its own, which is user 0 inside. A site can
lend it a range of further numbers (/etc/subuid, /etc/subgid, and the set-user-ID programs newuidmap
and newgidmap): then the namespace has 65536 users. A worker that is root maps the first 65536
numbers of the node to themselves.

This file also runs as a program, which runs a command in such a namespace: the command may read,
copy and remove the files of all users of a sandbox. The file imports nothing of the package, so
that the program starts quickly. It must not change anything outside of the calling process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

SPAN = 65536  # users of a namespace that has several: Debian's `nobody` is 65534
NEW_USER = 0x10000000  # CLONE_NEWUSER
_PROGRAMS = ("newuidmap", "newgidmap")
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_FILES = ("/etc/subuid", "/etc/subgid")
_PR_SET_DUMPABLE, _PR_GET_NO_NEW_PRIVS = 4, 39

_libc = ctypes.CDLL(None, use_errno=True)


class UserMap(NamedTuple):
    """Which numbers on the node the users and groups of a namespace have.

    Attributes:
        uids: the map of users in the form of /proc/PID/uid_map, all triples in one text: the first
            number inside, the first number outside, and how many consecutive numbers are mapped.
        gids: the map of groups in the same form.
    """

    uids: str
    gids: str

    @property
    def several(self) -> bool:
        """Whether the namespace has more users than user 0."""
        return self.uids.split()[2:] != ["1"]

    def outside(self) -> tuple[tuple[range, ...], tuple[range, ...]]:
        """Returns which users and which groups of the node are in the namespace."""
        return _outside(self.uids), _outside(self.gids)


def _outside(text: str) -> tuple[range, ...]:
    words = [int(word) for word in text.split()]
    return tuple(range(first, first + count)
                 for first, count in zip(words[1::3], words[2::3], strict=True))


class NoRange(Exception):
    """Raised when this user may map no users but itself; the text is one line that says why."""


def own() -> UserMap:
    """Returns the map that any user may make: this process's user is user 0, and the only user."""
    return UserMap(f"0 {os.geteuid()} 1", f"0 {os.getegid()} 1")


def several() -> UserMap:
    """Returns the map with `SPAN` users that this process may make.

    Raises:
        NoRange: this process may make no such map.
    """
    if os.geteuid() == 0:
        return UserMap(f"0 0 {SPAN}", f"0 0 {SPAN}")
    for program in _PROGRAMS:
        if not shutil.which(program):
            raise NoRange(f"{program} is not installed (Debian: package uidmap)")
    if _libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1:
        raise NoRange("no_new_privs is set, so set-user-ID programs such as newuidmap do nothing")
    names = _own_names()
    uids, gids = ((f"0 {first} 1", _ranges(path, names)) for path, first in zip(
        _FILES, (os.geteuid(), os.getegid()), strict=True))
    return UserMap(" ".join((uids[0], *uids[1])), " ".join((gids[0], *gids[1])))


def _own_names() -> frozenset[str]:
    names = {str(os.geteuid())}
    with suppress(KeyError):
        names.add(pwd.getpwuid(os.geteuid()).pw_name)
    return frozenset(names)


def _ranges(path: str, names: frozenset[str]) -> list[str]:
    """Returns the triples of a map for the users from 1 on, as one of `_FILES` grants them."""
    found, inside = list[str](), 1
    try:
        with open(path) as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise NoRange(f"{path}: {error.strerror}") from None
    for line in lines:
        name, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if name in names and first.isdecimal() and count.isdecimal() and inside < SPAN:
            taken = min(int(count), SPAN - inside)
            found.append(f"{inside} {first} {taken}")
            inside += taken
    if inside < SPAN:
        raise NoRange(f"{path} gives this user {inside - 1} numbers, and {SPAN - 1} are needed")
    return found


class OutsideMaps:
    """Lets a process outside of a new user namespace write the maps of the process inside, because
    only a process outside may map more than one user. Make it before one of the two is forked.
    """

    def __init__(self, users: UserMap) -> None:
        self._users = users
        (self._asked, self._ask), (self._answer, self._answered) = os.pipe(), os.pipe()
        self._open = {self._asked, self._ask, self._answer, self._answered}

    def wait(self) -> None:
        """Waits, inside, until both maps are written. Raises OSError if they cannot be."""
        self._close(self._answered)
        os.write(self._ask, b"x")
        if not os.read(self._answer, 1):
            raise OSError(errno.EPERM, "user namespace: newuidmap or newgidmap refused to map its "
                                       "users")

    def write(self, pid: int) -> None:
        """Writes, outside, the maps of process `pid` as soon as it waits for them; returns if it
        ends without that."""
        self._close(self._ask)
        with suppress(OSError):
            if os.read(self._asked, 1) and not _write_maps(pid, self._users):
                os.write(self._answered, b"x")
        self.close()

    def close(self) -> None:
        """Closes the pipes of this process, so that a process that waits at the other end goes
        on."""
        for fd in list(self._open):
            self._close(fd)

    def _close(self, fd: int) -> None:
        self._open.discard(fd)
        os.close(fd)


def enter(users: UserMap, flags: int = 0, outside: OutsideMaps | None = None) -> None:
    """Takes this process into a new user namespace, in which it is user 0 with all capabilities,
    and into further namespaces that belong to it. This process must have one thread.

    Args:
        users: the users of the namespace.
        flags: further namespaces that are made, as unshare(2) takes them.
        outside: asks the process that has the same object and calls its `write`; None to fork a
            process for that, if one is needed.

    Raises:
        OSError: the kernel or newuidmap refuses.
    """
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else root owns the files that are written here
    if not users.several:
        _unshare(flags)
        write_setting("/proc/self/setgroups", "deny")
        write_setting("/proc/self/uid_map", users.uids)
        write_setting("/proc/self/gid_map", users.gids)
        return
    if outside is not None:
        _unshare(flags)
        outside.wait()
    else:
        with waiting(), _helper(OutsideMaps(users)) as outside:
            _unshare(flags)
            outside.wait()
    become_root()


def _unshare(flags: int) -> None:
    if _libc.unshare(NEW_USER | flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"user namespace: {os.strerror(code)}")


@contextmanager
def _helper(outside: OutsideMaps) -> Iterator[OutsideMaps]:
    """Forks a process that writes the maps of this one, and waits for its end."""
    inside = os.getpid()
    helper = os.fork()
    if helper == 0:
        with suppress(OSError):
            outside.write(inside)
        os._exit(0)
    try:
        yield outside
    finally:
        outside.close()
        os.waitpid(helper, 0)


def become_root() -> None:
    """Makes this process user 0 and group 0 of its namespace, and drops its supplementary groups:
    no user of the namespace should hold groups of the node."""
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _write_maps(pid: int, users: UserMap) -> int:
    """Writes both maps of a process; returns 0 if that succeeded."""
    if os.geteuid() == 0:
        for name, text in (("uid_map", users.uids), ("gid_map", users.gids)):
            write_setting(f"/proc/{pid}/{name}", text)
        return 0
    with waiting():
        started = [os.posix_spawn(shutil.which(program, path=_PATH) or program,
                                  [program, str(pid), *text.split()], {"PATH": _PATH})
                   for program, text in zip(_PROGRAMS, users, strict=True)]
        return sum(os.waitpid(program, 0)[1] for program in started)


def write_setting(path: str, text: str) -> None:
    """Writes a file of /proc in one write, as the kernel wants it. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


@contextmanager
def waiting() -> Iterator[None]:
    """Restores the default action of SIGCHLD for a while: a process that ignores this signal cannot
    wait for its children.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


# ---- commands in such a namespace ----


def prefix(users: UserMap) -> tuple[str, ...]:
    """Returns the argv prefix of a command that runs as user 0 of a new namespace with these users.
    The prefix is empty if this process is root."""
    if os.geteuid() == 0:
        return ()
    if not users.several:
        return "unshare", "--user", "--map-root-user", "--"
    # -I -S: nothing but the standard library is read
    return sys.executable, "-I", "-S", os.path.abspath(__file__), *users, "--"


def works(users: UserMap) -> bool:
    """Returns whether a namespace with these users can be made. Blocks."""
    import subprocess  # here, not above: see `run_program`

    try:
        return not subprocess.run([*prefix(users), "true"], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  check=False).returncode
    except OSError:
        return False


def remove(users: UserMap, path: str) -> bool:
    """Removes a folder with the files of several users; returns whether it is gone. Blocks."""
    import subprocess

    done = subprocess.run([*prefix(users), "rm", "-rf", "--", path], stdin=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0 and not os.path.lexists(path)


def main(uids: str, gids: str, command: Sequence[str]) -> None:
    """Enters a new namespace and executes a command there."""
    os.umask(0o022)
    try:
        enter(UserMap(uids, gids))
        os.execvp(command[0], list(command))
    except OSError as error:
        sys.exit(f"{error.strerror or error}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[4:])
