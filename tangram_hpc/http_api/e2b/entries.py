"""Describes files of a session in the form of the E2B wire (`filesystem.EntryInfo`)."""

from __future__ import annotations

import posixpath
import stat
from datetime import datetime, timezone
from typing import Any

from ... import Session

_KINDS = {"file": ("FILE_TYPE_FILE", stat.S_IFREG), "dir": ("FILE_TYPE_DIRECTORY", stat.S_IFDIR),
          "link": ("FILE_TYPE_SYMLINK", stat.S_IFLNK), "other": ("FILE_TYPE_UNSPECIFIED", 0)}


async def entry(session: Session, path: str) -> dict[str, Any]:
    """Returns the description of the file at an absolute path of the sandbox.

    Raises:
        FileFailed: nothing is at the path, or it cannot be examined.
    """
    return _told(path, await session.stat(path))


async def entries(session: Session, path: str, depth: int) -> list[dict[str, Any]] | None:
    """Returns descriptions of everything below a folder, down to `depth` levels; None if the path
    is not a folder.

    Raises:
        FileFailed: nothing is at the path, or it cannot be examined.
    """
    found = await session.listing(path, depth=depth)
    if len(found) == 1 and not found[0].name:
        return None
    return [_told(posixpath.join(path, each.name), each) for each in found]


def _told(path: str, info: Any) -> dict[str, Any]:
    kind, bits = _KINDS[info.kind]
    when = datetime.fromtimestamp(info.mtime_ns // 10**9, timezone.utc)
    told: dict[str, Any] = {
        "name": posixpath.basename(path.rstrip("/")) or "/", "type": kind, "path": path,
        "size": str(info.size), "mode": info.mode & 0o7777,
        "permissions": stat.filemode(bits | info.mode & 0o7777),
        "owner": _owner(info.uid), "group": _owner(info.gid),
        "modifiedTime": f"{when:%Y-%m-%dT%H:%M:%S}.{info.mtime_ns % 10**9:09d}Z"}
    return {**told, "symlinkTarget": info.target} if info.kind == "link" else told


def _owner(number: int) -> str:
    return "root" if number == 0 else str(number)
