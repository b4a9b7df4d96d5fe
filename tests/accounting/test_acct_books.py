"""`tangram acct` over many jobs, from journals and from the books; groups, attempts and units."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from helpers.books_rig import BEGAN, write_journal

from tangram_hpc.accounting.books.importing import import_jobs
from tangram_hpc.accounting.books.schema import open_books
from tangram_hpc.accounting.fields import FIELDS
from tangram_hpc.accounting.roll_up import BY, ROLL_UP_FIELDS
from tangram_hpc.cli import main
from tangram_hpc.cli.helpers.job_savings import SAVINGS_FIELDS
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState

SECOND = 10**9
DAY = 86400 * SECOND
DOCS = Path(__file__).resolve().parents[2] / "docs"


def job(name: str, user: str, at: int) -> list[ev.Event]:
    """An action whose first node is lost, and one that fails; 2 CPUs for 10 s, and for 4 s."""
    first, second = mint(1, 1), mint(1, 2)
    cores = (0, 1)
    lost, failed = Outcome(ActionState.NODE_FAIL, reason="gone"), Outcome(
        ActionState.FAILED, exit_code=3, exec_ns=4 * SECOND, cpu_ns=5 * SECOND, maxrss_kib=3072)
    done = Outcome(ActionState.COMPLETED, exec_ns=6 * SECOND, cpu_ns=6 * SECOND, maxrss_kib=99)
    return [
        ev.BrokerStarted(at, name, "elastic", "none", user, account=f"lab-{user}"),
        ev.ClientJoined(at, 1, "uid", "rank-0", 0, 1, "socket"),
        ev.NodeJoined(at, 1, NodeSpec("n1", "h1", cores, 99, component="cpu", allocation=name)),
        ev.ActionSubmitted(at, Action(first, "pytest", attempts_max=2, mem_mib=2048,
                                      trajectory="t1")),
        ev.LeaseGranted(at + SECOND, 1, first, 1, 1, cores), ev.LeaseStarted(at + SECOND, 1),
        ev.NodeLost(at + 5 * SECOND, 1, "gone"), ev.LeaseFinished(at + 5 * SECOND, 1, lost, True),
        ev.NodeJoined(at + 6 * SECOND, 2, NodeSpec("n2", "h2", cores, 99, component="cpu",
                                                   allocation=name)),
        ev.LeaseGranted(at + 6 * SECOND, 2, first, 2, 2, cores),
        ev.LeaseFinished(at + 12 * SECOND, 2, done, True),
        ev.ActionSubmitted(at + 12 * SECOND, Action(second, "lint", mem_mib=512)),
        ev.LeaseGranted(at + 13 * SECOND, 3, second, 2, 1, cores),
        ev.LeaseFinished(at + 17 * SECOND, 3, failed, True),
        ev.ActionAcknowledged(at + 18 * SECOND, (first,)),
        ev.BrokerStopped(at + 20 * SECOND, "its job ended")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three jobs of two users, a day apart."""
    home = tmp_path_factory.mktemp("home")
    for n, user in enumerate(("ann", "bob", "ann")):
        at = BEGAN + n * DAY
        written = write_journal(home / "jobs" / f"471{n}", job(f"471{n}", user, at))
        os.utime(written, ns=(at + 20 * SECOND, at + 20 * SECOND))
    return home


def acct(home: Path, *words: str, env: dict[str, str] | None = None, fails: bool = False
         ) -> str:
    """What the verb prints; it runs in this process, since a start of Python takes longer."""
    told, said = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(told), redirect_stderr(said):
        for name, value in {"TANGRAM_HOME": str(home), "TZ": "UTC", **(env or {})}.items():
            patch.setenv(name, value)
        time.tzset()
        status = main(["acct", *words])
    time.tzset()
    assert status == (2 if fails else 0) and bool(said.getvalue()) == fails, said.getvalue()
    assert not (fails and told.getvalue()), told.getvalue()
    return said.getvalue() if fails else told.getvalue()


WORDS = (["-a"], ["-a", "-D", "-P", "-l"], ["-a", "--json"], ["-a", "-X", "--json"],
         ["-a", "--sacct", "-P"], ["-j", "4711,4712.1.2"], ["-u", "ann", "-P"],
         ["-a", "-S", "2023-11-15", "-E", "2023-11-16", "-P"], ["-a", "--name", "lint"],
         ["-a", "-s", "NF", "-D"], ["-a", "-N", "n1", "-D"], ["-a", "-r", "cpu"],
         ["-A", "lab-ann", "-P", "-o", "JobID,Account"], ["-A", "lab-bob", "--by", "name"],
         ["-A", "lab-ann,lab-bob", "-X", "-P", "-o", "JobID,User,Account"],
         ["-a", "--by", "hour", "--json"], ["-u", "ann", "--by", "user"],
         ["-a", "--by", "session", "-s", "F"], ["-j", "4712.1.1", "--by", "name"])


