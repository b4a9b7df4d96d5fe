"""Scratch directories: making, copying, emptying and removing them, whatever their user left
inside.

Each one holds `home`, where commands begin, `tmp` for temporary files, and files of ours beside the
two. That of a session with a root that it can write also holds `changes`, what the session changed
in its image. Nothing may run in a directory while it is changed here.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

from . import modes

COPY = ("cp", "-a", "--reflink=auto", "--sparse=always")
# Root in a session may have closed a file to itself, which only a capability opens again.
_AS_ROOT = ("unshare", "--user", "--map-root-user", "--")


class Uncopied(Exception):
    """A directory could not be copied; the text is one line that says why."""


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


def as_owner(path: str) -> tuple[str, ...]:
    """The first words of a command that may read everything in a scratch directory."""
    return _AS_ROOT if os.path.exists(changes(path)) and os.geteuid() != 0 else ()


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
    pairs = [(f"{part(origin)}/.", part(path)) for part in (home, tmp)]
    if os.path.exists(changes(origin)):  # with its whiteouts and attributes, which `-a` copies
        pairs += [(part(origin), part(path)) for part in (changes, root_record)]
    for source, target in pairs:
        done = subprocess.run([*as_owner(origin), *COPY, "-T", source, target],
                              capture_output=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip().splitlines()
            raise Uncopied(f"fork: {why[0] if why else 'cp failed'}")


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
        for name in os.listdir(path):
            if not os.path.isdir(os.path.join(path, name)):
                os.unlink(os.path.join(path, name))
        for each in (home(path), tmp(path), path):
            os.rmdir(each)
    return not os.path.lexists(path)


def remove(path: str) -> bool:
    """Removes a directory with everything in it; returns whether it is gone."""
    with suppress(OSError):
        _strip(path)
        os.rmdir(path)
    with suppress(OSError):  # a file or a link stands there instead
        os.unlink(path)
    return not os.path.lexists(path)


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
    os.rename(name, fresh, src_dir_fd=folder, dst_dir_fd=folder)
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
    os.rename(entry, name, src_dir_fd=here, dst_dir_fd=top)
    return [name]
