"""Copies trees of files between a local folder and a session.

The names in a listing come from a sandbox and may be anything. Each name is checked before the
first byte is written. A target is reached from the local folder one path component at a time, never
through a link, and a finished file gets its name in one step. At most `WINDOW` files are in memory
at once, and an upload sends at most `BYTES` and one file more ahead.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from ..errors import InvalidInput
from ..protocol.payload import FileEntry
from ..protocol.process_frames import FILE_MAX

WINDOW = 32  # files that are read or written at once
BYTES = 64 << 20  # of files that an upload has sent and that are not known to be written
FILES_MAX = 100_000  # entries of a listing that `download` accepts
_NAME_MAX = 4096


class _Awaited(Protocol):
    def result(self, timeout: float | None = None) -> Any: ...


class Files(Protocol):
    """The methods of a session that this module uses; see `Session`."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> _Awaited:
        """Reads a file, or a part of it."""
        ...

    def write(self, path: str, data: bytes | str, mode: int = 0o644) -> _Awaited:
        """Writes a file."""
        ...

    def listing(self, path: str = "") -> _Awaited:
        """Lists a folder."""
        ...

    def mkdir(self, path: str) -> _Awaited:
        """Makes a folder."""
        ...


# ---- up ----------------------------------------------------------------------------------------


def upload(session: Files, local: str | os.PathLike[str], path: str) -> int:
    """See `Session.upload`."""
    source, count = Path(local), 0
    waiting: deque[tuple[_Awaited, int]] = deque()
    sent = 0
    try:
        for name, file in _sources(source, path):
            if file is None:
                waiting.append((session.mkdir(name), 0))
            else:
                mode, data = stat.S_IMODE(file.stat().st_mode) & 0o777, file.read_bytes()
                waiting.append((session.write(name, data, mode), len(data)))
                sent += len(data)
                count += 1
            while len(waiting) >= WINDOW or (waiting and sent > BYTES):
                first, size = waiting.popleft()
                first.result()
                sent -= size
    except OSError as error:
        raise InvalidInput(f"upload: cannot read {error.filename} ({error.strerror})") from None
    except UnicodeEncodeError:
        raise InvalidInput(f"upload: a name in {source} is not UTF-8; rename it") from None
    for each, _ in waiting:
        each.result()
    return count


def _sources(source: Path, path: str) -> Iterator[tuple[str, Path | None]]:
    """Yields (path in the session, local file); the file is None for an empty folder."""
    if not source.is_dir():
        keeps = not path or path.endswith("/")
        _must_be_file(source, source)
        yield (path + source.name if keeps else path), source
        return
    root = source.resolve()
    base = path.rstrip("/") + "/" if path else ""
    for folder, inner, names in os.walk(source, onerror=_raise):
        here = os.path.relpath(folder, source)
        prefix = base if here == "." else f"{base}{here}/"
        if not inner and not names and prefix:
            yield prefix.rstrip("/"), None
        for name in sorted(names):
            file = Path(folder, name)
            _must_be_file(file, root)
            yield prefix + name, file
        for name in inner:
            if Path(folder, name).is_symlink():
                raise InvalidInput(f"upload: {Path(folder, name)} is a link to a folder; remove "
                                   "the link, or upload that folder itself")


def _must_be_file(file: Path, root: Path) -> None:
    if not stat.S_ISREG(file.stat().st_mode):
        raise InvalidInput(f"upload: {file} is neither a file nor a folder")
    if file.is_symlink() and file != root and not file.resolve().is_relative_to(root):
        raise InvalidInput(f"upload: {file} is a link that leads out of the folder; remove the "
                           "link, or upload its target itself")


def _raise(error: OSError) -> None:
    raise error


# ---- down --------------------------------------------------------------------------------------


def download(session: Files, path: str, local: str | os.PathLike[str], max_bytes: int,
             skip_others: bool) -> int:
    """See `Session.download`."""
    entries = session.listing(path).result()
    target = Path(local)
    base = path.rstrip("/") + "/" if path else ""
    if len(entries) == 1 and not entries[0].name:  # the file itself
        target = target / PurePosixPath(path).name if target.is_dir() else target
        entries, target, base = [_named(entries[0], target.name)], target.parent, ""
    folders, files = checked_entries(entries, skip_others)
    listed = sum(file.size for file in files)
    if listed > max_bytes:
        raise InvalidInput(f"download: {path!r} holds {listed} bytes, more than max_bytes "
                           f"({max_bytes})")
    try:
        target.mkdir(parents=True, exist_ok=True)
        root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidInput(f"download: cannot write to {target} ({error.strerror})") from None
    try:
        for folder in folders:
            os.close(_folder(root, folder.name.split("/")))
        total = 0
        ways = [(file, base + file.name if base or not path else path) for file in files]
        for file, data in _contents(session, ways):
            total += len(data)
            if len(data) > max(file.size, FILE_MAX):
                raise InvalidInput(f"download: {file.name!r} grew while it was copied; download it "
                                   "again")
            if total > max_bytes:
                raise InvalidInput(f"download: {path!r} grew over max_bytes ({max_bytes})")
            _put(root, file, data)
    finally:
        os.close(root)
    return len(files)


