"""`tangram acct` with sacct's options: what is chosen, how it is printed, and the rows of jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from helpers.forked_verb import tangram

from tangram_hpc import LocalCluster
from tangram_hpc.accounting.fields import FIELDS, as_sacct, stamp
from tangram_hpc.accounting.job_row import JobRow, fold_with_job
from tangram_hpc.cli.helpers.times import parse_time
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.errors import InvalidInput

SECOND = 10**9
NOW = datetime(2026, 11, 26, 14, 30, 15)


@pytest.mark.parametrize(("text", "meant"), [
    ("now", NOW), ("now-2hours", NOW - timedelta(hours=2)), ("now-90", NOW - timedelta(seconds=90)),
    ("now+1day", NOW + timedelta(days=1)), ("today", datetime(2026, 11, 26)),
    ("midnight-1week", datetime(2026, 11, 19)), ("noon", datetime(2026, 11, 26, 12)),
    ("2026-11-25", datetime(2026, 11, 25)), ("2026-11-25T08:05", datetime(2026, 11, 25, 8, 5)),
    ("2026-11-25T08:05:09", datetime(2026, 11, 25, 8, 5, 9)), ("08:05", NOW.replace(
        hour=8, minute=5, second=0)), ("1125", datetime(2026, 11, 25)),
    ("112525", datetime(2025, 11, 25)), ("11/25", datetime(2026, 11, 25)),
    ("11/25/25", datetime(2025, 11, 25)), ("25.11.2025", datetime(2025, 11, 25)),
    ("11/25-08:05", datetime(2026, 11, 25, 8, 5)), ("2:30pm", NOW.replace(second=0)),
    ("08:05:09 AM", NOW.replace(hour=8, minute=5, second=9)),
])
def test_times_mean_what_sacct_takes_them_for(text: str, meant: datetime) -> None:
    assert parse_time("--starttime", text, NOW) == round(meant.timestamp()) * 10**9


def test_times_are_taken_as_acct_prints_them() -> None:
    """Start, End and Submit have milliseconds."""
    meant = round(datetime(2026, 11, 25, 8, 5, 9).timestamp() * 1000 + 250) * 10**6
    printed = stamp(meant)
    assert printed == "2026-11-25T08:05:09.250"
    assert parse_time("--starttime", printed, NOW) == meant
    today = NOW.replace(hour=8, minute=5, second=9).timestamp()
    assert parse_time("--starttime", "08:05:09.5", NOW) == round(today) * SECOND + SECOND // 2


@pytest.mark.parametrize(("now_s", "back"), [
    (1774747800, 3600),  # 03:30 on the day that clocks are put forward
    (1792891800, 0), (1792891800, 3600),  # 02:30 for the second time, when they are put back
    (1792899000, 4 * 3600)])
def test_hours_before_now_are_hours_that_passed(now_s: int, back: int,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Europe/Berlin")
        time.tzset()
        try:
            found = parse_time("-S", f"now-{back}seconds", datetime.fromtimestamp(now_s))
        finally:
            patched.undo()
            time.tzset()
    assert found == (now_s - back) * SECOND


@pytest.mark.parametrize("text", ["", "yesterday-ish", "2026-13-01", "now*2", "25:00",
                                  "now-2years", "112", "now-300000weeks", "now-99999999999weeks",
                                  "0001-01-01"])
def test_a_text_that_is_no_time_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"--starttime: .* is not a time; write one as"):
        parse_time("--starttime", text, NOW)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two jobs, of which the second has an action that fails and one that computes."""
    home = tmp_path_factory.mktemp("home")
    with LocalCluster(2, home=home, job="4711") as first:
        first.submit(["true"], name="early", trusted=True).result(60)
    with LocalCluster(2, home=home, job="4712") as second:
        second.submit(["sh", "-c", "exit 3"], name="fails", trusted=True).result(60)
        second.submit([sys.executable, "-c", "sum(range(4 * 10**6))"], name="computes",
                      trusted=True).result(60)
    return home


def acct(home: Path, *words: str, status: int = 0) -> str:
    told = tangram("acct", *words, env={**os.environ, "TANGRAM_HOME": str(home)})
    assert told.returncode == status and "Traceback" not in told.stderr, told.stderr
    return told.stdout or told.stderr


def names(home: Path, *words: str) -> list[str]:
    return acct(home, "-P", "-n", "-o", "JobName", *words).split()


