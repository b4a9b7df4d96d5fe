"""Two writers with the same pid, in different containers, never share a temporary file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tangram_hpc.app.trainer_rank import write_whole
from tangram_hpc.atomic_file import replace_file
from tangram_hpc.storage.access import Access, mark_ended, read_access, write_access
from tangram_hpc.storage.identity import JobStart, read_starts, write_starts
from tangram_hpc.storage.rundir import link_last

START = JobStart("c", "7", 1, 0)
WRITERS: list[Callable[[Path], object]] = [
    lambda f: write_access(f / "access.json", Access("7", ("unix:x",), b"k", "s")),
    lambda f: mark_ended(f / "access.json", "7", "now"),
    lambda f: write_starts(f, [START]), lambda f: write_whole(f / "rank0", "host 1\n"),
    lambda f: link_last(f / "7@c", "7")]
NAMES = ("access.json", "identity.json", "rank0", "7")


@pytest.mark.parametrize("write", WRITERS)
def test_a_temporary_file_of_another_process_with_the_same_pid_is_kept(
        write: Callable[[Path], object], tmp_path: Path) -> None:
    others = [tmp_path / f".{name}.{os.getpid()}" for name in NAMES]
    for other in others:
        other.write_text("half of what another wri")
    write(tmp_path)
    assert [other.read_text() for other in others] == ["half of what another wri"] * len(others)
    assert len(list(tmp_path.iterdir())) == len(others) + 1


def test_an_access_file_and_the_starts_are_read_back(tmp_path: Path) -> None:
    access = Access("7", ("unix:x",), b"k", "s")
    write_access(tmp_path / "a", access)
    write_starts(tmp_path, [START])
    assert read_access(tmp_path / "a") == access and read_starts(tmp_path) == [START]


def test_a_failed_replacement_leaves_the_old_file_and_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "there", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
