"""Folders are removed where a quota is used up, and renaming a folder would take more of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.image_rig import MadeImage, entry, tar_of

from tangram_hpc.images.node_store import NodeStore
from tangram_hpc.images.pull import PullSettings, pull
from tangram_hpc.sandbox.files import scratch
from tangram_hpc.storage.job_folders import remove_job_folder
from tangram_hpc.storage.rundir import make_job_dir


@pytest.fixture
def quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on btrfs: a folder cannot be renamed while there are files in it, which use the quota up.
    """
    rename = os.rename

    def refused(old: Any, new: Any, *, src_dir_fd: int | None = None,
                dst_dir_fd: int | None = None) -> None:
        at = old if src_dir_fd is None else f"/proc/self/fd/{src_dir_fd}/{old}"
        if any(names for _, _, names in os.walk(at)):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", refused)


def deep(folder: Path) -> Path:
    (folder / "a/b/c").mkdir(parents=True)
    (folder / "d").mkdir()
    for name in ("a/b/c/big", "a/b/file", "d/file"):
        (folder / name).write_text("x")
    (folder / "a/link").symlink_to(folder / "kept")
    return folder


@pytest.mark.usefixtures("quota")
def test_a_sandboxs_directory_is_removed(tmp_path: Path) -> None:
    kept = deep(tmp_path / "kept")
    (deep(tmp_path / "session") / "d/outside").symlink_to(kept)
    assert scratch.remove(str(tmp_path / "session"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept"] and (kept / "d/file").exists()


@pytest.mark.usefixtures("quota")
def test_a_directory_in_a_sandbox_is_removed(tmp_path: Path) -> None:
    deep(tmp_path / "folder")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        scratch.remove_tree("folder", fd)
    finally:
        os.close(fd)
    assert not list(tmp_path.iterdir())


def test_an_image_and_its_layers_are_removed(tmp_path: Path,
                                             request: pytest.FixtureRequest) -> None:
    layout = MadeImage([tar_of(entry("a/b/file", "x"))]).layout(tmp_path / "layout")
    image = pull(str(layout), PullSettings(str(tmp_path / "store")), {})
    store = NodeStore(tmp_path / "store")
    request.getfixturevalue("quota")
    held = store.hold(image.digest)
    assert not store.remove(image.digest) and store.find(image.digest) == image.image
    os.close(held)
    assert store.remove(image.digest) and store.images() == [] and store.prune_layers() == 1
    assert not [path for name in ("images", "layers", "drafts", "names")
                for path in (tmp_path / "store" / name).iterdir()]


def test_the_folder_of_a_job_is_removed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = deep(make_job_dir({"TANGRAM_HOME": str(tmp_path)}, "local-1"))
    request.getfixturevalue("quota")
    assert remove_job_folder(folder) and not list((tmp_path / "jobs").iterdir())