def test_books_and_journals_print_the_same(home: Path) -> None:
    for words in WORDS:
        journals = acct(home, *words)
        assert acct(home, *words, "--books") == journals and journals.strip(), words


def test_an_account_chooses_jobs_and_is_a_column(home: Path) -> None:
    told = acct(home, "-A", "lab-bob", "-X", "-n", "-P", "-o", "JobID,Account,User")
    assert told == "4711|lab-bob|bob\n"
    assert acct(home, "--accounts=lab-ann", "-n", "-P", "-o", "JobID,Account").split() == [
        f"{number}.{action}|lab-ann" for number in (4710, 4712) for action in ("1.1", "1.2")]
    [row, _] = json.loads(acct(home, "-A", "lab-bob", "--json"))["actions"]
    assert row["account"] == "lab-bob"
    assert acct(home, "-a", "-l", "--noconvert") == acct(home, "-a", "-l")
    assert acct(home, "-A", "lab", "-n") == acct(home, "-A", "lab", "--books", "-n") == ""


def test_the_last_account_of_a_job_counts_for_all_its_actions(tmp_path: Path) -> None:
    """The job was charged to another account before it was requeued."""
    at = BEGAN
    events = [ev.BrokerStarted(at, "4720", "elastic", "none", "ann", account="old"),
              ev.ClientJoined(at, 1, "uid", "rank-0", 0, 1, "socket"),
              ev.NodeJoined(at, 1, NodeSpec("n1", "h1", (0,), 99, component="cpu")),
              ev.ActionSubmitted(at, Action(mint(1, 1), "first", attempts_max=2)),
              ev.LeaseGranted(at, 1, mint(1, 1), 1, 1, (0,)),
              ev.LeaseFinished(at + 1, 1, Outcome(ActionState.NODE_FAIL, reason="gone"), True),
              ev.LeaseGranted(at + 2, 2, mint(1, 1), 1, 2, (0,)),
              ev.BrokerStopped(at + SECOND, "its job is requeued"),
              ev.BrokerStarted(at + 2 * SECOND, "4720", "elastic", "none", "ann", account="new"),
              ev.ClientJoined(at + 2 * SECOND, 2, "uid2", "rank-0", 0, 1, "socket"),
              ev.ActionSubmitted(at + 2 * SECOND, Action(mint(2, 1), "second")),
              ev.BrokerStopped(at + 4 * SECOND, "its job ended")]
    write_journal(tmp_path / "jobs" / "4720", events)
    for words in (["-A", "new"], ["-j", "4720", "-A", "new"]):
        told = acct(tmp_path, *words, "-n", "-P", "-o", "JobName,Account")
        assert told.split() == ["first|new", "second|new"], words
        assert acct(tmp_path, *words, "--books", "-n", "-P", "-o", "JobName,Account") == told
    told = acct(tmp_path, "-a", "-D", "-n", "-P", "-o", "JobName,Account")
    assert told.split() == ["first|new", "first|new", "second|new"]
    assert acct(tmp_path, "-a", "-D", "--books", "-n", "-P", "-o", "JobName,Account") == told
    assert acct(tmp_path, "-A", "old", "-n") == acct(tmp_path, "-A", "old", "--books", "-n") == ""


def test_a_broker_writes_down_the_account_of_its_job(tmp_path: Path) -> None:
    environ = {"TANGRAM_HOME": str(tmp_path), "PATH": os.environ["PATH"], "HOME": str(tmp_path),
               "SLURM_JOB_ACCOUNT": "astro"}
    broker = subprocess.Popen([sys.executable, "-m", "tangram_hpc", "broker", "--job", "4711",
                               "--bind", "none"], env=environ)
    until = time.monotonic() + 60
    while not (tmp_path / "jobs/4711/access.json").exists():
        assert broker.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    broker.terminate()
    broker.wait(60)
    assert acct(tmp_path, "-j", "4711", "-X", "-n", "-P", "-o", "JobID,Account") == "4711|astro\n"


