"""The job's store: payloads over the inline limit, content-addressed files in one private folder.

An entry is named `DIGEST` or `DIGEST.OWNER`. The digest is the sha256 of its bytes; what is read is
checked against it, so a changed file is an error and never a wrong answer. The owner says for whom
the entry is kept, and so when it goes (`protocol/payload.py` makes owners): whoever holds an entry
alone drops it when it is no longer needed, and the broker sweeps what clients that are gone left.

An entry appears whole: it is written to a draft, `.NAME.TOKEN`, and renamed. Writers are threads of
one process, processes with the same number in different containers, and processes of other nodes,
so the token is random and the draft is made exclusively; a process number would let two writers
share one. Whoever is killed leaves its draft. It goes with its owner's entries, or when nobody has
written to it for DRAFT_S.

Law: clients and workers read and write; the broker removes by name and never reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from ..drafts import replace_file
from ..errors import InvalidInput

_NAME = re.compile(r"[0-9a-f]{64}(\.[0-9a-z.-]{1,100})?")
_DRAFT = re.compile(r"\.[0-9a-f]{64}\..+")
_DIGITS = 64
DRAFT_S = 600.0  # a draft to which nobody has written for so long is nobody's


class FolderStore:
    """A folder that clients and workers share (one machine, or a shared file system)."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def put(self, data: bytes | bytearray | memoryview, owner: str = "") -> str:
        """Stores the bytes for an owner and returns their name; storing them again for the same
        owner costs one look."""
        digest = hashlib.sha256(data).hexdigest()
        name = f"{digest}.{owner}" if owner else digest
        path = self._folder / name
        if not path.exists():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                try:
                    replace_file(path, data)
                except FileNotFoundError:  # we stood still while drafts were swept
                    replace_file(path, data)
            except OSError as error:
                raise InvalidInput(f"store {self._folder}: cannot write ({error.strerror}); "
                                   "clients and workers must share this folder") from None
        return name

    def get(self, name: str) -> bytes:
        """The bytes under `name`; see `ports.Store.get`."""
        if not _NAME.fullmatch(name):  # else it could name any file
            raise InvalidInput(f"store {self._folder}: no payload {name[:12]!r} (not a digest)")
        try:
            data = (self._folder / name).read_bytes()
        except OSError as error:
            raise InvalidInput(f"store {self._folder}: no payload {name[:12]} "
                               f"({error.strerror}); clients and workers must share this folder"
                               ) from None
        if hashlib.sha256(data).hexdigest() != name[:_DIGITS]:
            raise InvalidInput(f"store {self._folder}: payload {name[:12]} was changed")
        return data

    def drop(self, name: str) -> None:
        """Removes an entry; one that is not there, or cannot be removed now, is left to the end of
        the job."""
        if _NAME.fullmatch(name):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()

    def sweep(self, owners: Iterable[str]) -> None:
        """Removes all entries whose owner begins with one of these. O(entries)."""
        beginnings = tuple(owners)
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.lstrip(".")[_DIGITS + 1 :].startswith(beginnings):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)

    def sweep_drafts(self, older_s: float = DRAFT_S) -> None:
        """Removes the drafts to which nobody has written for `older_s` seconds by the clock of the
        file system, which need not be ours. O(entries)."""
        now: float | None = None
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if not _DRAFT.fullmatch(entry.name):
                    continue
                now = self._clock() if now is None else now
                with contextlib.suppress(OSError):
                    if now - entry.stat(follow_symlinks=False).st_mtime >= older_s:
                        os.unlink(entry.path)

    def _clock(self) -> float:
        """The time of the store's file system, in seconds since the epoch."""
        probe = self._folder / f".{'0' * _DIGITS}.{secrets.token_hex(8)}"  # swept as a draft is
        probe.touch(mode=0o600, exist_ok=False)
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink()
