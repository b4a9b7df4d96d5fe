"""Spill files: payloads for clients that do not read, on disk (serves `ports.SpillFiles`).

There is one file for each such client, in the job's folder. A file is written at its end and read
anywhere. It is truncated when nothing in it is needed any more, and removed when its client is
gone. Nothing in it outlives the broker: what a client must find after the broker's death is in the
spool.

A worker has such files too, in its scratch folder, for the results that no broker has confirmed.
Its files have numbers of its own instead of clients' numbers (`worker/kept_results.py`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from ..protocol.frame import Buffer


class _File:
    __slots__ = ("end", "fd", "needed", "path")

    def __init__(self, path: Path) -> None:
        self.path, self.end, self.needed = path, 0, 0
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path, flags, 0o600)


class FolderSpillFiles:
    """Spill files in a folder, which is made when the first file is needed.

    What an earlier broker left in the folder is removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, _File] = {}
        shutil.rmtree(folder, ignore_errors=True)

    def put(self, client: int, data: Buffer) -> int:
        """Writes a payload; returns its offset, or -1 if it cannot be written."""
        try:
            file = self._files.get(client)
            if file is None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = self._files[client] = _File(self._folder / str(client))
            at = file.end
            view = memoryview(data)
            while view:
                done = os.pwrite(file.fd, view, at)
                at, view = at + done, view[done:]
        except OSError:
            return -1
        offset, file.end = file.end, at
        file.needed += 1
        return offset

    def get(self, client: int, offset: int, size: int) -> bytes:
        """Reads a payload of `size` bytes.

        Raises:
            OSError: The disk failed; the broker must end, and the job resumes from its journal.
        """
        data = os.pread(self._files[client].fd, size, offset)
        if len(data) != size:
            raise OSError(5, f"{self._files[client].path}: {size} bytes at {offset} are not there")
        return data

    def free(self, client: int) -> None:
        """Notes that one payload of a client is no longer needed."""
        file = self._files.get(client)
        if file is not None:
            file.needed -= 1
            if not file.needed:
                os.ftruncate(file.fd, 0)
                file.end = 0

    def drop(self, client: int) -> None:
        """Removes a client's file; an unknown client is ignored."""
        file = self._files.pop(client, None)
        if file is not None:
            os.close(file.fd)
            with contextlib.suppress(OSError):
                file.path.unlink()

    def close(self) -> None:
        """Removes all files and the folder."""
        for client in list(self._files):
            self.drop(client)
        shutil.rmtree(self._folder, ignore_errors=True)