def test_rows_are_chosen_as_sacct_chooses_them(home: Path) -> None:
    assert names(home) == ["fails", "computes"]  # of the last job
    assert names(home, "-a") == ["early", "fails", "computes"]
    assert names(home, "-S", "now-1hour", "-E", "now+1hour") == ["early", "fails", "computes"]
    assert names(home, "-S", "now+1hour") == [] and names(home, "-E", "now-1hour") == []
    assert names(home, "-a", "-s", "F") == names(home, "-a", "--state=failed") == ["fails"]
    assert names(home, "-a", "-s", "CD,F") == ["early", "fails", "computes"]
    assert names(home, "-a", "--name", "early,computes") == ["early", "computes"]
    node = acct(home, "-P", "-n", "-o", "NodeList", "-j", "4711").strip()
    assert names(home, "-j", "4711", "-N", f"other,{node}") == ["early"]
    assert names(home, "-j", "4711", "-N", "other") == []
    assert names(home, "-j", "4711", "-r", "other") == []
    assert names(home, "-u", "nobody-of-this-name") == []
    assert names(home, "-u", str(os.getuid())) == ["early", "fails", "computes"]
    assert names(home, "-j", "4711", "-N", f"cpu[1-4],{node}") == ["early"]
    assert "--nodelist" in acct(home, "-N", "cpu[1-", status=2)
    assert names(home, "-s", "S,BF") == [] and names(home, "-s", "S,F") == ["fails"]
    assert "'XX' is not the state of an action" in acct(home, "-s", "XX", status=2)
    assert "is not a time" in acct(home, "-S", "soon", status=2)


def test_a_job_has_a_row_of_its_own(home: Path) -> None:
    rows = [line.split("|") for line in acct(
        home, "-X", "-a", "-P", "-n", "-o", "JobID,State,NCPUS,NNodes,JobName").splitlines()]
    assert rows == [["4711", "COMPLETED", "2", "1", ""], ["4712", "COMPLETED", "2", "1", ""]]
    both = acct(home, "--sacct", "-j", "4712", "-P", "-n", "-o", "JobID,State").split()
    assert both[0] == "4712|COMPLETED" and len(both) == 3
    assert [row.partition("|")[2] for row in both[1:]] == ["FAILED", "COMPLETED"]
    jobs = acct(home, "-X", "-a", "-P", "-n", "-o", "JobID", "-s", "CD", "-u", str(os.getuid()))
    assert jobs.split() == ["4711", "4712"]
    assert acct(home, "-X", "-a", "-P", "-n", "-s", "F") == ""
    assert acct(home, "--sacct", "-a", "-P", "-n", "-o", "JobID", "--name", "early"
                ).split()[0] == "4711"
    assert "4712" not in acct(home, "--sacct", "-a", "-P", "-n", "--name", "early")
    [job] = json.loads(acct(home, "-X", "--json", "-j", "4712"))["jobs"]
    actions = json.loads(acct(home, "--json", "-j", "4712"))["actions"]
    assert job["cpu_ns"] == sum(action["cpu_ns"] for action in actions) > 0
    assert sum(action["cpu_held_ns"] for action in actions) <= job["held_ns"]


def test_separators_and_figures_are_those_of_sacct(home: Path) -> None:
    line = acct(home, "-p", "-n", "--delimiter=^|^", "--sacct", "-j", "4712", "-o",
                "JobID,AdminComment,Elapsed,TotalCPU,Start,NTasks").splitlines()[-1]
    cells = line.split("^|^")
    assert len(cells) == 7 and cells[-1] == cells[1] == "" and cells[5] == "1"
    assert len(cells[2]) == len("00:00:00") and len(cells[3]) == len("00:00.123")
    assert datetime.strptime(cells[4], "%Y-%m-%dT%H:%M:%S").year >= 2026
    usual = acct(home, "-o", "JobID,State,Elapsed,MaxRSS", "-P", "-j", "4711").splitlines()
    assert usual[0] == "JobID|State|Elapsed|MaxRSS" and usual[1].endswith("K")
    assert acct(home, "-b", "-j", "4711").split()[:3] == ["JobID", "State", "ExitCode"]
    every = {line.split()[0] for line in acct(home, "-e").splitlines()}
    assert every == set(acct(home, "-l", "-P", "-j", "4711").splitlines()[0].split("|"))


def test_two_dashes_are_a_value_behind_an_equals_sign(home: Path) -> None:
    """argparse drops them before Python 3.13: a traceback, and all rows in place of none."""
    [row] = acct(home, "-P", "-n", "--delimiter=--", "-j", "4711", "-o", "JobName,State"
                 ).splitlines()
    assert row == "early--COMPLETED"
    assert acct(home, "-P", "-n", "--name=--", "-a") == ""


def test_a_damaged_journal_hides_no_other_job(home: Path, tmp_path: Path) -> None:
    here = tmp_path / "jobs"
    subprocess.run(["cp", "-a", str(home / "jobs"), str(here)], check=True)
    journal = here / "4711" / "journal"
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 64
    journal.write_bytes(data)
    told = tangram("acct", "-X", "-a", "-P", "-n", "-o", "JobID",
                   env={**os.environ, "TANGRAM_HOME": str(tmp_path)})
    assert told.stdout.split() == ["4712"]
    assert told.returncode == 1  # else a sum over all jobs would pass for complete
    assert "4711" in told.stderr and "Traceback" not in told.stderr


@pytest.mark.parametrize("words", [
    ["-S", "today"], ["-E", "now"], ["-s", "FAILED"], ["-a"], ["-u", "root"], ["-X"], ["-D"],
    ["--by", "name"], ["--name", "fails"], ["--sacct"], ["-A", "astro"]])
