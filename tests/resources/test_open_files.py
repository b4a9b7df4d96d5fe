"""The limits of open files that sites set, and brokers and workers that serve many."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tangram_hpc import LocalCluster
from tangram_hpc.resources import open_files

_KIND = resource.RLIMIT_NOFILE
_SOFT = 64
_SESSIONS = 60


def _cluster(home: Path, hard: int) -> LocalCluster:
    """A cluster whose broker and worker are started with these limits, as below `ulimit -n`."""
    cluster = LocalCluster(cpus=2, mem_mib=8192, home=home)
    cluster._program = (
        "-c", f"import os, resource, sys; resource.setrlimit({_KIND}, ({_SOFT}, {hard})); "
              "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])", *cluster._program)
    return cluster


def test_a_low_soft_limit_ends_no_worker_and_is_that_of_the_programs(tmp_path: Path) -> None:
    """A worker with the usual soft limit ended with all of its sessions once it had so many."""
    with _cluster(tmp_path, 4096) as cluster:
        for child in cluster._children:
            assert resource.prlimit(child.pid, _KIND) == (4096, 4096)
        sessions = [cluster.session(mem="16M") for _ in range(_SESSIONS)]
        ran = [session.exec("ulimit -Sn", cpus=1) for session in sessions]
        assert {run.result(120).text for run in ran} == {f"{_SOFT}\n"}


def test_a_worker_at_its_hard_limit_refuses_sessions_and_keeps_those_it_has(
        tmp_path: Path) -> None:
    with _cluster(tmp_path, _SOFT) as cluster:
        sessions = [cluster.session(mem="16M") for _ in range(_SESSIONS)]
        runs = [session.exec("true", cpus=1) for session in sessions]
        whys = [str(why) for run in runs if (why := run.exception(120)) is not None]
        assert whys and all(f"may have {_SOFT} open files" in why for why in whys), whys
        kept = [session for session, run in zip(sessions, runs, strict=True)
                if run.exception() is None]
        assert len(kept) > 20
        assert cluster.submit(pow, 2, 3).result(60) == 8  # functions have the rest
        for session in kept:
            session.close()
        kept[0].closed.result(60)
        assert cluster.session(mem="16M").exec("echo again", cpus=1).result(60).text == "again\n"


def test_the_limit_is_raised_to_the_hard_one_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 10**9)]
    monkeypatch.setattr(open_files, "_as_started", None)  # later children are not given these
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda kind, new: limits.append(new))
    open_files.allow_many()
    assert limits[-1] == (65536, 10**9)
    assert not open_files.is_spare(65536 - 257) and open_files.is_spare(65536 - 256)
    limits.append((512, 512))
    open_files.allow_many()
    assert limits[-1] == (512, 512)
    assert not open_files.is_spare(383) and open_files.is_spare(384)
