"""The job's store of large payloads: one file for each payload, in one private folder.

Payloads above the inline limit do not travel inside messages. Clients and workers put them into
this folder, and only the name travels. The broker removes entries by name and never reads them.

An entry is named `DIGEST` or `DIGEST.OWNER`. The digest is the sha256 of the content and is checked
on every read, so a changed file is an error and never a wrong answer. The owner says for whom the
entry is kept, and so when it can be removed (`protocol/payload.py` makes owners): its owner drops
an entry that it no longer needs, and the broker removes the entries of clients that are gone.

An entry appears whole: it is written to a temporary file, `.NAME.TOKEN`, and renamed
(`atomic_file.py`). A writer that is killed leaves its temporary file; the file goes with its
owner's entries, or when nobody has written to it for `TEMPORARY_S`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..atomic_file import replace_file
from ..errors import InvalidInput, StoreFailed
from .secrets_file import SecretsFile

_NAME = re.compile(r"[0-9a-f]{64}(\.[0-9a-z.-]{1,100})?")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\..+")
_DIGITS = 64
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_SHARE = "clients and workers must share this folder"
FILE_SIZE_REMEDY = ("raise the limit of file sizes (`ulimit -f`) in the shell that starts the "
                    "job")
TEMPORARY_S = 600.0  # a temporary file that nobody wrote to for so long has lost its writer


class FolderStore:
    """The store in a folder that clients and workers share (one machine or a shared disk)."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def put(self, data: bytes | bytearray | memoryview, owner: str = "") -> str:
        """Stores a payload for an owner and returns its name.

        Storing the same payload for the same owner again costs a hash and one look at the folder.

        Raises:
            StoreFailed: the folder cannot be written.
        """
        digest = hashlib.sha256(data).hexdigest()
        name = f"{digest}.{owner}" if owner else digest
        path = self._folder / name
        if not path.exists():
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                try:
                    replace_file(path, data)
                except FileNotFoundError:  # the temporary file was removed while we were stopped
                    replace_file(path, data)
            except OSError as error:
                raise self._failed(error, "cannot write") from None
        return name

    def get(self, name: str) -> bytes:
        """Returns the payload of this name; see `ports.Store.get`.

        Raises:
            InvalidInput: there is no such entry, or it was changed.
            StoreFailed: the entry cannot be read.
        """
        if not _NAME.fullmatch(name):  # names come from messages: a path could name any file
            raise InvalidInput(f"store {self._folder}: no payload {name[:12]!r} (not a digest)")
        try:
            data = (self._folder / name).read_bytes()
        except FileNotFoundError as error:
            raise InvalidInput(f"store {self._folder}: no payload {name[:12]} "
                               f"({error.strerror}); {_SHARE}") from None
        except OSError as error:
            raise self._failed(error, f"cannot read payload {name[:12]}") from None
        if hashlib.sha256(data).hexdigest() != name[:_DIGITS]:
            raise InvalidInput(f"store {self._folder}: payload {name[:12]} was changed")
        return data

    def _failed(self, error: OSError, what: str) -> StoreFailed:
        remedy = ("make room on that disk, or have it repaired" if error.errno in _DISK else
                  FILE_SIZE_REMEDY if error.errno == errno.EFBIG else _SHARE)
        return StoreFailed(error.errno, f"store {self._folder}: {what} ({error.strerror}); "
                           f"{remedy}")

    def drop(self, name: str) -> None:
        """Removes an entry if it is there; what cannot be removed stays until the job ends."""
        if _NAME.fullmatch(name):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()

    def keep_secrets(self, values: Mapping[str, str | None]) -> None:
        """Adds, replaces or removes secrets of the job; see `ports.Store.keep_secrets`."""
        SecretsFile(self._folder.parent).keep(values)

    def secrets(self, names: Iterable[str]) -> dict[str, str]:
        """Returns secrets of the job; see `ports.Store.secrets`."""
        return SecretsFile(self._folder.parent).values(names)

    def sweep(self, owners: Iterable[str]) -> None:
        """Removes all entries whose owner begins with one of these texts. O(entries)."""
        beginnings = tuple(owners)
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.lstrip(".")[_DIGITS + 1 :].startswith(beginnings):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)

    def sweep_temporary(self, older_s: float = TEMPORARY_S) -> None:
        """Removes temporary files that nobody has written to for `older_s` seconds. O(entries).

        Ages are taken by the file system's clock, which may differ from this machine's.
        """
        now: float | None = None
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if not _TEMPORARY.fullmatch(entry.name):
                    continue
                now = self._clock() if now is None else now
                with contextlib.suppress(OSError):
                    if now - entry.stat(follow_symlinks=False).st_mtime >= older_s:
                        os.unlink(entry.path)

    def _clock(self) -> float:
        """Returns the time of the store's file system, in seconds since the epoch."""
        # the name is a temporary file's, so that a sweep removes it if this process dies here
        probe = self._folder / f".{'0' * _DIGITS}.{secrets.token_hex(8)}"
        probe.touch(mode=0o600, exist_ok=False)
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink()