TERMINATED = """
import os, signal, sys
from tangram_hpc.app.broker_process import serve_broker
from tangram_hpc.cli import main
tell = serve_broker._tell_others
def told(*args):
    tell(*args)
    os.kill(os.getpid(), signal.SIGTERM)
serve_broker._tell_others = told
sys.exit(main(sys.argv[1:]))
"""


def test_a_broker_that_is_told_to_end_at_once_writes_down_its_job(tmp_path: Path) -> None:
    environ = {"TANGRAM_HOME": str(tmp_path), "PATH": os.environ["PATH"], "HOME": str(tmp_path),
               "SLURM_JOB_ACCOUNT": "astro"}
    done = subprocess.run([sys.executable, "-c", TERMINATED, "broker", "--job", "4711", "--bind",
                           "none"], env=environ, timeout=60, check=False)
    assert done.returncode == 0
    assert acct(tmp_path, "-j", "4711", "-X", "-n", "-P", "-o", "JobID,Account") == "4711|astro\n"


def test_wrong_questions_are_told_in_one_line(home: Path) -> None:
    for words in (["-j", "4799"], ["-j", "4711,4799.1.1", "--by", "name"]):
        assert "the books have no job 4799" in acct(home, *words, "--books", fails=True)
    assert "--books: --held" in acct(home, "--books", "--held", fails=True)
    assert "--by: it adds up" in acct(home, "-a", "--by", "name", "-X", fails=True)


def test_a_journal_without_an_event_is_of_no_job(home: Path, tmp_path: Path) -> None:
    """Its broker has just begun, or was killed at once."""
    whole = acct(home, "-a", "-X")
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    (tmp_path / "jobs" / "4715").mkdir()
    (tmp_path / "jobs" / "4715" / "journal").touch()
    for words in (["-a", "-X"], ["-a", "-X", "--books"]):
        assert acct(tmp_path, *words) == whole
    assert "4715" not in acct(tmp_path, "-j", "4715", "--sacct", "-P", "-n")
    with open_books("", tmp_path) as books:
        assert import_jobs(books, tmp_path, BEGAN, print).read == 0


