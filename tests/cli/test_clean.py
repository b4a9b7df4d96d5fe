"""`tangram clean`: what it lists, what it removes, and what it never touches."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.forked_verb import tangram

from tangram_hpc import LocalCluster
from tangram_hpc.errors import InvalidInput
from tangram_hpc.storage.access import NAME as ACCESS
from tangram_hpc.storage.folder_lock import FileLock, FolderLock
from tangram_hpc.storage.job_folders import (
    BROKEN_OFF,
    ENDED,
    NOT_ASKED,
    QUEUED,
    RUNS,
    JobFolder,
    SlurmQueue,
    job_folders,
    outdated,
    remove_job_folder,
)
from tangram_hpc.storage.journal_repair import repair_job

DAY_NS = 86400 * 10**9


def clean(home: Path, *words: str, path: str = "/none") -> subprocess.CompletedProcess[str]:
    """Runs the verb; with this `path` it finds no commands of Slurm."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    return tangram("clean", *words, env={**environ, "TANGRAM_HOME": str(home),
                                         "SLURM_CONF": "/none", "PATH": path})


def listed(home: Path, *words: str) -> dict[str, tuple[str, str]]:
    told = clean(home, "--json", *words)
    rows: list[dict[str, Any]] = json.loads(told.stdout)["folders"]
    return {row["job"]: (row["state"], row["done"]) for row in rows}


def a_job(home: Path, name: str, days: float = 0.0, ended: bool = True, size: int = 10) -> Path:
    """The folder of a job that was over so many days ago."""
    folder = home / "jobs" / name
    folder.mkdir(parents=True)
    (folder / "journal").write_bytes(os.urandom(size))
    (folder / ACCESS).write_text(json.dumps({"ended": "its job is over" if ended else ""}))
    at = time.time() - days * 86400
    for path in folder.iterdir():
        os.utime(path, (at, at))
    return folder


def test_jobs_that_run_stay_and_those_that_are_over_go(tmp_path: Path) -> None:
    with LocalCluster(1, home=tmp_path, job="over") as cluster:
        assert cluster.submit("true", trusted=True).result(60).exit_code == 0
    with LocalCluster(1, home=tmp_path, job="alive") as cluster:
        assert listed(tmp_path) == {"over": (ENDED, ""), "alive": (RUNS, "")}
        time.sleep(1.1)
        told = clean(tmp_path, "alive", "--older-than", "1s", "--keep", "0K")
        assert told.returncode == 1 and "stays: its job runs" in told.stdout
        assert cluster.submit("true", trusted=True).result(60).exit_code == 0
        assert [p.name for p in (tmp_path / "jobs").iterdir()] == ["alive"]
    assert clean(tmp_path, "alive").returncode == 0
    assert list((tmp_path / "jobs").iterdir()) == []


def test_folders_go_by_age_by_size_and_by_name(tmp_path: Path) -> None:
    for name, days in (("a", 40), ("b", 20), ("c", 10), ("d", 1)):
        a_job(tmp_path, name, days, size=1 << 20)
    (tmp_path / "jobs" / "no-job").mkdir()
    assert listed(tmp_path, "-n", "--older-than", "30d")["a"] == (ENDED, "would be removed")
    assert listed(tmp_path, "--older-than", "30d") == {
        "a": (ENDED, "removed"), "b": (ENDED, ""), "c": (ENDED, ""), "d": (ENDED, "")}
    assert {n for n, (_, done) in listed(tmp_path, "--keep", "2500K").items() if done} == {"b"}
    told = clean(tmp_path, "e", "--older-than", "5d")
    assert told.returncode == 2 and "JOB: e has no folder" in told.stderr
    assert set(listed(tmp_path, "c")) == {"c", "d"} and set(listed(tmp_path)) == {"d"}
    assert sorted(p.name for p in (tmp_path / "jobs").iterdir()) == ["d", "no-job"]


def test_a_folder_of_slurm_goes_only_by_name_where_its_cluster_cannot_be_asked(tmp_path: Path
                                                                               ) -> None:
    for name in ("1@east", "2@east", "3"):
        a_job(tmp_path, name, 40)
    os.symlink("1@east", tmp_path / "jobs" / "1")
    told = clean(tmp_path, "--older-than", "30d", "--keep", "0K")  # there is no squeue
    assert told.returncode == 0 and "stay unless they are named" in told.stderr
    assert listed(tmp_path) == dict.fromkeys(("1@east", "2@east", "3"), (NOT_ASKED, ""))
    here = SlurmQueue("west", frozenset({2}))
    assert {f.path.name: f.state for f in job_folders(tmp_path, here)} == {
        "1@east": NOT_ASKED, "2@east": NOT_ASKED, "3": ENDED}
    assert clean(tmp_path, "1").returncode == 0
    assert not os.path.lexists(tmp_path / "jobs" / "1")  # the link that led to it
    assert sorted(p.name for p in (tmp_path / "jobs").iterdir()) == ["2@east", "3"]


