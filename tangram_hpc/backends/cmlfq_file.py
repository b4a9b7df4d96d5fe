"""Trees of C-MLFQ in files: one a writer (a rank, or a job's broker), replaced in one step, read
together.

Law: a reader sees a whole old file or a whole new one; each writes only its own; what is read is
checked before it is believed. Merging is `core/cmlfq.py`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from ..core.cmlfq import CausalTree
from ..errors import InvalidInput

_SUFFIX = ".cmlfq.json"


def save(folder: Path, rank: int | str, tree: CausalTree) -> Path:
    """Writes a rank's tree; the file survives a crash of the node once this returned.

    Raises:
        InvalidInput: the folder cannot be written.
    """
    return _write(folder, rank, tree.plain())


def _write(folder: Path, rank: int | str, plain: Any) -> Path:
    path = folder / f"{rank}{_SUFFIX}"
    draft = folder / f".{rank}.{os.getpid()}.draft"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(draft, "w") as file:
            json.dump(plain, file, separators=(",", ":"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
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
    except ValueError as error:
        raise InvalidInput(f"cmlfq tree {path}: {error}; remove it to learn anew") from None
    except InvalidInput as error:
        raise InvalidInput(f"cmlfq tree {path}: {error}; remove it to learn anew") from None


def load_all(folder: Path) -> CausalTree | None:
    """All ranks' trees of a folder, merged in order of rank; None if there is none.

    Raises:
        InvalidInput: one cannot be read, or two see in different ways.
    """
    found = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda p: (len(p.name), p.name))
    merged: CausalTree | None = None
    for path in found:
        tree = load(path)
        merged = tree if merged is None else merged.merged(tree)
    return merged


class TreeFiles:
    """The trees of one job's pools (fills `ports.Trees`); a thread writes, one file at a time."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._trouble: dict[str, str] = {}
        self._last: dict[str, threading.Thread] = {}

    def load(self, folder: str) -> tuple[CausalTree | None, CausalTree | None]:
        """See `ports.Trees.load`. Makes the folder."""
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            problem = "" if os.access(folder, os.W_OK | os.X_OK) else "may not be written"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            raise InvalidInput(f"{folder}: {problem}; name a folder that this user may write")
        mine = Path(folder) / f"{self._job}{_SUFFIX}"
        return load_all(Path(folder)), load(mine) if mine.exists() else None

    def save(self, folder: str, tree: CausalTree) -> None:
        """See `ports.Trees.save`."""
        plain, before = tree.plain(), self._last.get(folder)
        thread = threading.Thread(target=self._save, args=(folder, plain, before),
                                  name="tangram-tree", daemon=True)
        self._last[folder] = thread
        thread.start()

    def _save(self, folder: str, plain: Any, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            _write(Path(folder), self._job, plain)
        except InvalidInput as error:
            self._trouble[folder] = str(error)
        else:
            self._trouble.pop(folder, None)

    def trouble(self, folder: str) -> str:
        """See `ports.Trees.trouble`."""
        return self._trouble.get(folder, "")

    def close(self) -> None:
        """See `ports.Trees.close`."""
        for thread in self._last.values():
            thread.join()
