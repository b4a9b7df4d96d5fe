"""A store whose disk is full, or that is no folder: the error is one of input and output, which
nobody takes for a mistake of the caller, and the remedy fits the cause."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tangram_hpc.errors import InvalidInput, StoreFailed, TangramError
from tangram_hpc.storage.store import FolderStore


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)],
                          capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_an_error_of_the_disk_and_leaves_no_part_of_the_payload(small: Path) -> None:
    store = FolderStore(small / "store")
    kept = store.put(b"k" * 100_000)
    with pytest.raises(StoreFailed, match=r"No space left.*make room on that disk") as failed:
        store.put(b"x" * 300_000)
    assert failed.value.errno == errno.ENOSPC and isinstance(failed.value, OSError)
    assert not isinstance(failed.value, InvalidInput) and isinstance(failed.value, TangramError)
    assert store.get(kept) == b"k" * 100_000
    assert store.put(b"y" * 50_000)  # the room of what failed is free again


def test_a_limit_of_file_sizes_is_named_with_its_remedy(tmp_path: Path) -> None:
    """As a login shell has it, which Slurm hands on to the job."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StoreFailed, match=r"File too large.*ulimit -f"):
            FolderStore(tmp_path).put(b"x" * 200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_no_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = FolderStore(tmp_path / "file" / "store")
    with pytest.raises(StoreFailed, match=r"Not a directory.*must share this folder"):
        store.put(b"x")
    with pytest.raises(StoreFailed, match="cannot read payload"):
        store.get("0" * 64)
    with pytest.raises(InvalidInput, match="no payload"):
        FolderStore(tmp_path).get("0" * 64)
