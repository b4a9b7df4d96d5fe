"""Reads a settings file only if nobody but its reader and root can have written it.

A settings file decides which code is trusted, where secrets are sent and what a batch script runs,
so whoever can write it can run commands as its reader. The rule is that of ssh: the file and each
folder on its path belong to the reader or to root, and neither the group nor others may write to
them. There are two additions. The owner of a symbolic link on the path counts as well. A folder
with the sticky bit, such as `/tmp`, passes, since nobody but the owner of an entry can replace that
entry. As in ssh, folders above the reader's home are not checked: whoever can replace the home can
replace everything in it.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path

from ..errors import InvalidInput

_LINKS_MAX = 40  # as the kernel's own limit on one path


def read_trusted(path: Path, home: Path, what: str) -> str | None:
    """Returns the text of a file that only this process's user and root can have written.

    Args:
        path: absolute path of the file.
        home: the user's home; folders above it are not checked.
        what: kind of the file, for the error.

    Returns:
        The text; None if there is no such file.

    Raises:
        InvalidInput: another account can write to the file or to a folder on its path, or it cannot
            be read; one line with the remedy.
    """
    try:
        folders, links, real = _way(path)
        real.stat()  # without a file there is nothing to trust, so the folders need no check
        above = set(home.resolve().parents) if home.resolve() in real.parents else set()
        for folder in folders:
            if folder not in above:
                _check(folder, folder.stat(), path, what)
        for link in links:
            if link.parent not in above:
                _check_owner(link, link.lstat(), path, what)
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, encoding="utf-8") as file:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise InvalidInput(f"{what} {path}: it is not a regular file")
            _check(real, about, path, what)
            return file.read()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise InvalidInput(f"{what} {path}: not a text file") from None
    except OSError as error:
        raise InvalidInput(f"{what} {path}: {error.strerror}") from None


def _way(path: Path) -> tuple[list[Path], list[Path], Path]:
    """Returns the folders and symbolic links on the path of a file, and its path without links."""
    at, pending = Path("/"), list(reversed(path.parts[1:]))
    folders, links = [at], []
    while pending:
        part = pending.pop()
        if part == "..":
            at = at.parent
            continue
        step = at / part
        if not step.is_symlink():
            at = step
            if pending:
                folders.append(at)
            continue
        links.append(step)
        if len(links) > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = step.readlink()
        if target.is_absolute():
            at = Path("/")
        pending += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return folders, links, at


def _check(part: Path, about: os.stat_result, path: Path, what: str) -> None:
    _check_owner(part, about, path, what)
    sticky = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        whose = "others" if about.st_mode & stat.S_IWOTH else "its group"
        raise InvalidInput(f"{what} {path}: refused, since {whose} can write to {part} (mode "
                           f"{stat.S_IMODE(about.st_mode):04o}); `chmod go-w {part}`, or remove "
                           "the file")


def _check_owner(part: Path, about: os.stat_result, path: Path, what: str) -> None:
    if about.st_uid in (0, os.geteuid()):
        return
    try:
        owner = pwd.getpwuid(about.st_uid).pw_name
    except KeyError:
        owner = f"user {about.st_uid}"
    raise InvalidInput(f"{what} {path}: refused, since {part} belongs to {owner}, neither to you "
                       "nor to root; make it yours, or remove the file")
