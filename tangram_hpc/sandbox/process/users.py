"""Says as which user a command of a sandbox runs, and what its environment tells of that user.

A sandbox has one user number. In a session that may write its image this is 0, and a command that
asks for another user of the image gets that user's HOME, USER, LOGNAME and SHELL, but keeps the
number 0. In every other sandbox it is the number of the worker's user, and no other can be asked
for. The image is not trusted: its /etc/passwd is read as a plain file of bounded size.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass

from ...protocol.payload import ExecCall

_PASSWD = "/etc/passwd"
_PASSWD_MAX = 4 << 20  # bytes
_DIGITS_MAX = 10  # of a user's number
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class UnknownUser(Exception):
    """The command cannot run as that user; the text is one line that says why."""


@dataclass(frozen=True)
class _Account:
    name: str
    uid: int
    home: str
    shell: str


def environment_of(call: ExecCall, rootlike: bool) -> dict[str, str]:
    """The variables that a command gets because of the user that it asks for.

    Args:
        call: the command; without `user` there are none.
        rootlike: whether the sandbox's user is 0, that of an image.

    Raises:
        UnknownUser: the image has no such user, or the sandbox cannot run it.
    """
    if not call.user:
        return {}
    if not rootlike:
        if call.user in (str(os.geteuid()), _own_name()):
            return {}
        raise UnknownUser(f"user: {call.user!r} is not the user of this session's worker; only a "
                          "session with an image and writable=True has users of its own")
    account = _find(call.user)
    if call.real_user and account.uid:
        raise UnknownUser(f"user: {call.user!r} cannot have its number {account.uid} here, as "
                          "root is the only user of the sandbox; leave out real_user to run it as "
                          "root with that user's environment")
    return _variables(account)


def of_root(home: str) -> dict[str, str]:
    """The variables of a sandbox whose user is 0.

    Args:
        home: HOME where the image has no user 0, or that user's directory is not there.
    """
    try:
        account = _find("0")
    except UnknownUser:
        account = _Account("root", 0, "/root", "")
    variables = _variables(account)
    if not os.path.isdir(variables["HOME"]):
        variables["HOME"] = home
    return {**variables, "PATH": _PATH, "SHELL": "/bin/sh"}


def _variables(account: _Account) -> dict[str, str]:
    return {"USER": account.name, "LOGNAME": account.name, "HOME": account.home or "/",
            "SHELL": account.shell or "/bin/sh"}


def _own_name() -> str:
    return os.environ.get("USER", "")


def _find(user: str) -> _Account:
    """The account of a name or a number."""
    for line in _lines():
        fields = line.split(":")
        if len(fields) == 7 and user in (fields[0], fields[2]) and (
                len(fields[2]) <= _DIGITS_MAX and fields[2].isdecimal()):
            return _Account(fields[0], int(fields[2]), fields[5], fields[6])
    raise UnknownUser(f"user: the image has no user {user!r} in {_PASSWD}")


def _lines() -> list[str]:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO must not block
    with suppress(OSError):
        fd = os.open(_PASSWD, flags)
        with open(fd, "rb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return file.read(_PASSWD_MAX).decode(errors="replace").split("\n")
    return []
