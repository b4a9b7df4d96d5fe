"""The copy of small folders within a process: it does what `cp -a` does, or nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tangram_hpc.sandbox.files import scratch, small_copy


def told(folder: Path) -> list[str]:
    """Names, kinds, modes, times, links and contents of everything in a folder."""
    said = subprocess.run(["find", ".", "-printf", "%p %y %m %T@ %l %n\n"], cwd=folder,
                          capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(said) + sorted(path.read_text() for path in folder.rglob("*")
                                 if path.is_file() and not path.is_symlink())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "a/b").mkdir(parents=True)
    (folder / "a/b/file").write_text("text")
    (folder / "empty").touch(0o640)
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "dangling\nline").symlink_to("nowhere")
    (folder / "a/b").chmod(0o750)
    os.utime(folder / "a/b/file", (1, 2))
    os.utime(folder / "a", (3, 4))
    folder.chmod(0o711)
    return folder


def test_small_folders_are_copied_as_cp_does_it(source: Path, tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    assert small_copy.copied(f"{source}/.", str(mine))
    subprocess.run([*scratch.COPY, "-T", str(source), str(theirs)], check=True)
    assert told(mine) == told(theirs) == told(source)


def _large(folder: Path) -> None:
    (folder / "large").write_bytes(b"x" * (small_copy.BYTES_MAX + 1))


def _many(folder: Path) -> None:
    for number in range(small_copy.ENTRIES_MAX + 1):
        (folder / str(number)).touch()


def _deep(folder: Path) -> None:
    (folder / "/".join(["d"] * 30)).mkdir(parents=True)


@pytest.mark.parametrize("add", [
    _large, _many, _deep, lambda f: os.mkfifo(f / "pipe"), lambda f: os.link(f / "empty", f / "x"),
    lambda f: os.setxattr(f / "empty", "user.note", b"x")],
    ids=["large", "many", "deep", "fifo", "two names", "attribute"])
def test_other_folders_are_left_to_cp_which_completes_what_was_begun(
        add: Callable[[Path], None], source: Path, tmp_path: Path) -> None:
    try:
        add(source)
    except OSError as error:
        pytest.skip(f"this file system cannot have it: {error}")
    target = tmp_path / "target"
    target.mkdir()
    assert not small_copy.copied(f"{source}/.", str(target))
    scratch.copy_part(str(tmp_path), f"{source}/.", str(target))
    assert told(target) == told(source)
