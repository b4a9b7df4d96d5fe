"""Reads, writes and lists files beneath one directory, whatever its user has put there.

A sandbox's files are accessed from outside of it, so links in them may not lead out of its
directory. A walk opens one directory after the other and keeps all of them open: a link that is
exchanged meanwhile changes nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from ...protocol.payload import FileEntry
from ...protocol.process_frames import FILE_MAX
from . import modes

ENTRIES_MAX = 100_000  # of one listing
_LINKS_MAX = 40
_DEPTH_MAX = 512  # nested directories; a walk holds each of them open
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PathRefused(Exception):
    """The path cannot be used; the text is one line that names it and says why."""


class TooDeep(PathRefused):
    """The path has more directories than a walk may hold open."""


def read(home: str, path: str) -> bytes:
    """Returns a file's content.

    Raises:
        Refused: it does not exist, is not a plain file, is too large, or lies outside `home`.
    """
    folder, name = _walk(home, path, make=False)
    try:
        fd = _open(folder, name, os.O_RDONLY, path)
    finally:
        os.close(folder)
    with open(fd, "rb", buffering=0) as file:
        size = os.fstat(fd).st_size
        if size > FILE_MAX:
            raise PathRefused(f"{path}: {size} bytes are more than one read may carry ({FILE_MAX})")
        try:
            return file.read(FILE_MAX) if size else b""
        except OSError as error:
            raise PathRefused(f"{path}: {error.strerror}") from None


def write(home: str, path: str, data: bytes, mode: int) -> None:
    """Writes a file; missing directories on the way are made.

    Raises:
        Refused: it cannot be written, or lies outside `home`.
    """
    folder, name = _walk(home, path, make=True)
    try:
        fd = _open(folder, name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, path)
    finally:
        os.close(folder)
    with open(fd, "wb", buffering=0) as file:
        try:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            modes.change_open(fd, mode & 0o777)  # the umask is tighter than the mode asked for
        except OSError as error:
            raise PathRefused(f"{path}: {error.strerror}") from None


def mkdir(home: str, path: str) -> None:
    """Makes a directory and missing ones on the way; an existing one is accepted.

    Raises:
        Refused: it cannot be made, or lies outside `home`.
    """
    if _parts(path):
        os.close(_folder(home, path, make=True))


def listing(home: str, path: str) -> Iterator[FileEntry]:
    """Yields everything beneath a directory, without following links, parents before their entries;
    for a file, its one entry.

    Raises:
        Refused: the path does not exist, lies outside `home`, holds more than a listing may, lies
            deeper than a walk may go, or a name is not UTF-8.
    """
    for found, entry in enumerate(_entries(home, path)):
        if found == ENTRIES_MAX:
            raise PathRefused(
                f"{path or '.'}: more than {ENTRIES_MAX} entries; name a folder below it")
        try:
            entry.name.encode()
        except UnicodeEncodeError:
            raise PathRefused(
                f"{entry.name!r}: its name is not UTF-8; rename or remove it") from None
        yield entry


def _entries(home: str, path: str) -> Iterator[FileEntry]:
    if not _is_folder(home, path):
        folder, name = _walk(home, path, make=False)
        try:
            yield _entry("", os.lstat(name, dir_fd=folder))
        except OSError as error:
            raise PathRefused(_why(path, error)) from None
        finally:
            os.close(folder)
        return
    todo = [""]
    while todo:
        below = todo.pop()
        try:
            here = _folder(home, f"{path or '.'}/{below}", make=False)
        except PathRefused as error:
            if not below or isinstance(error, TooDeep):
                raise
            continue  # it is gone, or closed to its owner
        try:
            for name in sorted(os.listdir(here)):
                entry = _entry(f"{below}/{name}".lstrip("/"), os.lstat(name, dir_fd=here))
                yield entry
                if entry.kind == "dir":
                    todo.append(entry.name)
        except OSError:
            continue
        finally:
            os.close(here)


def _entry(name: str, about: os.stat_result) -> FileEntry:
    kind = "other"
    for test, word in ((stat.S_ISREG, "file"), (stat.S_ISDIR, "dir"), (stat.S_ISLNK, "link")):
        if test(about.st_mode):
            kind = word
    return FileEntry(name, kind, about.st_size if kind == "file" else 0, about.st_mode & 0o777)


def _is_folder(home: str, path: str) -> bool:
    try:
        os.close(_folder(home, path, make=False))
    except PathRefused:
        return False
    return True


def _folder(home: str, path: str, make: bool) -> int:
    """Opens the directory of this path. A link as its last part is followed within `home`."""
    if not _parts(path):
        return os.open(home, _DIRECTORY)
    folder, name = _walk(home, path, make)
    try:
        return _step(folder, name, make, path)
    finally:
        os.close(folder)


def _open(folder: int, name: str, flags: int, path: str) -> int:
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO must not block
    try:
        fd = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        raise PathRefused(_why(path, error)) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PathRefused(f"{path}: not a plain file")
    return fd


def _why(path: str, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return f"no such file: {path}"
    if error.errno == errno.ENXIO:
        return f"{path}: not a plain file"
    return f"{path}: {error.strerror}"


def _walk(home: str, path: str, make: bool) -> tuple[int, str]:
    """Follows all links; returns the open directory that holds the path's last part, and that part.
    """
    if os.path.isabs(path) or ".." in path.split("/") or "\0" in path:
        raise PathRefused(
            f"{path}: leaves the session's directory; use a relative path without '..'")
    todo = _parts(path)
    if not todo:
        raise PathRefused(f"{path or '.'}: not a plain file")
    try:
        held = [os.open(home, _DIRECTORY)]
    except OSError as error:
        raise PathRefused(_why(path, error)) from None
    links = 0
    try:
        while True:
            name = todo.pop(0)
            if name == "..":
                if len(held) == 1:
                    raise PathRefused(f"{path}: a link in it leaves the session's directory")
                os.close(held.pop())
            elif (target := _link(held[-1], name)) is not None:
                links += 1
                if links > _LINKS_MAX:
                    raise PathRefused(f"{path}: too many links")
                todo = _follow(home, path, target, held) + todo
            elif not todo:
                return os.dup(held[-1]), name
            elif len(held) > _DEPTH_MAX:
                raise TooDeep(f"{path[:40]}...: more than {_DEPTH_MAX} nested directories")
            else:
                held.append(_step(held[-1], name, make, path))
            if not todo:
                raise PathRefused(f"{path}: not a plain file")
    finally:
        for fd in held:
            os.close(fd)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _link(folder: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        return None


def _follow(home: str, path: str, target: str, held: list[int]) -> list[str]:
    """The parts of a link's target. An absolute target must lie beneath `home`, and the walk begins
    there again.
    """
    if not os.path.isabs(target):
        return _parts(target)
    if not target.startswith(home + "/"):
        raise PathRefused(f"{path}: a link in it leaves the session's directory")
    while len(held) > 1:
        os.close(held.pop())
    return _parts(target[len(home) :])


def _step(folder: int, name: str, make: bool, path: str) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=folder)
    except OSError as error:
        if not make or error.errno != errno.ENOENT:
            raise PathRefused(_why(path, error)) from None
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
        return os.open(name, _DIRECTORY, dir_fd=folder)
    except OSError as error:
        raise PathRefused(_why(path, error)) from None