def _named(entry: FileEntry, name: str) -> FileEntry:
    return FileEntry(name, entry.kind, entry.size, entry.mode)


def checked_entries(entries: Iterable[FileEntry], skip_others: bool = False
                    ) -> tuple[list[FileEntry], list[FileEntry]]:
    """Checks a listing.

    Args:
        entries: what the sandbox listed.
        skip_others: whether to leave out entries that are neither files nor folders.

    Returns:
        The folders, and the files.

    Raises:
        InvalidInput: a name leads out of the folder, comes twice or is beneath a file; an entry is
            neither a file nor a folder; there are more than `FILES_MAX`.
    """
    seen: dict[str, str] = {}
    found: dict[str, list[FileEntry]] = {"dir": [], "file": []}
    for entry in entries:
        name = entry.name
        if len(seen) >= FILES_MAX:
            raise InvalidInput(f"download: more than {FILES_MAX} files; download parts of it")
        if len(name) > _NAME_MAX or "\0" in name or {"", ".", ".."} & set(name.split("/")):
            raise InvalidInput(f"download: the sandbox lists {name[:80]!r}, which is no path "
                               "beneath the folder")
        if name in seen:
            raise InvalidInput(f"download: the sandbox lists {name!r} twice")
        seen[name] = entry.kind
        if entry.kind in found:
            found[entry.kind].append(entry)
        elif not skip_others:
            what = "a link" if entry.kind == "link" else "neither a file nor a folder"
            raise InvalidInput(f"download: {name!r} is {what}; remove it in the session, or call "
                               "with skip_others=True")
    for name in seen:
        parent = name.rpartition("/")[0]
        if seen.get(parent, "dir") != "dir":
            raise InvalidInput(f"download: the sandbox lists {name!r} beneath {parent!r}, which is "
                               "no folder")
    return found["dir"], found["file"]


def _contents(session: Files, ways: list[tuple[FileEntry, str]]
              ) -> Iterator[tuple[FileEntry, bytes]]:
    """Yields each file with its bytes; up to `WINDOW` further files are being read meanwhile."""
    asked: deque[tuple[FileEntry, _Awaited]] = deque()
    for file, path in ways:
        # a read without a length returns no more than FILE_MAX bytes
        length = None if file.size <= FILE_MAX else file.size + 1
        asked.append((file, session.read(path, length=length)))
        if len(asked) >= WINDOW:
            first, data = asked.popleft()
            yield first, data.result()
    for first, data in asked:
        yield first, data.result()


def _folder(root: int, parts: list[str]) -> int:
    """Opens a folder beneath another one, and makes folders that are missing on the way.

    Args:
        root: the descriptor of the upper folder.
        parts: the components of the path.

    Returns:
        A descriptor that the caller closes.

    Raises:
        InvalidInput: a component of the path is not a folder; a link to a folder is refused too.
    """
    here = os.dup(root)
    for part in parts:
        try:
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=here)
            deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                             dir_fd=here)
        except OSError as error:
            raise InvalidInput(f"download: {'/'.join(parts)!r}: {part!r} in the target is no "
                               f"folder ({error.strerror})") from None
        finally:
            os.close(here)
        here = deeper
    return here


def _put(root: int, file: FileEntry, data: bytes) -> None:
    """Writes a file beneath a folder. Of its mode only the executable bit is kept."""
    *parts, leaf = file.name.split("/")
    folder, part = _folder(root, parts), f".tangram-{uuid.uuid4().hex}"
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                     0o755 if file.mode & 0o100 else 0o644, dir_fd=folder)
        try:
            with open(fd, "wb") as out:
                out.write(data)
            os.replace(part, leaf, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:  # a ^C leaves no part of a file behind either
            with suppress(FileNotFoundError):  # it came after the part got the file's name
                os.unlink(part, dir_fd=folder)
            raise
    except OSError as error:
        raise InvalidInput(f"download: cannot write {file.name!r} ({error.strerror})") from None
    finally:
        os.close(folder)
