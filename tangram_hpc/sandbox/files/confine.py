"""Reads, writes, lists, moves and removes files for somebody outside of the sandbox, as the
sandbox itself sees them.

An init calls this module after it has isolated itself, so the kernel lets it reach what its
sandbox may reach and nothing else: a container's or bwrap's own root directory, the paths that
Landlock allows, or, for trusted code without isolation, all that its user may. A path begins at
that root when it is absolute, and at the session's directory otherwise.

One thing is open to the init and not to its sandbox: the init's own process, in /proc/self. So this
module walks a path component by component, and the kernel follows no link. A link in /proc that the
kernel would follow to an open file or a root directory is read as the text that it shows, and files
of the init's own /proc directory are refused. A walk keeps all directories on its way open: `..`
goes back to the directory that was walked through, whatever links are exchanged meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from ...protocol.payload import FileEntry
from ...protocol.process_frames import FILE_MAX
from ..environment import beyond_locale
from . import modes, scratch

ENTRIES_MAX = 100_000  # of one listing
_LINKS_MAX = 40
_DEPTH_MAX = 512  # nested directories; a walk holds each of them open
_COPY = 1 << 20  # bytes of a read when a file moves to another file system
# O_PATH needs no right to list a directory, which Landlock refuses for most
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PathRefused(Exception):
    """The path cannot be used; the text is one line that names it and says why.

    Attributes:
        code: the symbolic name of the error, such as "ENOENT".
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = errno.errorcode.get(code, "EIO")


class TooDeep(PathRefused):
    """The path has more directories than a walk may hold open."""


class FilePiece(NamedTuple):
    """A part of a file's content.

    Attributes:
        data: the bytes.
        size: of the whole file, in bytes.
        stamp: changes when the file's content changes.
    """

    data: bytes
    size: int
    stamp: int


def read(home: str, path: str, offset: int = 0, length: int = -1) -> FilePiece:
    """Returns a file's content.

    Args:
        home: the session's directory, where relative paths begin.
        path: the file.
        offset: the first byte.
        length: the most bytes; negative for all that follow.

    Raises:
        PathRefused: the file does not exist, is not a plain file, may not be read, or is larger
            than one message may carry.
    """
    folder, name = _walk(home, path)
    try:
        fd = _open(folder, name, os.O_RDONLY, path)
    finally:
        os.close(folder)
    with open(fd, "rb", buffering=0) as file:
        about = os.fstat(fd)
        rest = max(0, about.st_size - offset)
        if length < 0 and rest > FILE_MAX:
            raise PathRefused(f"{path}: {rest} bytes are more than one read may carry ({FILE_MAX})",
                              errno.EFBIG)
        most = min(length, FILE_MAX) if length >= 0 else FILE_MAX
        try:
            data = _content(file.fileno(), offset, most)
        except OSError as error:
            raise _refused(path, error) from None
    return FilePiece(data, max(about.st_size, offset + len(data)), about.st_mtime_ns)


def _content(fd: int, offset: int, most: int) -> bytes:
    """Reads up to `most` bytes. The size of a file is not used, since files of /proc have none."""
    if offset:
        os.lseek(fd, offset, os.SEEK_SET)
    pieces, got = [], 0
    while got < most and (piece := os.read(fd, most - got)):
        pieces.append(piece)
        got += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def write(home: str, path: str, data: bytes, mode: int, offset: int = 0) -> None:
    """Writes a file; missing directories on the way are made.

    Args:
        home: the session's directory, where relative paths begin.
        path: the file.
        data: its content, or the part of it that begins at `offset`.
        mode: its permission bits.
        offset: the bytes that parts before this one have written. Zero begins the file anew.

    Raises:
        PathRefused: it cannot be written, or does not have `offset` bytes.
    """
    folder, name = _walk(home, path, make=not offset)
    try:
        flags = os.O_WRONLY | (0 if offset else os.O_CREAT | os.O_TRUNC)
        fd = _open(folder, name, flags, path)
    finally:
        os.close(folder)
    with open(fd, "wb", buffering=0) as file:
        try:
            about = os.fstat(fd)
            if offset and about.st_size != offset:
                raise PathRefused(f"{path}: it has changed while it was written; write it again",
                                  errno.EAGAIN)
            os.lseek(fd, offset, os.SEEK_SET)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            if stat.S_IMODE(about.st_mode) != mode & 0o777 and about.st_uid == os.geteuid():
                modes.change_open(fd, mode & 0o777)  # the umask is tighter than the mode asked for
        except OSError as error:
            raise _refused(path, error) from None


def mkdir(home: str, path: str) -> None:
    """Makes a directory and missing ones on the way; an existing one is accepted.

    Raises:
        PathRefused: it cannot be made.
    """
    os.close(folder(home, path))


def folder(home: str, path: str) -> int:
    """Opens a directory for use as `dir_fd`; it and missing ones on the way are made.

    Raises:
        PathRefused: it cannot be made or opened.
    """
    above, name = _walk(home, path, make=True)
    try:
        return _step(above, name, True, path)
    finally:
        os.close(above)


