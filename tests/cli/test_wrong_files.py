"""Verbs say which file is wrong, at once, where a file is empty, damaged or none at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tangram_hpc import AccessError, LocalCluster
from tangram_hpc.cli import main
from tangram_hpc.storage.access import read_access


def test_an_empty_name_of_a_settings_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell variable that is not set gives it; the user means a file."""
    for words in (["--config", "", "config"], ["config", "--config="]):
        assert main(words) == 2, words
        assert "--config: the name of the file is empty" in capsys.readouterr().err


@pytest.mark.timeout(20)
def test_an_access_file_that_is_none_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "access.json", 0o600)
    for path in (tmp_path / "access.json", Path("/dev/tty")):
        with pytest.raises(AccessError, match="it is not a regular file"):
            read_access(path)


def test_explain_says_that_the_journal_of_an_ended_job_is_damaged(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
        ) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    with LocalCluster(cpus=1, home=tmp_path) as cluster:
        future = cluster.submit(pow, 2, 2)
        assert future.result(20) == 4
        folder = cluster.access.parent
    assert main(["explain", "-j", folder.name, future.id]) == 0
    journal = folder / "journal"
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 0xff
    journal.write_bytes(data)
    capsys.readouterr()
    assert main(["explain", "-j", folder.name, future.id]) == 2
    told = capsys.readouterr().err
    assert "damaged at byte" in told
    assert f"tangram journal repair -j {folder.name}" in told
    journal.unlink()
    assert main(["explain", "-j", folder.name, future.id]) == 2
    assert "not known from a journal" in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    ["acct", "-j", "4711 " * 60], ["report", "x" * 300], ["logs", "-j", "x" * 300, "1.1"],
    ["sim", "x" * 300, "--cluster", "coding-200", "--policy", "elastic"],
    ["plan", "--model", "x" * 300, "--gpus", "8"]])
def test_a_name_that_is_too_long_for_a_file_is_told_in_one_line(
        words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the ids of many jobs without commas."""
    (tmp_path / "jobs").mkdir()
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("tangram: error: ") and told.count("\n") == 1


@pytest.mark.parametrize("words", [["--config", "x", "config"], ["image", "list", "--store", "x"]])
def test_a_current_directory_that_is_gone_is_told_in_one_line(
        words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the folder of a job that has been cleaned up, in which a shell still stands."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "the current directory has been removed" in told and told.count("\n") == 1