@pytest.mark.skipif(shutil.which("squeue") is None, reason="Slurm's commands are not installed")
def test_where_slurm_does_not_answer_the_folders_of_its_jobs_stay(tmp_path: Path) -> None:
    for name in ("11@east", "local-1"):
        a_job(tmp_path, name, 40)
    told = clean(tmp_path, "--older-than", "30d", path=os.environ["PATH"])
    assert told.stderr.count("\n") == 1 and "stay unless they are named" in told.stderr
    assert [p.name for p in (tmp_path / "jobs").iterdir()] == ["11@east"]


@pytest.mark.parametrize("words", [["--older-than", "30"], ["--keep", "20"], ["--keep", "1.5G"]])
def test_an_amount_without_a_unit_is_refused_with_an_example(words: list[str], tmp_path: Path
                                                             ) -> None:
    told = clean(tmp_path, *words)
    assert told.returncode == 2 and "such as" in told.stderr and "Traceback" not in told.stderr


def test_a_broker_that_was_killed_leaves_a_folder_that_is_broken_off(tmp_path: Path) -> None:
    folder = a_job(tmp_path, "7@east", 2, ended=False)
    idle, queued = SlurmQueue("east", frozenset()), SlurmQueue("east", frozenset({7}))
    assert [each.state for each in job_folders(tmp_path, idle)] == [BROKEN_OFF]
    assert [each.state for each in job_folders(tmp_path, queued)] == [QUEUED]
    lock = FileLock(folder)  # a broker of this host starts
    assert [each.state for each in job_folders(tmp_path, idle)] == [RUNS]
    assert not remove_job_folder(folder) and folder.exists()
    lock.release()
    FolderLock(folder, FileLock(folder))  # one of another host, whose lock is not seen here
    assert [each.state for each in job_folders(tmp_path, idle)] == [RUNS]
    (folder / ACCESS).write_text(json.dumps({"ended": "its job is over"}))
    at = time.time() - 40
    os.utime(folder / ACCESS, (at, at))  # the next broker has just taken the folder
    assert [each.state for each in job_folders(tmp_path, idle)] == [RUNS]
    os.utime(folder / ACCESS)  # and has ended in order
    assert [each.state for each in job_folders(tmp_path, idle)] == [ENDED]


def test_a_removal_that_was_cut_off_is_finished_by_the_next(tmp_path: Path) -> None:
    a_job(tmp_path, "a")
    a_job(tmp_path, ".removing-b")
    assert set(listed(tmp_path, "-n")) == {"a"}
    assert (tmp_path / "jobs" / ".removing-b").exists()
    assert set(listed(tmp_path)) == {"a"}
    assert [p.name for p in (tmp_path / "jobs").iterdir()] == ["a"]


def test_needed_folders_count_for_the_size_and_are_never_chosen() -> None:
    folders = [JobFolder(Path(name), state, 10, day * DAY_NS) for name, state, day in (
        ("a", QUEUED, 1), ("b", ENDED, 2), ("c", RUNS, 3), ("d", BROKEN_OFF, 4))]
    now = 10 * DAY_NS

    def names(older_ns: int | None, keep: int | None) -> str:
        return "".join(each.path.name for each in outdated(folders, now, older_ns, keep))

    assert names(None, None) == ""
    assert names(7 * DAY_NS, None) == "b"
    assert names(0, None) == names(None, 0) == "bd"
    assert names(None, 40) == "" and names(None, 39) == names(None, 30) == "b"


def test_a_lock_that_may_not_be_opened_is_not_taken_for_a_broker(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened = a_job(tmp_path, "7"), os.open

    def refused(path: str | Path, *flags: int, **more: int) -> int:
        if path == folder / "lock":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *flags, **more)

    monkeypatch.setattr(os, "open", refused)
    for act in (remove_job_folder, repair_job):
        with pytest.raises(InvalidInput, match=r"make the file `lock` in it \(Permission denied"):
            act(folder)
    assert (folder / "journal").exists()