def about(home: str, path: str) -> FileEntry:
    """Returns what a path names. A link at its end is not followed.

    Raises:
        PathRefused: it is not there, or a directory on the way is closed.
    """
    folder, name = _walk(home, path, follow=False)
    try:
        return _entry("" if name == "." else name, name, folder)
    except OSError as error:
        raise _refused(path, error) from None
    finally:
        os.close(folder)


def remove(home: str, path: str) -> None:
    """Removes a file, a link, or a directory with everything in it.

    Raises:
        PathRefused: it is not there, cannot be removed, or is a root or the session's directory.
    """
    folder, name = _walk(home, path, follow=False)
    try:
        found = os.lstat(name, dir_fd=folder)
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=folder)
        elif name == "." or os.path.samestat(found, os.stat(home)):
            raise PathRefused(f"{path}: it cannot be removed as a whole; remove what is in it",
                              errno.EBUSY)
        else:
            scratch.remove_tree(name, folder)
    except OSError as error:
        raise _refused(path, error) from None
    finally:
        os.close(folder)


def move(home: str, path: str, target: str) -> None:
    """Moves a file, link or directory to a new name. A file that has the new name is replaced;
    missing directories on the way to it are made.

    Raises:
        PathRefused: it is not there, cannot be moved, or its target is a directory that is not
            empty.
    """
    folder, name = _walk(home, path, follow=False)
    try:
        try:
            os.lstat(name, dir_fd=folder)
        except OSError as error:
            raise _refused(path, error) from None
        there, new = _walk(home, target, make=True, follow=False)
        try:
            os.rename(name, new, src_dir_fd=folder, dst_dir_fd=there)
        except OSError as error:
            if error.errno == errno.EXDEV:
                return _move_far(folder, name, there, new, path, target)
            raise _refused(f"{path} to {target}", error) from None
        finally:
            os.close(there)
    finally:
        os.close(folder)


def _move_far(folder: int, name: str, there: int, new: str, path: str, target: str) -> None:
    """Moves a file to another file system: copies it beside the target, and then renames the copy,
    so that a target is replaced as a whole or not at all.
    """
    if not stat.S_ISREG(os.lstat(name, dir_fd=folder).st_mode):
        raise PathRefused(f"{path} to {target}: only files can be moved to another file system; "
                          "use the command mv", errno.EXDEV)
    source, copy = _open(folder, name, os.O_RDONLY, path), f".move-{os.urandom(8).hex()}"
    try:
        fd = _open(there, copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, target)
        try:
            _copy(source, fd)
            os.rename(copy, new, src_dir_fd=there, dst_dir_fd=there)
        except OSError:
            os.unlink(copy, dir_fd=there)
            raise
        finally:
            os.close(fd)
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        raise _refused(f"{path} to {target}", error) from None
    finally:
        os.close(source)


def _copy(source: int, fd: int) -> None:
    """Copies an open file with its mode and times."""
    while piece := os.read(source, _COPY):
        view = memoryview(piece)
        while view:
            view = view[os.write(fd, view) :]
    about = os.fstat(source)
    modes.change_open(fd, stat.S_IMODE(about.st_mode) & 0o777)
    os.utime(fd, ns=(about.st_atime_ns, about.st_mtime_ns))


def listing(home: str, path: str, depth: int = 0) -> Iterator[FileEntry]:
    """Yields everything beneath a directory, without following links, parents before their entries;
    for a file, its one entry.

    Args:
        home: the session's directory, where relative paths begin.
        path: the directory or file.
        depth: how many levels; 1 for the entries of the directory alone, 0 for all.

    Raises:
        PathRefused: the path does not exist or may not be listed, holds more than a listing may,
            or lies deeper than a walk may go.
    """
    for found, entry in enumerate(_entries(home, path, depth)):
        if found == ENTRIES_MAX:
            raise PathRefused(f"{path or '.'}: more than {ENTRIES_MAX} entries; name a folder "
                              "below it", errno.E2BIG)
        yield entry


def _entries(home: str, path: str, depth: int) -> Iterator[FileEntry]:
    top = _found_folder(home, path)
    if top is None:
        folder, name = _walk(home, path)
        try:
            yield _entry("", name, folder)
        except OSError as error:
            raise _refused(path, error) from None
        finally:
            os.close(folder)
        return
    os.close(top)
    todo = [("", 1)]
    while todo:
        below, level = todo.pop()
        try:
            here = _listed(home, f"{path or '.'}/{below}")
        except PathRefused as error:
            if not below or isinstance(error, TooDeep):
                raise
            continue  # it is gone, or closed to its owner
        try:
            for name in sorted(os.listdir(here)):
                try:
                    entry = _entry(f"{below}/{name}".lstrip("/"), name, here)
                except FileNotFoundError:
                    continue  # a running process has removed it; the others are still there
                yield entry
                if entry.kind == "dir" and level != depth:
                    todo.append((entry.name, level + 1))
        except OSError:
            continue
        finally:
            os.close(here)


