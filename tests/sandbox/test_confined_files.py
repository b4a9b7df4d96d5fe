"""What a sandbox's init does with files for somebody outside, while programs change them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tangram_hpc.sandbox.files import confine


def test_a_file_that_is_removed_during_a_listing_hides_no_other_file(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d/in"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    entries = confine.listing(str(tmp_path), "")
    assert next(entries).name == "a"
    (tmp_path / "b").unlink()
    assert [entry.name for entry in entries] == ["c", "d", "d/in"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own, which holds 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    (place := tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_move_to_another_file_system_keeps_mode_and_time_and_replaces_a_link(
        tmp_path: Path, small: Path) -> None:
    (tmp_path / "f").write_text("moved")
    (tmp_path / "f").chmod(0o750)
    os.utime(tmp_path / "f", (10**9, 10**9))
    (tmp_path / "other").write_text("other")
    (small / "t").symlink_to(tmp_path / "other")
    confine.move(str(tmp_path), "f", str(small / "t"))
    about = (small / "t").lstat()
    assert ((small / "t").read_text(), about.st_mode & 0o7777, about.st_mtime) == (
        "moved", 0o750, 10**9)
    assert (tmp_path / "other").read_text() == "other" and not (tmp_path / "f").exists()


@pytest.mark.parametrize("target", ["t", "folder"])
def test_a_move_to_another_file_system_that_fails_changes_nothing(
        tmp_path: Path, small: Path, target: str) -> None:
    """There is no room for the file; or a folder stands there."""
    (tmp_path / "f").write_bytes(b"x" * (100_000 if target == "t" else 10))
    (small / "t").write_text("kept")
    (small / "folder").mkdir()
    with pytest.raises(confine.PathRefused):
        confine.move(str(tmp_path), "f", str(small / target))
    assert (small / "t").read_text() == "kept" and (tmp_path / "f").exists()
    assert sorted(each.name for each in small.iterdir()) == ["folder", "t"]
