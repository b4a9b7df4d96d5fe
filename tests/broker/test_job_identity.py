"""A job's folder is resumed by that job alone; another job with the same id begins anew.

A broker is started as a batch script starts it, with Slurm's environment. `squeue` and `sacct` are
replaced here, so that any history of job ids can be played (`test_slurm_identity` has the real
ones). The first start is a real run that leaves the result of a named action. A later start that
returns this result without a worker has resumed the folder; a start in which the submission waits
has not.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.forked_verb import tangram

from tangram_hpc import connect
from tangram_hpc.accounting.record import fold
from tangram_hpc.app.broker_location import find_access
from tangram_hpc.client.client import Client
from tangram_hpc.storage.journal_segments import read_journals

NAME = "step0/reward/0"
SQUEUE = ('#!/bin/sh\nprintf \'%s\\037%s\\037%s\\037\\n\' '
          '7 "$PRETEND_SUBMITTED" "$PRETEND_SUBMITTED"\n')
SACCT = ('#!/bin/sh\nfor row in $PRETEND_ACCOUNTED; do at="${row%:*}"; state="${row#"$at"}"; '
         'echo "7|$at|${state#:}"; done\n')


@dataclass
class Life:
    """A broker that runs, and a client of it."""

    broker: subprocess.Popen[str]
    client: Client
    access: Path
    log: Path

    def kept(self) -> str | None:
        """The result of the name without a worker; None if the action waits for one."""
        future = self.client.submit("echo another", trusted=True, once=NAME)
        until(lambda: future.done() or self.client.ask("pending")["pending"], "an answer")
        return future.result(10).text if future.done() else None


def until(true, what: str, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.02)
    return found


def environ(home: Path, cluster: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TANGRAM_"))}
    return {**kept, "TANGRAM_HOME": str(home), "SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": cluster,
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}


@contextmanager
def broker_start(home: Path, submitted: int, restarts: int = 0, *, cluster: str = "alpha",
         accounted: tuple[int | str, ...] = ()) -> Iterator[Life]:
    """One start of job 7; at the end its broker is killed, as by a lost node."""
    env = environ(home, cluster) | {"PRETEND_SUBMITTED": str(submitted),
                                    "PRETEND_ACCOUNTED": " ".join(map(str, accounted))}
    if restarts:
        env["SLURM_RESTART_COUNT"] = str(restarts)
    (home / "bin").mkdir(exist_ok=True)
    for name, text in (("squeue", SQUEUE), ("sacct", SACCT)):
        (home / "bin" / name).write_text(text)
        (home / "bin" / name).chmod(0o755)
    log = home / f"log-{cluster}-{submitted}"
    with open(log, "w") as out:
        broker = subprocess.Popen([sys.executable, "-m", "tangram_hpc", "broker", "--bind", "none"],
                                  env=env, stdout=out, stderr=out, text=True)
    try:
        def access() -> Path | None:
            assert broker.poll() is None, log.read_text()
            for path in (home / "jobs").glob("7*/access.json"):
                if json.loads(path.read_text()).get("pid") == broker.pid:
                    return path.resolve()
            return None

        path = until(access, "the broker")
        with connect(path, name="test") as client:
            yield Life(broker, client, path, log)
    finally:
        broker.send_signal(signal.SIGKILL)
        broker.wait(30)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which job 7 of cluster alpha, submitted at 1000, left the result of a named
    action."""
    home = tmp_path_factory.mktemp("home")
    with broker_start(home, 1000) as one:
        worker = subprocess.Popen([sys.executable, "-m", "tangram_hpc", "worker", "--cpus", "1",
                                   "--access", str(one.access)], stdout=subprocess.DEVNULL)
        try:
            done = one.client.submit("echo mine", trusted=True, once=NAME).result(60)
            assert done.text == "mine\n"
        finally:
            worker.kill()
            worker.wait(30)
    return home


@pytest.fixture
def home(first: Path, tmp_path: Path) -> Path:
    """A copy of that home, in which no broker runs."""
    copy = tmp_path / "home"
    shutil.copytree(first, copy, symlinks=True)
    return copy


def test_a_requeued_job_resumes_its_folder(home: Path) -> None:
    """Slurm gives the job a new submit time and a higher restart count each time."""
    for restarts, submitted in ((1, 2000), (2, 3000), (4, 5000)):
        starts = tuple(range(1000, submitted, 1000))
        with broker_start(home, submitted, restarts, accounted=starts) as again:
            assert again.kept() == "mine\n"