def _entry(shown: str, name: str, folder: int) -> FileEntry:
    """Raises OSError when it is not there."""
    found = os.lstat(name, dir_fd=folder)
    kind = "other"
    for test, word in ((stat.S_ISREG, "file"), (stat.S_ISDIR, "dir"), (stat.S_ISLNK, "link")):
        if test(found.st_mode):
            kind = word
    target = (_link(folder, name) or "") if kind == "link" else ""
    if target != target.encode(errors="ignore").decode():
        target = ""  # not UTF-8: it cannot be told
    if shown != (told := os.fsencode(shown).decode(errors="backslashreplace")):
        shown, kind = told, "other"  # not UTF-8: no call can name it
    return FileEntry(shown, kind, found.st_size if kind == "file" else 0, found.st_mode & 0o777,
                     found.st_mtime_ns, target, found.st_uid, found.st_gid)


def _found_folder(home: str, path: str) -> int | None:
    """Opens the directory of this path; None where the path names something else, or nothing."""
    try:
        folder, name = _walk(home, path)
    except PathRefused:
        return None
    try:
        return os.open(name, _DIRECTORY, dir_fd=folder)
    except OSError:
        return None
    finally:
        os.close(folder)


def _listed(home: str, path: str) -> int:
    """Opens a directory so that it can be listed. A link as its last part is followed."""
    folder, name = _walk(home, path)
    try:
        return os.open(name, _LISTED, dir_fd=folder)
    except OSError as error:
        raise _refused(path, error) from None
    finally:
        os.close(folder)


def _open(folder: int, name: str, flags: int, path: str) -> int:
    """Opens a plain file."""
    with suppress(OSError):
        _must_be_plain(os.lstat(name, dir_fd=folder), path)
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO must not block
    try:
        fd = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        raise _refused(path, error) from None
    try:
        _must_be_plain(os.fstat(fd), path)
        if _is_own(fd):
            raise PathRefused(f"{path}: it belongs to the process that reads it", errno.EACCES)
    except PathRefused:
        os.close(fd)
        raise
    return fd


def _must_be_plain(found: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise PathRefused(f"{path}: it is a directory", errno.EISDIR)
    if not stat.S_ISREG(found.st_mode):
        raise PathRefused(f"{path}: not a plain file", errno.EINVAL)


def _is_own(fd: int) -> bool:
    """Whether a file is in this process's own directory of /proc. In the /proc of another pid
    namespace this process has none.
    """
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(f"/proc/{os.getpid()}/")
    except OSError:
        return False


def _refused(path: str, error: OSError) -> PathRefused:
    number = error.errno or errno.EIO
    if number == errno.ENOENT:
        return PathRefused(f"no such file: {path}", number)
    if number == errno.ENXIO:
        return PathRefused(f"{path}: not a plain file", errno.EINVAL)
    return PathRefused(f"{path}: {error.strerror}", number)


def _walk(home: str, path: str, make: bool = False, follow: bool = True) -> tuple[int, str]:
    """Walks to a path's last part.

    Args:
        home: where a relative path begins.
        path: the path.
        make: whether missing directories are made.
        follow: whether a link as the last part is followed; those before it always are.

    Returns:
        The open directory that holds the last part, and that part: "." if the path ends in `..` or
        is the root.
    """
    if "\0" in path:
        raise PathRefused(f"{path!r}: a path cannot hold a zero byte", errno.EINVAL)
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise PathRefused(f"{path}: {beyond_locale(error)}", errno.EILSEQ) from None
    todo = _parts(path if path.startswith("/") else f"{home}/{path}")
    plain = not path.endswith("/")  # `link/` is what the link leads to
    try:
        held = [os.open("/", _DIRECTORY)]
    except OSError as error:
        raise _refused(path, error) from None
    links = 0
    try:
        while todo:
            name = todo.pop(0)
            if name == "..":
                if len(held) > 1:
                    os.close(held.pop())
            elif not todo and not follow and plain:
                return os.dup(held[-1]), name
            elif (target := _link(held[-1], name)) is not None:
                links += 1
                if links > _LINKS_MAX:
                    raise PathRefused(f"{path}: too many links", errno.ELOOP)
                if target.startswith("/"):
                    while len(held) > 1:
                        os.close(held.pop())
                todo = _parts(target) + todo
            elif not todo:
                return os.dup(held[-1]), name
            elif len(held) > _DEPTH_MAX:
                raise TooDeep(f"{path[:40]}...: more than {_DEPTH_MAX} nested directories",
                              errno.ELOOP)
            else:
                held.append(_step(held[-1], name, make, path))
        return os.dup(held[-1]), "."
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


def _step(folder: int, name: str, make: bool, path: str) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=folder)
    except OSError as error:
        if not make or error.errno != errno.ENOENT:
            raise _refused(path, error) from None
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
        return os.open(name, _DIRECTORY, dir_fd=folder)
    except OSError as error:
        raise _refused(path, error) from None
