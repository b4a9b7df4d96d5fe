"""Scratch directories: making, copying, emptying and removing them, whatever their user left
inside.

Each one holds `home`, where commands begin, `tmp` for temporary files, and files of ours beside the
two. If the session can write its root, the directory also holds `changes`: what the session changed
in its image. Nothing may run in a directory while it is changed here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

from ...errors import DISK_FULL
from .. import user_namespace
from ..run_program import run_program
from ..user_namespace import NoRange, UserMap
from . import modes, small_copy

COPY = ("cp", "-a", "--reflink=auto", "--sparse=always")
_TOLD = 300  # characters of cp's reason that are told


class Uncopied(Exception):
    """A directory could not be copied; the text is one line that says why."""


def why_not(error: OSError) -> str:
    """Says why a scratch directory could not be made or written."""
    text = error.strerror or str(error)
    return f"{text} in the node's scratch folder" if error.errno in DISK_FULL else text


def new_name() -> str:
    """A name that nobody can guess: 128 random bits. Code in a sandbox knows the path of its own
    directory, and so the folder of its neighbours, which it may not list.
    """
    return os.urandom(16).hex()


def own(folder: str | os.PathLike[str]) -> None:
    """Makes a directory of this user accessible to its owner again. Code that ran here before may
    have taken its mode away, and then no worker of this user could start.

    Raises:
        OSError: it does not exist, or cannot be changed.
    """
    about = os.lstat(folder)
    if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and (
            about.st_mode & 0o700 != 0o700):
        os.chmod(folder, stat.S_IMODE(about.st_mode) | 0o700)


def home(path: str) -> str:
    """The part of a scratch directory where commands begin."""
    return f"{path}/home"


def tmp(path: str) -> str:
    """The part of a scratch directory for temporary files."""
    return f"{path}/tmp"


def changes(path: str) -> str:
    """The part of a scratch directory for what its session changed in its image."""
    return f"{path}/changes"


def work(path: str) -> str:
    """The part of a scratch directory that an overlay needs for itself."""
    return f"{path}/work"


def root(path: str) -> str:
    """The part of a scratch directory where the root is mounted, seen only in its sandbox."""
    return f"{path}/root"


def root_record(path: str) -> str:
    """The file of a scratch directory that says what `changes` is; see `image_root`."""
    return f"{path}/root.json"


def users_record(path: str) -> str:
    """Returns the file of a scratch directory that says which users its sandbox has."""
    return f"{path}/users"


def note_users(path: str, users: UserMap) -> None:
    """Notes which users the sandbox of a scratch directory has.

    Raises:
        OSError: it cannot be written.
    """
    fresh = f"{users_record(path)}.new"
    with open(fresh, "w") as file:
        file.write("\n".join(users))
    os.rename(fresh, users_record(path))


def open_to_users(path: str) -> None:
    """Lets the users of a sandbox into the folders of a fresh scratch directory. Nobody outside of
    the sandbox passes the directory itself.
    """
    os.chmod(home(path), 0o755)
    os.chmod(tmp(path), 0o1777)


def users_of(path: str) -> UserMap | None:
    """Returns which users the sandbox of a scratch directory has, if that was noted."""
    try:
        with open(users_record(path)) as file:
            fields = file.read().split("\n")
    except FileNotFoundError:
        return None
    return UserMap(*fields) if len(fields) == len(UserMap._fields) else None


def as_owner(path: str) -> tuple[str, ...]:
    """Returns the argv prefix under which a command may read everything in a scratch directory.

    User 0 of a session may have removed its own permission to read a file, which only a capability
    overrides, and other users of the sandbox may own files there."""
    if not (os.path.exists(root_record(path)) or os.path.exists(changes(path))):
        return ()
    return user_namespace.prefix(users_of(path) or user_namespace.own())


def make(path: str) -> None:
    """Makes a fresh scratch directory that only its owner can enter.

    Raises:
        OSError: it could not be made.
    """
    for each in (path, home(path), tmp(path)):
        os.mkdir(each, 0o700)


def copy(origin: str, path: str) -> None:
    """Fills a fresh scratch directory with the files of another, by reference where the file system
    can.

    Raises:
        Uncopied: not everything could be copied.
    """
    for part in (home, tmp):
        copy_part(origin, f"{part(origin)}/.", part(path))
    if os.path.exists(changes(origin)):  # with its whiteouts and attributes, which `-a` copies
        for part in (changes, root_record):
            copy_part(origin, part(origin), part(path))
    copy_users(origin, path)


def copy_users(origin: str, path: str) -> None:
    """Notes the users of a scratch directory in another one, which has a copy of their files."""
    users = users_of(origin)
    if users is not None:
        note_users(path, users)


def copy_part(owner: str, source: str, target: str) -> None:
    """Copies a part of the scratch directory `owner`. If the source ends in "/.", its content is
    copied into the folder `target`.

    Raises:
        Uncopied: not everything could be copied.
    """
    if source.endswith("/.") and small_copy.copied(source, target):
        return
    done = run_program([*as_owner(owner), *COPY, "-T", source, target])
    if done.returncode:
        why = (done.stderr.decode(errors="replace").strip().splitlines() or ["cp failed"])[0]
        if len(why) > _TOLD:  # a path
            why = f"{why[:_TOLD // 2]}...{why[-_TOLD // 2:]}"
        raise Uncopied(f"fork: {why}")


def empty(*folders: str, keep: frozenset[str] = frozenset()) -> None:
    """Makes used directories empty again.

    Args:
        folders: the directories.
        keep: names directly in them that are mount points and stay.

    Raises:
        OSError: one cannot be emptied.
    """
    for folder in folders:
        if not os.path.isdir(folder) or os.path.islink(folder):
            remove(folder)
            os.mkdir(folder, 0o700)
        elif set(os.listdir(folder)) - keep:
            _strip(folder, keep=keep)


def remove_small(path: str) -> bool:
    """Removes a scratch directory whose `home` and `tmp` are empty; returns whether it is gone."""
    with suppress(OSError):
        more = {"home", "tmp"}
        if any(entry.name not in more and entry.is_dir(follow_symlinks=False)
               for entry in os.scandir(path)):
            return False
        for name in os.listdir(path):
            if not os.path.isdir(os.path.join(path, name)):
                os.unlink(os.path.join(path, name))
        for each in (home(path), tmp(path), path):
            os.rmdir(each)
    return not os.path.lexists(path)


def remove(path: str) -> bool:
    """Removes a directory with everything in it; returns whether it is gone. Files that belong to
    other users of a sandbox are removed in a user namespace, which blocks for longer.
    """
    users = None
    with suppress(OSError, ValueError):  # what is there may not be a record
        users = users_of(path)
    with suppress(OSError):
        _strip(path)
        os.rmdir(path)
    if os.path.isdir(path) and not os.path.islink(path) and os.geteuid() != 0:
        with suppress(NoRange, OSError):
            user_namespace.remove(users or user_namespace.several(), path)
    with suppress(OSError):  # a file or a link stands there instead
        os.unlink(path)
    return not os.path.lexists(path)


def remove_and_end(path: str) -> None:
    """Removes a directory like `remove`, in a process that has one thread and then ends: it becomes
    root of a user namespace itself if the files of several users are there.
    """
    users = users_of(path)
    if users is not None and users.several and os.geteuid() != 0:
        with suppress(OSError):  # if this fails, `remove` starts a program that does the same
            user_namespace.enter(users)
    remove(path)


def remove_tree(name: str, folder: int) -> None:
    """Removes a directory with everything in it.

    Args:
        name: its name.
        folder: the open directory that holds it.

    Raises:
        OSError: something could not be removed.
    """
    fresh = f".{os.urandom(8).hex()}"
    # it is refused where nothing may be removed, before the mode of anything is changed
    _rename(name, folder, fresh, folder)
    try:
        with suppress(OSError):  # what cannot be removed says so below
            _strip(fresh, folder)
        os.rmdir(fresh, dir_fd=folder)
    except OSError:
        os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)
        raise


def _strip(root: str, above: int | None = None, keep: frozenset[str] = frozenset()) -> None:
    """Removes everything in `root`, which is a name in the open directory `above`, or a path; but
    not what `keep` names in `root`. A directory that is not empty is first moved up into `root`, so
    neither its depth nor the length of its path can be too large.
    """
    if not stat.S_ISDIR(os.lstat(root, dir_fd=above).st_mode):  # `change` would follow a link
        raise NotADirectoryError(root)
    modes.change(root, 0o700, above)
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    fresh = map(f".{os.urandom(8).hex()}-{{}}".format, count())  # names that cannot be in use
    try:
        todo = [""]
        while todo:
            name = todo.pop()
            here = top if not name else _enter(name, top)
            try:
                for entry in os.listdir(here):
                    if name or entry not in keep:
                        todo += _drop(entry, here, top, fresh)
            finally:
                if name:
                    os.close(here)
            if name:
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _enter(name: str, top: int) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=top)


def _drop(entry: str, here: int, top: int, fresh: Iterator[str]) -> list[str]:
    """Removes one entry, or moves it up and returns the name that is still to be removed."""
    if not stat.S_ISDIR(os.lstat(entry, dir_fd=here).st_mode):
        os.unlink(entry, dir_fd=here)
        return []
    with suppress(OSError):
        os.rmdir(entry, dir_fd=here)
        return []
    modes.change(entry, 0o700, here)  # its owner may have closed it
    name = next(fresh)
    _rename(entry, here, name, top)
    return [name]


def _rename(entry: str, here: int, name: str, there: int) -> None:
    """Renames a directory that is to be removed. Some file systems (btrfs) refuse this when
    a quota is used up; the files in the directory are then removed first, which makes room."""
    try:
        os.rename(entry, name, src_dir_fd=here, dst_dir_fd=there)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        _remove_files(entry, here)
        os.rename(entry, name, src_dir_fd=here, dst_dir_fd=there)


def _remove_files(entry: str, here: int) -> None:
    """Removes the files in and below a directory where they are, as far as that can be done."""
    with suppress(OSError, RecursionError):  # it is deeper than Python or open files allow
        for _, _, names, folder in os.fwalk(entry, dir_fd=here):
            for name in names:
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
