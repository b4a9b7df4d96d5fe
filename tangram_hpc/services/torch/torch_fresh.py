"""Owns: newer weights of a model that is trained while it is served - how they are published, and
which are the newest. Must not know where they go.

Law: a version is whole or not there: its file has its name only when all is written, and `CURRENT`
names it only after that. Readers come when they like; the version before stays for those who have
just read its name. So nobody is told, nobody is stopped, and a copy that is loaded later, or again,
comes up to date by itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CURRENT = "CURRENT"
_KEPT = 3  # versions
_TRIES = 20  # that a reader makes while versions overtake it


def publish(folder: Path, version: int, weights: Mapping[str, torch.Tensor]) -> None:
    """Makes these the newest weights; `version` ascends. One process publishes."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{version}"
    save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, temporary)
    os.replace(temporary, _path(folder, version))
    pointer = folder / f".{CURRENT}"
    pointer.write_text(str(version))
    os.replace(pointer, folder / CURRENT)
    for path in folder.glob("weights-*.safetensors"):
        if int(path.stem.partition("-")[2]) <= version - _KEPT:
            path.unlink(missing_ok=True)


def newest(folder: Path, than: int) -> tuple[int, dict[str, torch.Tensor]] | None:
    """The newest version and its weights, if it is newer than this one."""
    for _ in range(_TRIES):
        try:
            version = int((folder / CURRENT).read_text())
            return (version, load_file(_path(folder, version))) if version > than else None
        except FileNotFoundError:
            if not (folder / CURRENT).exists():
                return None  # nothing was published yet
    return None


def _path(folder: Path, version: int) -> Path:
    return folder / f"weights-{version}.safetensors"
