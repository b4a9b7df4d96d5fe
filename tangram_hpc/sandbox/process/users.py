"""Decides as which user a command of a sandbox runs, and which variables it gets for that user.

A session that may write its image has user 0. If its namespace has other users too, a command runs
with the numbers of the user that it asks for. If user 0 is the only user, the command gets the
HOME, USER, LOGNAME and SHELL of that user, but keeps the number 0. In every other sandbox the only
user is the worker's, and commands cannot ask for another. The image is not trusted: its /etc/passwd
and /etc/group are read as plain files of bounded size.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from ...protocol.payload import ExecCall
from ..user_namespace import SPAN, UserMap
from .unstartable import Unstartable

_PASSWD, _GROUP = "/etc/passwd", "/etc/group"
_PASSWD_MAX = 4 << 20  # bytes
_DIGITS_MAX = 10  # of a user's number
_GROUPS_MAX = 256  # of one user
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class UnknownUser(Unstartable):
    """The command cannot run as that user; the text is one line that says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(126, reason)


class Identity(NamedTuple):
    """The numbers that a process runs with: its user, its group and its further groups."""

    uid: int
    gid: int
    groups: tuple[int, ...]


class CommandUser(NamedTuple):
    """The user of a command.

    Attributes:
        env: the variables that the command gets because of its user.
        identity: the numbers that it runs with; None for those of its init.
    """

    env: dict[str, str]
    identity: Identity | None


@dataclass(frozen=True)
class _Account:
    name: str
    uid: int
    gid: int
    home: str
    shell: str


_NOBODY_ASKED = CommandUser({}, None)


def of_image(user: str) -> str:
    """Returns the user that an image names; empty for user 0, so that /etc/passwd need not be read.
    """
    return "" if user.partition(":")[0] in ("root", "0") else user


def user_of(call: ExecCall, users: UserMap | None, default: str = "") -> CommandUser:
    """Decides as which user a command runs.

    Args:
        call: the command.
        users: the users of a sandbox that may write its image; None for another sandbox.
        default: the user that the image names, for a command that names none.

    Raises:
        UnknownUser: the image has no such user, or the sandbox cannot run it.
    """
    several = users is not None and users.several
    asked = call.user or (default if users is not None else "")
    if not asked:
        return _NOBODY_ASKED
    if users is None:
        if asked in (str(os.geteuid()), _own_name()):
            return _NOBODY_ASKED
        raise UnknownUser(f"user: {asked!r} is not the user of this session's worker; only a "
                          "session with an image and writable=True has users of its own")
    name, _, group = asked.partition(":")
    try:
        account = _find(name)
    except UnknownUser:  # a number need not be in /etc/passwd, as with container programs
        if not name.isdecimal() or len(name) > _DIGITS_MAX or not (several or not call.user):
            raise
        account = _Account("", int(name), 0, "/", "")
    if not several:
        if call.real_user and account.uid:
            raise UnknownUser(f"user: {asked!r} cannot have its number {account.uid} here, as "
                              "root is the only user of the sandbox; leave out real_user to run it "
                              "as root with that user's environment")
        return CommandUser(_variables(account), None)
    return CommandUser(_variables(account), _identity(asked, account, group))


def _identity(asked: str, account: _Account, group: str) -> Identity | None:
    """Returns the numbers of an account, with another group if one was asked for."""
    gid, groups = account.gid, _groups_of(account)
    if group:
        gid, groups = _group(group), ()
    if max(account.uid, gid) >= SPAN:
        raise UnknownUser(f"user: {asked!r} has the numbers {account.uid}:{gid}, and the users of "
                          f"a sandbox are those below {SPAN}")
    if account.uid == gid == 0:
        return None  # the command runs as its init does, and so without other groups
    return Identity(account.uid, gid, groups)


def _group(asked: str) -> int:
    for name, number, _ in _groups():
        if asked in (name, str(number)):
            return number
    if asked.isdecimal() and len(asked) <= _DIGITS_MAX:
        return int(asked)
    raise UnknownUser(f"user: the image has no group {asked!r} in {_GROUP}")


def _groups_of(account: _Account) -> tuple[int, ...]:
    """Returns the groups of a user, without those that its sandbox does not have."""
    found = (number for _, number, members in _groups()
             if account.name and account.name in members and number < SPAN)
    return tuple(dict.fromkeys((account.gid, *found)))[:_GROUPS_MAX]


def _groups() -> Iterator[tuple[str, int, list[str]]]:
    for line in _lines(_GROUP):
        fields = line.split(":")
        if len(fields) == 4 and len(fields[2]) <= _DIGITS_MAX and fields[2].isdecimal():
            yield fields[0], int(fields[2]), fields[3].split(",")


def of_root(home: str) -> dict[str, str]:
    """The variables of a sandbox whose user is 0.

    Args:
        home: the value of HOME if the image has no user 0, or if that user's directory is missing.
    """
    try:
        account = _find("0")
    except UnknownUser:
        account = _Account("root", 0, 0, "/root", "")
    variables = _variables(account)
    if not os.path.isdir(variables["HOME"]):
        variables["HOME"] = home
    return {**variables, "PATH": _PATH, "SHELL": "/bin/sh"}


def _variables(account: _Account) -> dict[str, str]:
    name = account.name or str(account.uid)
    return {"USER": name, "LOGNAME": name, "HOME": account.home or "/",
            "SHELL": account.shell or "/bin/sh"}


def _own_name() -> str:
    return os.environ.get("USER", "")


def _find(user: str) -> _Account:
    """The account of a name or a number."""
    for line in _lines(_PASSWD):
        fields = line.split(":")
        if len(fields) == 7 and user in (fields[0], fields[2]) and (
                len(fields[2]) <= _DIGITS_MAX and fields[2].isdecimal()):
            gid = int(fields[3]) if len(fields[3]) <= _DIGITS_MAX and fields[3].isdecimal() else 0
            return _Account(fields[0], int(fields[2]), gid, fields[5], fields[6])
    raise UnknownUser(f"user: the image has no user {user!r} in {_PASSWD}")


def _lines(path: str) -> list[str]:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO must not block
    with suppress(OSError):
        fd = os.open(path, flags)
        with open(fd, "rb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return file.read(_PASSWD_MAX).decode(errors="replace").split("\n")
    return []
