"""The job's store: payloads over the inline limit, content-addressed files in one private folder.

Law: a file's name is its sha256; what is read is checked against it, so a changed file is an error
and never a wrong answer. Clients and workers reach it; broker and journal never do.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from ..errors import InvalidInput

_DIGEST = re.compile("[0-9a-f]{64}")


class FolderStore:
    """A folder that clients and workers share (one machine, or a shared file system)."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def put(self, data: bytes | bytearray | memoryview) -> str:
        """Stores the bytes under their digest; storing them again costs one look."""
        digest = hashlib.sha256(data).hexdigest()
        path = self._folder / digest
        if not path.exists():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = self._folder / f".{digest}.{os.getpid()}"
            try:
                draft.write_bytes(data)
                os.replace(draft, path)
            except OSError as error:
                raise InvalidInput(f"store {self._folder}: cannot write ({error.strerror}); "
                                   "clients and workers must share this folder") from None
        return digest

    def get(self, digest: str) -> bytes:
        """The bytes under `digest`; see `ports.Store.get`."""
        if not _DIGEST.fullmatch(digest):  # else it could name any file
            raise InvalidInput(f"store {self._folder}: no payload {digest[:12]!r} (not a digest)")
        try:
            data = (self._folder / digest).read_bytes()
        except OSError as error:
            raise InvalidInput(f"store {self._folder}: no payload {digest[:12]} "
                               f"({error.strerror}); clients and workers must share this folder"
                               ) from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise InvalidInput(f"store {self._folder}: payload {digest[:12]} was changed")
        return data