def test_a_requeued_job_that_had_lost_nodes_resumes_its_folder(home: Path) -> None:
    """Accounting has another row for each size that the job had in its first start, with another
    submit time."""
    with broker_start(home, 2000, 1, accounted=("1000:RESIZING", "1500:RESIZING", "1700:REQUEUED")
                      ) as again:
        assert again.kept() == "mine\n"


def test_a_requeued_job_resumes_its_folder_without_slurm_accounting(home: Path) -> None:
    """The broker knows only the restart count and the submit time."""
    with broker_start(home, 2000, 1) as again:
        assert again.kept() == "mine\n"


def test_a_broker_restarted_within_one_job_start_resumes_the_folder(home: Path) -> None:
    """Submit time and restart count are unchanged."""
    with broker_start(home, 1000) as again:
        assert again.kept() == "mine\n"


def test_a_new_job_with_the_same_id_does_not_resume_the_old_jobs_folder(home: Path) -> None:
    """The controller was rebuilt, or job ids wrapped around. The old folder is moved, and the log
    says so."""
    with broker_start(home, 90_000) as stranger:
        assert stranger.kept() is None
        told = stranger.log.read_text()
        assert told.count("\n") == 1 and "is not this job's" in told, told
        assert stranger.access.parent.name in told
    moved = next(p for p in (home / "jobs").iterdir() if str(p) in told.partition("now ")[2])
    rows = fold(read_journals(moved)).records.values()
    assert [r.action.once for r in rows] == [NAME] and (moved / "once").is_dir()


def test_a_requeued_new_job_with_the_same_id_does_not_resume_the_old_jobs_folder(
        home: Path) -> None:
    """The new job's first start never reached a broker, so its restart count seems to continue the
    old job's."""
    with broker_start(home, 90_000, 1, accounted=(1000, 80_000)) as stranger:
        assert stranger.kept() is None
        assert "is not this job's" in stranger.log.read_text()
    with broker_start(home, 95_000, 2, accounted=(1000, 80_000, 90_000)) as again:
        assert again.kept() is None  # it waits since the start before, in its own journal
        assert again.log.read_text() == ""
        assert len(list(read_journals(again.access.parent))) > 2


def test_jobs_with_one_id_on_two_clusters_have_separate_folders(home: Path) -> None:
    """Two clusters share a home. Each job has its own folder and is found from its own nodes."""
    with broker_start(home, 2000, 1) as ours, broker_start(home, 1500, cluster="beta") as theirs:
        assert theirs.kept() is None and ours.kept() == "mine\n"
        assert ours.access != theirs.access
        for cluster, one in (("alpha", ours), ("beta", theirs)):
            assert find_access(environ(home, cluster), "7").resolve() == one.access
            told = tangram("info", "--json", env=environ(home, cluster), check=True).stdout
            assert json.loads(told)["job"] == "7"


def test_a_job_id_without_a_cluster_name_finds_the_running_job(home: Path) -> None:
    """Without a cluster in the environment the running job is found, whichever started last."""
    outside = {"TANGRAM_HOME": str(home)}
    with broker_start(home, 2000, 1) as ours:
        with broker_start(home, 1500, cluster="beta") as theirs:
            theirs.client.shutdown_broker("it is over")
            theirs.broker.wait(60)
        assert find_access(outside, "7").resolve() == ours.access


def test_a_folder_without_an_identity_record_is_not_resumed_and_stays_readable(home: Path) -> None:
    """An older release left `jobs/7` with a journal that does not say whose it is."""
    found = next(p for p in (home / "jobs").iterdir() if not p.is_symlink())
    (home / "jobs/7").unlink(missing_ok=True) if found.name != "7" else None
    (found / "identity.json").unlink(missing_ok=True)
    if found.name != "7":
        found.rename(home / "jobs/7")
    told = acct(home, "7")
    assert [row["once"] for row in told["actions"]] == [NAME]
    with broker_start(home, 2000, 1) as again:
        assert again.kept() is None
        said = again.log.read_text()
    assert "jobs/7~1" in said and said.count("\n") == 1
    assert acct(home, "7~1") == told


def acct(home: Path, job: str) -> dict:
    told = tangram("acct", "-j", job, "--json", check=True,
                   env={**os.environ, "TANGRAM_HOME": str(home)})
    return json.loads(told.stdout)
