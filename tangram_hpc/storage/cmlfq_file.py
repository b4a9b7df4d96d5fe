"""Trees of C-MLFQ in files: one a writer (a rank, or a job's broker), replaced in one step, read
together.

Law: a reader sees a whole old file or a whole new one; each writes only its own; what is read is
checked before it is believed. Merging is `scheduler/routing/cmlfq.py`'s.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from ..atomic_file import replace_file
from ..errors import InvalidInput
from ..scheduler.routing.cmlfq import CausalTree

_SUFFIX = ".cmlfq.json"
FILES_MAX = 8  # files of a folder that a job reads; a full one takes a second
_CLOSE_S = 10.0  # patience with a file system that hangs


def save(folder: Path, rank: int | str, tree: CausalTree) -> Path:
    """Writes a rank's tree; the file survives a crash of the node once this returned.

    Raises:
        InvalidInput: the folder cannot be written.
    """
    return _write(folder, rank, tree.plain())


def _write(folder: Path, rank: int | str, plain: Any) -> Path:
    path = folder / f"{rank}{_SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plain, separators=(",", ":"))  # a tenth of what `dump` takes
        replace_file(path, text, 0o666, sync=True)
    except OSError as error:
        raise InvalidInput(f"cmlfq tree {path}: {error.strerror}; name a folder that this user may "
                           "write") from None
    return path


def load(path: Path) -> CausalTree:
    """The tree of one file.

    Raises:
        InvalidInput: it cannot be read or is not a tree's.
    """
    try:
        return CausalTree.from_plain(json.loads(path.read_text()))
    except OSError as error:
        raise InvalidInput(f"cmlfq tree {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"cmlfq tree {path}: {error}; remove it to learn anew") from None
    except InvalidInput as error:
        raise InvalidInput(f"cmlfq tree {path}: {error}; remove it to learn anew") from None


def load_all(folder: Path, most: int = 0) -> CausalTree | None:
    """All ranks' trees of a folder, merged in order of rank; None if there is none. `most`: no more
    files than so many, those that were written last.

    Raises:
        InvalidInput: one cannot be read, or two see in different ways.
    """
    found = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda p: (len(p.name), p.name))
    if 0 < most < len(found):
        written = {path: _written_at(path) for path in found}
        last = sorted(found, key=lambda path: -written[path])[:most]
        found = [path for path in found if path in last]
    merged: CausalTree | None = None
    for path in found:
        tree = load(path)
        merged = tree if merged is None else merged.merged(tree)
    return merged


def _written_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it was removed, or reading it will say what is wrong
        return 0


class TreeFiles:
    """The trees of one job's pools (fills `ports.TreeStore`). A thread a folder writes, always the
    newest tree, so that a file system that hangs holds up nobody and at most two trees."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._trouble: dict[str, str] = {}
        self._next: dict[str, Any] = {}  # plain trees that are to be written
        self._writers: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()  # of both

    def load(self, folder: str) -> tuple[CausalTree | None, CausalTree | None]:
        """See `ports.TreeStore.load`. Makes the folder; reads the newest `FILES_MAX` of it."""
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            problem = "" if os.access(folder, os.W_OK | os.X_OK) else "may not be written"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            raise InvalidInput(f"{folder}: {problem}; name a folder that this user may write")
        mine = Path(folder) / f"{self._job}{_SUFFIX}"
        return load_all(Path(folder), FILES_MAX), load(mine) if mine.exists() else None

    def save(self, folder: str, tree: CausalTree) -> None:
        """See `ports.TreeStore.save`."""
        plain = tree.plain()
        with self._lock:
            self._next[folder] = plain
            if folder not in self._writers:
                self._writers[folder] = threading.Thread(
                    target=self._write_all, args=(folder,), name="tangram-tree", daemon=True)
                self._writers[folder].start()

    def _write_all(self, folder: str) -> None:
        while True:
            with self._lock:
                plain = self._next.pop(folder, None)
                if plain is None:
                    del self._writers[folder]
                    return
            try:
                _write(Path(folder), self._job, plain)
            except InvalidInput as error:
                self._trouble[folder] = str(error)
            else:
                self._trouble.pop(folder, None)

    def trouble(self, folder: str) -> str:
        """See `ports.TreeStore.trouble`."""
        return self._trouble.get(folder, "")

    def close(self) -> None:
        """See `ports.TreeStore.close`."""
        with self._lock:
            writers = list(self._writers.values())
        until = time.monotonic() + _CLOSE_S
        for thread in writers:
            thread.join(max(0.0, until - time.monotonic()))
