"""What verbs say of folders below TANGRAM_HOME that they may not read, and what the books keep."""

from __future__ import annotations

import errno
import io
import json
import os
import pathlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.books_rig import write_journal

from tangram_hpc.accounting.books.importing import import_jobs
from tangram_hpc.accounting.books.query import stored_jobs
from tangram_hpc.accounting.books.schema import open_books
from tangram_hpc.accounting.selection import Selection
from tangram_hpc.app import broker_location
from tangram_hpc.app.broker_location import await_access
from tangram_hpc.cli import main
from tangram_hpc.config.settings import Config
from tangram_hpc.config.user_name import user_name
from tangram_hpc.doctor.check import CheckContext, SlurmFacts
from tangram_hpc.doctor.storage import scratch
from tangram_hpc.domain import event as ev
from tangram_hpc.errors import AccessError, BrokerUnreachable, InvalidInput
from tangram_hpc.storage.access import NAME as ACCESS
from tangram_hpc.storage.job_folders import job_folders

BEGAN = 1_700_000_000 * 10**9


def a_job(home: Path, name: str) -> Path:
    """Makes the folder of a job whose broker lives."""
    folder = home / "jobs" / name
    write_journal(folder, [ev.BrokerStarted(BEGAN, name, "elastic", "none", user_name())])
    (folder / ACCESS).write_text(json.dumps({"ended": ""}))
    (folder / "epoch-1").touch()
    return folder


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Folders that may be neither listed nor entered, whoever runs the test."""
    shut: list[Path] = []
    real_stat, real_list, real_scan, real_glob = os.stat, os.listdir, os.scandir, Path.glob
    real_open = io.open

    def refuse(path: object, itself: bool) -> None:
        if isinstance(path, str | os.PathLike):
            asked = Path(os.fspath(path))  # type: ignore[arg-type]
            if any(each in asked.parents or (itself and each == asked) for each in shut):
                raise PermissionError(errno.EACCES, "Permission denied", str(asked))

    def stat(path: object, **more: object) -> object:
        refuse(path, itself=False)
        return real_stat(path, **more)  # type: ignore[call-overload]

    def listdir(path: object = ".") -> object:
        refuse(path, itself=True)
        return real_list(path)  # type: ignore[call-overload]

    def scandir(path: object = ".") -> object:
        refuse(path, itself=True)
        return real_scan(path)  # type: ignore[call-overload]

    def open_(path: object, *more: object, **rest: object) -> object:
        refuse(path, itself=False)
        return real_open(path, *more, **rest)  # type: ignore[call-overload]

    def glob(self: Path, pattern: str) -> Iterator[Path]:
        # from Python 3.13 on it keeps a `scandir` of its own; it passes over what it may not list
        return iter(()) if self in shut else real_glob(self, pattern)

    monkeypatch.setattr(Path, "glob", glob)
    # pathlib of Python 3.10 has its own names for the four
    monkeypatch.setattr(getattr(pathlib, "_normal_accessor", io), "open", open_)
    for place in (os, getattr(pathlib, "_normal_accessor", os)):
        monkeypatch.setattr(place, "stat", stat)
        monkeypatch.setattr(place, "listdir", listdir)
        monkeypatch.setattr(place, "scandir", scandir)
    yield shut
    shut.clear()


@pytest.fixture(params=["raises", "hides"])
def of_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Path.exists` and its like raise for a closed folder, or hide it as from Python 3.14 on."""
    if request.param == "hides":
        monkeypatch.setattr(Path, "exists", os.path.exists)
        monkeypatch.setattr(Path, "is_dir", os.path.isdir)
        monkeypatch.setattr(Path, "is_file", os.path.isfile)


@pytest.mark.parametrize("verb", [
    ["acct"], ["acct", "-a"], ["clean"], ["queue"], ["journal", "check"], ["books"]])
