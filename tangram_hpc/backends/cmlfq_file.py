"""Trees of C-MLFQ in files: one a rank, replaced in one step, read together.

Law: a reader sees a whole old file or a whole new one; a rank writes only its own; what is read is
checked before it is believed. Merging is `core/cmlfq.py`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from ..core.cmlfq import CausalTree
from ..errors import InvalidInput

_SUFFIX = ".cmlfq.json"


def save(folder: Path, rank: int, tree: CausalTree) -> Path:
    """Writes a rank's tree; the file survives a crash of the node once this returned.

    Raises:
        InvalidInput: the folder cannot be written.
    """
    path = folder / f"{rank}{_SUFFIX}"
    draft = folder / f".{rank}.{os.getpid()}.draft"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(draft, "w") as file:
            json.dump(tree.plain(), file, separators=(",", ":"))
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
