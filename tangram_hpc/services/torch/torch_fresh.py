"""Publishes newer weights of a model that is trained while it is served, and finds the newest.

The trainer writes a version into a folder, and each copy of the service looks there before a batch.
Nobody is notified and nobody is stopped, and a copy that is loaded later gets up to date by itself.
`torch_weights.py` puts the new weights in place.

Invariants: a version is complete or not there. Its file gets its name only after everything is
written, and `CURRENT` names the version only after that. The two versions before the newest stay,
for readers that have just read their number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CURRENT = "CURRENT"
_KEPT = 3  # versions that stay in the folder, the newest included
_TRIES = 20  # tries of a reader while newer versions replace the one that it opens


def publish(folder: Path, version: int, weights: Mapping[str, torch.Tensor]) -> None:
    """Makes these the newest weights. One process publishes.

    Args:
        folder: The folder of the versions; it is made if need be.
        version: The number of this version, greater than all before it.
        weights: The tensors by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{version}"
    save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, temporary)
    os.replace(temporary, _path(folder, version))
    pointer = folder / f".{CURRENT}"
    pointer.write_text(str(version))
    os.replace(pointer, folder / CURRENT)
    published = sorted(folder.glob("weights-*.safetensors"), key=_version_of)
    # a trainer that went back to a checkpoint has left later ones, which are not this run's
    so_far = [path for path in published if _version_of(path) <= version]
    for path in so_far[:-_KEPT]:
        path.unlink(missing_ok=True)


def newest(folder: Path, than: int) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Returns the newest version and its weights if it is newer than version `than`, else None."""
    for _ in range(_TRIES):
        try:
            version = int((folder / CURRENT).read_text())
            return (version, load_file(_path(folder, version))) if version > than else None
        except FileNotFoundError:
            if not (folder / CURRENT).exists():
                return None  # nothing was published yet
    return None


def _version_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _path(folder: Path, version: int) -> Path:
    return folder / f"weights-{version}.safetensors"