def test_a_folder_of_all_jobs_that_is_closed_is_not_an_empty_one(
        verb: list[str], tmp_path: Path, closed: list[Path], monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    a_job(tmp_path, "local-1")
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    closed.append(tmp_path / "jobs")
    assert main(verb) == 2
    assert capsys.readouterr().err == (
        f"tangram: error: TANGRAM_HOME {tmp_path}: the folder `jobs` cannot be read (Permission "
        "denied); make it readable, or set TANGRAM_HOME to a folder of your own\n")


def test_the_books_do_not_end_a_job_whose_folder_they_may_not_read(
        tmp_path: Path, closed: list[Path]) -> None:
    folder = a_job(tmp_path, "local-1")
    with open_books("", tmp_path) as books:
        def state() -> list[str]:
            with books.reading() as connection:
                return [job.row.state for job in stored_jobs(connection, Selection())]

        import_jobs(books, tmp_path, BEGAN, print)
        assert state() == ["RUNNING"]
        closed.append(folder)
        import_jobs(books, tmp_path, BEGAN, print)
        assert state() == ["RUNNING"]
        closed[:] = [tmp_path / "jobs"]
        with pytest.raises(InvalidInput, match="the folder `jobs` cannot be read"):
            import_jobs(books, tmp_path, BEGAN, print)
        assert state() == ["RUNNING"]


@pytest.mark.parametrize("verb", [["books"], ["acct", "--books", "-X"], ["acct", "-a", "-X"]])
def test_a_closed_folder_of_ones_own_is_told_in_accounting(
        verb: list[str], tmp_path: Path, closed: list[Path], monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """The other job is accounted, and the status says that one is missing."""
    closed.append(a_job(tmp_path, "local-1"))
    a_job(tmp_path, "local-2")
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    assert main(verb) == 1
    said = capsys.readouterr()
    assert f"job local-1: its folder {closed[0]} cannot be read (Permission denied)" in said.err
    assert said.err.count("\n") == 1 and ("local-2" in said.out or "jobs 1" in said.out)
    if verb != ["books"]:
        assert main([*verb, "-j", "local-2"]) == 0


def test_the_folder_of_another_user_is_left_out_of_the_list(tmp_path: Path, closed: list[Path]
                                                            ) -> None:
    closed.append(a_job(tmp_path, "local-1"))
    mine = a_job(tmp_path, "local-2")
    assert [each.path for each in job_folders(tmp_path)] == [mine]


@pytest.mark.parametrize("verb", [["journal", "check"], ["logs", "1.2"]])
def test_a_closed_folder_of_a_job_is_told_in_one_line(
        verb: list[str], tmp_path: Path, closed: list[Path], monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    closed.append(a_job(tmp_path, "local-1"))
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    assert main([*verb, "-j", "local-1"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"tangram: error: {closed[0]}") and told.count("\n") == 1
    assert "Permission denied" in told


@pytest.mark.parametrize("verb", [
    ["journal", "check", "-j", "local-1"], ["journal", "repair", "-j", "local-1"],
    ["logs", "1.2", "-j", "local-1"],
    ["plan", "--model", "{}/model", "--hardware", "h200", "--gpus", "8"],
])
def test_a_closed_folder_above_is_not_taken_for_a_missing_one(
        verb: list[str], tmp_path: Path, closed: list[Path], of_path: None,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    a_job(tmp_path, "local-1")
    closed.append(tmp_path / "jobs")
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    assert main([word.format(closed[0]) for word in verb]) == 2
    told = capsys.readouterr().err
    assert f"{closed[0]}/" in told and "Permission denied" in told and told.count("\n") == 1


def test_a_closed_folder_is_told_at_once_by_what_waits_for_an_access_file(
        tmp_path: Path, closed: list[Path], of_path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = a_job(tmp_path, "local-1") / ACCESS
    with pytest.raises(BrokerUnreachable, match="did not write it"):
        await_access(path.with_name("none"), 0)

    def denied(path: Path) -> None:
        raise AccessError("Permission denied")

    monkeypatch.setattr(broker_location, "read_access", denied)
    closed.append(path.parent)
    with pytest.raises(AccessError, match="Permission denied"):
        await_access(path, 0)


def test_a_closed_folder_of_reward_functions_is_told(
        tmp_path: Path, closed: list[Path], of_path: None) -> None:
    pytest.importorskip("fastapi")
    from tangram_hpc.http_api.rewards import load_function

    (tmp_path / "rewards.py").write_text("def exact(): return 1.0")
    assert load_function(f"{tmp_path}/rewards.py:exact")() == 1.0
    closed.append(tmp_path)
    with pytest.raises(InvalidInput, match=r"rewards\.py: Permission denied"):
        load_function(f"{tmp_path}/rewards.py:exact")


def test_doctor_tells_a_scratch_folder_that_is_closed_from_one_that_is_none(
        tmp_path: Path, closed: list[Path], of_path: None) -> None:
    base = tmp_path / "shut" / "scratch"
    base.mkdir(parents=True)
    context = CheckContext({}, Config(scratch=str(base)), "", SlurmFacts())
    closed.append(base.parent)
    assert scratch(context).found == f"{base}: Permission denied"
    closed.clear()
    base.rmdir()
    base.touch()
    assert scratch(context).found == f"{base} is no folder"