def test_an_import_that_failed_is_seen_in_the_status(home: Path, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the question was about other jobs."""
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    (tmp_path / "jobs" / "4711" / "journal").write_bytes(b"no journal at all")
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    for words in (["-a"], ["-a", "-X"], ["-a", "--by", "name"]):
        assert main(["acct", "--books", *words]) == 1, words
    assert main(["acct", "--books", "-j", "4710"]) == 0


def test_an_action_that_is_not_known_is_told_by_the_books_too(home: Path) -> None:
    told = acct(home, "-j", "4711.2.99", "--books", fails=True)
    assert "job 4711 had no action 2.99; `tangram acct --books -j 4711`" in told
    assert acct(home, "-j", "4711,4711.2.99", "--books") == acct(home, "-j", "4711,4711.2.99")


def test_nothing_is_printed_before_an_error_about_a_job(home: Path) -> None:
    for form in (["--json"], ["-P"], ["-X", "--json"], ["--books", "--json"]):
        acct(home, "-j", "4711,4799", *form, fails=True)  # it checks that stdout is empty


def test_means_are_of_actions_that_have_ended(tmp_path: Path) -> None:
    # those with a name outlive their broker, which was killed
    waits = [ev.ActionSubmitted(BEGAN + n, Action(mint(1, n), "pytest", once=f"work {n}"))
             for n in range(3, 9)]
    events = job("4711", "ann", BEGAN)
    write_journal(tmp_path / "jobs/4711", [*events[:-2], *waits])
    (group,) = [row for row in json.loads(acct(tmp_path, "--by", "name", "--json"))["groups"]
                if row["group"] == "pytest"]
    assert (group["actions"], group["ended"]) == (7, 1)
    assert (group["wait_mean_ns"], group["run_mean_ns"]) == (6 * SECOND, 6 * SECOND)


def test_a_width_of_0_cuts_everything(home: Path) -> None:
    assert acct(home, "-j", "4710", "-n", "-o", "State%0").split() == ["+", "+"]


def test_groups_add_up_all_attempts(home: Path) -> None:
    found = json.loads(acct(home, "-a", "--by", "name", "--json"))
    assert found["by"] == "name"
    pytest_, lint = found["groups"]
    assert (pytest_["group"], pytest_["actions"], pytest_["attempts"], pytest_["failed"]) == (
        "pytest", 3, 6, 0)
    assert pytest_["act_p50_ns"] == pytest_["act_mean_ns"] == 12 * SECOND
    assert pytest_["cpu_held_ns"] == 3 * 2 * (4 + 6) * SECOND
    assert (pytest_["wait_mean_ns"], pytest_["run_mean_ns"]) == (6 * SECOND, 6 * SECOND)
    assert (lint["actions"], lint["failed"], lint["cpu_ns"]) == (3, 3, 15 * SECOND)
    jobs = json.loads(acct(home, "-a", "-X", "--json"))["jobs"]
    groups = [json.loads(acct(home, "-a", "--by", by, "--json"))["groups"] for by in BY]
    for rows in groups:
        assert sum(r["cpu_ns"] for r in rows) == sum(j["cpu_ns"] for j in jobs)
        assert sum(r["cpu_held_ns"] for r in rows) == 84 * SECOND <= sum(j["held_ns"] for j in jobs)
        assert sum(r["actions"] for r in rows) == 6 and sum(r["attempts"] for r in rows) == 9
    assert [r["group"] for r in groups[BY.index("hour")]] == [
        "2023-11-14T22:00", "2023-11-15T22:00", "2023-11-16T22:00"]
    assert acct(home, "-a", "--by", "user", "-P", "-n", "-o", "Group,Actions,CoreHours"
                ).split() == ["ann|4|0.016", "bob|2|0.008"]


def test_each_attempt_has_a_row(home: Path) -> None:
    rows = acct(home, "-j", "4710", "-D", "-P", "-n", "-o", "JobID,State,NodeList,CPUTimeRAW")
    assert rows.split() == ["4710.1.1|NODE_FAIL|n1|8", "4710.1.1|COMPLETED|n2|12",
                            "4710.1.2|FAILED|n2|8"]


def test_times_and_amounts_are_printed_as_sacct_prints_them(home: Path) -> None:
    form = "JobName,Submit,MaxRSS,ReqMem,ReqTRES"
    told = acct(home, "-j", "4710", "-P", "-n", "-o", form, "--units", "G",
                env={"SLURM_TIME_FORMAT": "%d.%m. %H:%M"}).splitlines()
    assert told == ["pytest|14.11. 22:13|0.00G|2G|cpu=1,mem=2G",
                    "lint|14.11. 22:13|0.00G|0.50G|cpu=1,mem=0.50G"]
    assert acct(home, "-j", "4710", "-P", "-n", "-o", "MaxRSS", "--units", "M").split() == [
        "0.10M", "3M"]
    job_row = acct(home, "-X", "-j", "4710", "-P", "-n", "-o", "Submit,End",
                   env={"SLURM_TIME_FORMAT": "%s"}).strip()
    assert job_row == f"{BEGAN // SECOND}|{BEGAN // SECOND + 20}"


def test_journals_that_can_have_no_wanted_rows_are_not_read(home: Path, tmp_path: Path) -> None:
    """Any read of a journal that is damaged behind its beginning would be told."""
    subprocess.run(["cp", "-a", str(home / "jobs"), str(tmp_path)], check=True)
    for name in ("4710", "4711"):
        journal = tmp_path / "jobs" / name / "journal"
        about, data = journal.stat(), bytearray(journal.read_bytes())
        data[-99] ^= 64
        journal.write_bytes(data)
        os.utime(journal, ns=(about.st_atime_ns, about.st_mtime_ns))
    only = ["-P", "-n", "-o", "JobID"]
    assert acct(tmp_path, "-S", "2023-11-16", *only).split() == ["4712.1.1", "4712.1.2"]
    assert acct(tmp_path, "-E", "2023-11-14", *only) == ""
    assert acct(tmp_path, "-u", "eve", *only) == ""


def test_the_database_library_is_loaded_by_the_books_alone(home: Path) -> None:
    script = ("import sys; from tangram_hpc.cli import main; status = main(sys.argv[1:]); "
              "print('sqlalchemy' in sys.modules)")
    for words, loaded in ((["acct", "-a"], "False"), (["acct", "-a", "--by", "name"], "False"),
                          (["acct", "--books"], "True")):
        told = subprocess.run([sys.executable, "-c", script, *words], text=True, check=True,
                              env={**os.environ, "TANGRAM_HOME": str(home)}, capture_output=True)
        assert told.stdout.split()[-1] == loaded, words


def test_every_column_is_explained() -> None:
    text = (DOCS / "ACCOUNTING.md").read_text()
    told = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert {f.name for f in (*FIELDS, *ROLL_UP_FIELDS, *SAVINGS_FIELDS)} <= told
