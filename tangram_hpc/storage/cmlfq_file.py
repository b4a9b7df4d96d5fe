"""Keeps the trees of C-MLFQ in files: one for each writer (a rank, or a job's broker), read
together.

Invariants: a reader sees a complete old file or a complete new one. Each writer replaces only its
own file. What is read is checked before it is used. How trees are merged is defined in
`scheduler/routing/cmlfq.py`.
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
FILES_MAX = 8  # files of a folder that a job reads; a full-size tree takes about a second
_CLOSE_S = 10.0  # seconds that `close` waits for a file system that hangs


def save(folder: Path, rank: int | str, tree: CausalTree) -> Path:
    """Writes a rank's tree and returns its path; the file survives a crash of the node from then
    on.

    Raises:
        InvalidInput: The folder cannot be written.
    """
    return _write(folder, rank, tree.plain())


def _write(folder: Path, rank: int | str, plain: Any) -> Path:
    path = folder / f"{rank}{_SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plain, separators=(",", ":"))  # takes a tenth of the time of `json.dump`
        replace_file(path, text, 0o666, sync=True)
    except OSError as error:
        raise InvalidInput(f"cmlfq tree {path}: {error.strerror}; name a folder that this user may "
                           "write") from None
    return path


def load(path: Path) -> CausalTree:
    """Returns the tree of one file.

    Raises:
        InvalidInput: The file cannot be read or holds no tree.
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
    """Returns the trees of all files of a folder, merged in order of rank; None if there is no
    file.

    Args:
        folder: The folder.
        most: Read at most so many files, those that were written last; 0 for all.

    Raises:
        InvalidInput: A file cannot be read, or two trees have different shapes.
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
    except OSError:
        # if the file was removed it is left out; any other error is raised when it is read
        return 0


class TreeFiles:
    """The trees of one job's rollout pools (serves `ports.TreeStore`).

    One thread for each folder writes, and always the newest tree. So a file system that hangs
    delays nobody, and keeps at most two trees in memory.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._trouble: dict[str, str] = {}
        self._next: dict[str, Any] = {}  # folder -> the newest tree that waits to be written
        self._writers: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()  # guards `_next` and `_writers`

    def load(self, folder: str) -> tuple[CausalTree | None, CausalTree | None]:
        """Makes the folder, and reads its newest `FILES_MAX` files; see `ports.TreeStore.load`."""
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
        """Hands the tree to the folder's thread; see `ports.TreeStore.save`."""
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
        """Returns why the last save failed; see `ports.TreeStore.trouble`."""
        return self._trouble.get(folder, "")

    def close(self) -> None:
        """Waits for the writers, `_CLOSE_S` at most; see `ports.TreeStore.close`."""
        with self._lock:
            writers = list(self._writers.values())
        until = time.monotonic() + _CLOSE_S
        for thread in writers:
            thread.join(max(0.0, until - time.monotonic()))