@pytest.mark.parametrize("about", ["--held", "--comment"])
def test_figures_of_a_whole_job_are_not_printed_for_a_choice_of_its_rows(
        words: list[str], about: str, home: Path) -> None:
    told = acct(home, about, *words, "-j", "4711", status=2)
    assert f"{about}: it is about one whole job, which -j names, and takes no --" in told


@pytest.mark.parametrize("form", [["--json"], ["-P"]])
def test_an_unknown_action_of_the_second_job_is_told_before_anything_is_printed(
        home: Path, form: list[str]) -> None:
    told = tangram("acct", *form, "-j", "4711,4712.1.99",
                   env={**os.environ, "TANGRAM_HOME": str(home)})
    assert (told.returncode, told.stdout) == (2, "")
    assert "job 4712 had no action 1.99" in told.stderr


def test_a_home_without_jobs_is_told_in_one_line(tmp_path: Path) -> None:
    for words in (["-a"], ["-X", "-a"], ["--held"], ["-S", "today"], []):
        assert "no job has run here" in acct(tmp_path, *words, status=2)


def folded(*events: ev.Event, served: bool = False) -> JobRow:
    return fold_with_job(events, served, 90 * SECOND)[1]


def test_the_row_of_a_job_tells_how_its_broker_ended_and_what_it_had_at_once() -> None:
    start = ev.BrokerStarted(10 * SECOND, "4711", "elastic", "none", "ann")
    first, second = (ev.NodeJoined(at * SECOND, number, NodeSpec(
        "n1", "n1", tuple(range(cores)), mem_mib=100))
                     for at, number, cores in ((20, 1, 4), (40, 2, 8)))
    lost = ev.NodeLost(30 * SECOND, 1, "gone")
    row = folded(start, first, lost, second, ev.BrokerStopped(60 * SECOND, "shut down"))
    assert (row.user, row.state, row.reason, row.cpus) == ("ann", "COMPLETED", "shut down", 8)
    assert (row.nodes, row.end_ns - row.start_ns) == (("n1",), 50 * SECOND)
    assert folded(start, first, ev.NodeJoined(40 * SECOND, 2, second.spec)).cpus == 12
    killed = folded(start, first)
    assert (killed.state, killed.reason, killed.end_ns) == (
        "FAILED", "its broker was killed", 20 * SECOND)
    runs = folded(start, first, served=True)
    assert (runs.state, runs.reason, runs.end_ns) == ("RUNNING", "", 90 * SECOND)


def test_a_job_had_gpus_that_came_after_its_most_cpus_had_left() -> None:
    """CPUs, memory and GPUs each have a maximum of their own."""
    plain, gpu = (ev.NodeJoined(at * SECOND, number, NodeSpec(
        f"n{number}", "n", tuple(range(cores)), mem_mib=mem, gpus=tuple(range(gpus))))
        for at, number, cores, mem, gpus in ((20, 1, 64, 100, 0), (40, 2, 8, 900, 4)))
    row = folded(ev.BrokerStarted(10 * SECOND, "4711", "elastic", "none", "ann"), plain,
                 ev.NodeLost(30 * SECOND, 1, "gone"), gpu)
    assert (row.cpus, row.mem_mib, row.gpus) == (64, 900, 4)


def test_actions_that_a_killed_broker_left_open_have_an_end() -> None:
    """The next start of the job would end them so; it would go on with those that have a name."""
    events = [
        ev.BrokerStarted(1, "4711", "elastic", "none", "ann"),
        ev.NodeJoined(2, 1, NodeSpec("n1", "n1", (0, 1), mem_mib=100)),
        *(ev.ActionSubmitted(3, Action(n, "work", once="name" if n == 3 else "")) for n in
          (1, 2, 3)),
        ev.LeaseGranted(4, 1, 1, 0, 1, (0,)), ev.LeaseStarted(9, 1)]
    ended = fold_with_job(events, False, 90)[0].records
    assert [r.state.value for r in ended.values()] == ["NODE_FAIL", "NODE_FAIL", "PENDING"]
    told = ended[1]
    assert (told.end_ns, told.elapsed_ns, told.outcome and told.outcome.reason) == (
        9, 5, "its broker was killed")
    runs = fold_with_job(events, True, 90)[0].records
    assert [r.state.value for r in runs.values()] == ["RUNNING", "PENDING", "PENDING"]


@pytest.mark.parametrize(("name", "ours", "sacct"), [
    ("TotalCPU", ">00:01:02.345", "01:02.345"), ("TotalCPU", "00:00:05.000", "00:00:05"),
    ("TotalCPU", "1-02:00:00.001", "1-02:00:00"), ("MaxRSS", ">99K", "99K"),
    ("JobName", "~x>y", "~x>y"), ("Once", "~/run", "~/run"),
    ("Elapsed", "00:00:01.999", "00:00:01"),
])
def test_figures_lose_our_marks_and_texts_keep_theirs(name: str, ours: str, sacct: str) -> None:
    field = next(field for field in FIELDS if field.name == name)
    assert as_sacct(field, ours) == sacct
