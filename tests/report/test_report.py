"""`tangram report`: figures as `tangram acct` has them, true advice, names that are text."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.mixed_job import JOB, run_mixed_job
from helpers.recorded_job import BEGAN_NS, busy_job, played, write_job

from tangram_hpc import LocalCluster
from tangram_hpc.accounting.held_usage import held
from tangram_hpc.accounting.roll_up import RollUp
from tangram_hpc.accounting.summary import summary
from tangram_hpc.cli import main
from tangram_hpc.cli.helpers import job_savings
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.report import reported_job
from tangram_hpc.report.advice import advice
from tangram_hpc.report.contents import contents
from tangram_hpc.report.figures import all_plots
from tangram_hpc.report.labels import apart, label, plain
from tangram_hpc.report.lanes import BINS, ROWS_MAX, Window, lanes
from tangram_hpc.report.page import page
from tangram_hpc.report.reported_job import PARTS, ReportedJob, gather, headline
from tangram_hpc.report.series import mean_level, peak, time_series
from tangram_hpc.report.waterfall import slowest_trajectories
from tangram_hpc.simulator.savings.savings import (
    AS_RUN,
    RECORDED,
    SERVICES,
    Alternative,
    Savings,
)
from tangram_hpc.simulator.workload import EXAMPLES, read_cluster, read_workload
from tangram_hpc.storage.record_file import framed

HOSTILE = ' <img src=x onerror=alert(1)></script><script>alert(2)</script>\x1b[2J\u202e"\'&amp;'


class Elements(HTMLParser):
    """All elements of a page, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real mixed job whose names came from a model, and simulated ones."""
    home = tmp_path_factory.mktemp("home")
    run_mixed_job(home, trajectories=2, turns=2, hostile=HOSTILE)
    work, cluster = read_workload(Path("mixed-24")), read_cluster(EXAMPLES / "cluster-24.json")
    write_job(home, played(work, cluster, "elastic")[1], "4711")
    return home


@pytest.fixture(autouse=True)
def _here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(home))
    monkeypatch.chdir(tmp_path)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(list(words)) == 0
    return json.loads(capsys.readouterr().out)


def report_of(events: list[ev.Event], served: bool = False) -> ReportedJob:
    return gather(events, served, events[-1].at if events else BEGAN_NS)


@pytest.mark.parametrize("job", ["4711", JOB])
def test_figures_are_those_of_acct(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "report", job, "--json", "--simulate", "0")
    actions = told(capsys, "acct", "-j", job, "--json")["actions"]
    row = told(capsys, "acct", "-X", "-j", job, "--json")["jobs"][0]
    head, hour = found["headline"], 3600e9
    assert head["actions"] == len(actions) and head["state"] == row["state"]
    ended = [a for a in actions if a["end_ns"]]
    acts = [a["end_ns"] - a["submit_ns"] for a in ended]
    assert head["act_mean_s"] == pytest.approx(sum(acts) / len(acts) / 1e9)
    assert head["cpu_held_core_h"] == pytest.approx(row["held_ns"] / hour)
    assert head["cpu_used_core_h"] == pytest.approx(row["cpu_ns"] / hour)
    assert head["cpu_lent_core_h"] == pytest.approx(sum(a["cpu_held_ns"] for a in actions) / hour)
    assert head["cpus"] == row["cpus"] and head["gpus"] == row["gpus"]
    slowest = max(ended, key=lambda a: a["end_ns"] - a["submit_ns"])
    assert found["slowest"][0]["action"] == slowest["job_id"]
    assert sum(row["actions"] for row in found["classes"]) == len(ended)
    calls = [a for a in ended if a["key"].startswith("service:")]
    assert sum(row["calls"] for row in found["services"]) == len(calls) > 0
    assert found["endpoints"][0]["calls"] == sum(a["key"] == "endpoint:search" for a in ended)
    for row in found["classes"]:
        assert row["act_mean_s"] == pytest.approx(
            sum(row[f"{part}_mean_s"] for part in PARTS), abs=2e-6)
        assert row["rest_mean_s"] == pytest.approx(row["setup_mean_s"] + row["return_mean_s"])


def test_the_page_shows_these_figures_and_asks_for_nothing_from_outside(
        capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        assert main(["report", "4711", "-o", "page.html", "--simulate", "0"]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path("page.html").stat().st_mode) == 0o644  # no outputs are on it
    assert re.fullmatch(r"page\.html: 117 actions, [45]\.\d MiB; open it in a browser\n",
                        capsys.readouterr().out)
    text = (tmp_path / "page.html").read_text()
    elements = Elements()
    elements.feed(text)
    assert not [attrs for _, attrs in elements.found
                if {"src", "href", "action", "data"} & set(attrs)]
    policy = next(attrs["content"] for tag, attrs in elements.found
                  if "http-equiv" in attrs and tag == "meta")
    assert policy is not None and policy.startswith("default-src 'none'")
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text)[1])  # type: ignore[index]
    assert figures["headline"] == told(capsys, "report", "4711", "--json", "--simulate",
                                       "0")["headline"]
    assert "117" in elements.text and f"{figures['headline']['act_mean_s'] * 1000:.0f} ms" in text


def test_names_that_a_model_chose_are_text(home: Path, tmp_path: Path) -> None:
    assert main(["report", JOB, "-o", "page.html", "--simulate", "0"]) == 0
    text = (tmp_path / "page.html").read_text()
    elements = Elements()
    elements.feed(text)
    tags = [tag for tag, _ in elements.found]
    assert "img" not in tags and tags.count("script") == 5  # three of data, Plotly and ours
    assert not [attrs for _, attrs in elements.found if any(a.startswith("on") for a in attrs)]
    data = "".join(re.findall(r'type="application/json" id="\w+">(.*?)</script>', text))
    assert "<" not in data and "\x1b" not in text and "\u202e" not in text
    plots = json.loads(re.search(r'id="plots">(.*?)</script>', text)[1])  # type: ignore[index]
    names = [trace.get("name") or "" for trace in plots["timeline"]["data"]]
    assert any("&lt;img" in name for name in names)  # Plotly reads HTML in names
    assert not any("<" in name for name in names)


def test_a_label_prints_is_short_and_has_no_marks_of_html() -> None:
    assert plain("a\x1bb\u202ec\nd") == "a\\x1bb\\u202ec\\nd"
    assert label("<a href='x'>&") == "&lt;a href=&#x27;x&#x27;&gt;&amp;"
    assert len(plain("x" * 10**6)) == 48 and plain("x" * 48) == "x" * 48


def drawn(report: ReportedJob) -> str:
    series, grid = time_series(report), lanes(report)
    return page(report, series, grid, all_plots(report, series, grid))


@pytest.mark.parametrize("served", [False, True])
def test_an_empty_job_and_one_that_just_began_have_a_page(served: bool) -> None:
    begun = [ev.BrokerStarted(BEGAN_NS, "4711", "elastic", "none", "ada")]
    report = report_of(begun, served)
    text = drawn(report)
    assert "No action has ended" in text and "Plotly" not in text and len(text) < 20_000
    assert ("RUNNING" if served else "FAILED") in text


def test_a_running_job_has_a_page_of_what_was_so_far() -> None:
    events = busy_job(400, 1, 4)
    half = events[:len(events) // 2]
    report = gather(half, True, half[-1].at + 5 * 10**9)
    series = time_series(report)
    assert report.row.state == "RUNNING" and series.running[-1] >= 1  # they still hold their cores
    grid = lanes(report)
    assert (grid.cells[:, -1] > 0).any() and "RUNNING" in drawn(report)


def test_a_torn_journal_has_a_page_of_what_is_whole(home: Path, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(home / "jobs" / "4711", home / "jobs" / "torn", dirs_exist_ok=True)
    journal = home / "jobs" / "torn" / "journal"
    journal.write_bytes(journal.read_bytes()[:-9])
    found = told(capsys, "report", "torn", "--json", "--simulate", "0")
    whole = told(capsys, "report", "4711", "--json", "--simulate", "0")
    assert found["headline"]["state"] == "FAILED"  # its end was in what was torn off
    assert 0 <= found["headline"]["actions"] <= whole["headline"]["actions"]
    assert main(["report", "torn", "-o", "torn.html", "--simulate", "0"]) == 0


def test_savings_and_their_assumptions_are_in_the_report(capsys: pytest.CaptureFixture[str]
                                                         ) -> None:
    found = told(capsys, "report", "4711", "--json", "--static", "2")["savings"]
    assert [row["policy"] for row in found["rows"]] == [
        "elastic", "elastic", "fcfs:2", "static:2", "elastic", "static:2", "elastic", "elastic"]
    assert found["rows"][3]["act_growth"] > 0 and found["assumptions"]
    [services] = [row for row in found["rows"] if row["way"] == "services"]
    assert services["held_gpu_h"] == pytest.approx(services["gpus"] * services["step_s"] / 3600)
    assert main(["report", "4711", "-o", "page.html"]) == 0
    text = Path("page.html").read_text()
    assert "each service on GPUs of its own" in text and "keeps every GPU service" in text


def test_acct_prints_the_same_savings(capsys: pytest.CaptureFixture[str]) -> None:
    of_page = told(capsys, "report", "4711", "--json")["savings"]
    [of_acct] = told(capsys, "acct", "-X", "-j", "4711", "--savings", "--json")["savings"]
    assert of_acct == {"job": "4711", **of_page}
    assert main(["acct", "-X", "-j", "4711", "--savings"]) == 0
    table, _, notes = capsys.readouterr().out.partition("\n\n")
    head, _, *rows = table.splitlines()
    assert head.split()[:3] == ["JobID", "Way", "Policy"] and len(rows) == len(of_page["rows"])
    assert all(f"- {text}" in notes for text in of_page["assumptions"])
    assert main(["acct", "-j", "4711", "--savings", "-P", "-o", "Way,GPUHours"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "Way|GPUHours", f"recorded|{of_page['rows'][0]['held_gpu_h']:.3f}"]
    assert main(["acct", "--savings", "-e"]) == 0
    assert "GPUHours" in capsys.readouterr().out


def test_the_slowest_actions_link_to_what_they_wrote(capsys: pytest.CaptureFixture[str],
                                                     tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    with LocalCluster(1, home=tmp_path, job="logged", logs_mib=1) as client:
        for argv in (["sh", "-c", f"echo '{HOSTILE.split(chr(27))[0]}'; echo two >&2; sleep 0.2"],
                     ["true"]):
            client.submit(argv, trusted=True).result(60)
        client.submit(["sh", "-c", "seq 5000; printf '%0900d' 0; echo the end"], trusted=True
                      ).result(60)
    before = os.umask(0)
    try:
        Path("old.html").touch(mode=0o644)
        for name in ("logged.html", "old.html"):
            assert main(["report", "logged", "-o", name, "--simulate", "0"]) == 0
            # outputs are nobody else's business, on the page as in the job's folder
            assert stat.S_IMODE(Path(name).stat().st_mode) == 0o600
    finally:
        os.umask(before)
    text, elements = Path("logged.html").read_text(), Elements()
    elements.feed(text)
    links = [dict(fields)["href"] for name, fields in elements.found if name == "a"]
    ids = [fields.get("id") for _, fields in elements.found]
    assert len(links) == 2 and all(link[0] == "#" and ids.count(link[1:]) == 1 for link in links)
    logs = text.partition("<section id='logs'>")[2].partition("</section>")[0]
    assert "&lt;script&gt;" in logs and "<script" not in logs and "\ntwo</pre>" in logs
    assert "\n5000\n…000" in logs and "000the end</pre>" in logs  # of a long line the end
    assert "\n100\n" not in logs  # of a long output the end


def test_one_damaged_journal_costs_the_other_jobs_nothing(
        home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    work, cluster = read_workload(Path("mixed-24")), read_cluster(EXAMPLES / "cluster-24.json")
    few = work.model_copy(update={"trajectories": work.trajectories[:2]})
    events = played(few, cluster, "elastic")[1]
    damaged = write_job(tmp_path, events, "4712") / "journal"
    write_job(tmp_path, events, "4711")
    record = framed(msgspec.msgpack.encode(events[-1:]))
    damaged.write_bytes(damaged.read_bytes() + record[:-3] + b"xx" + record[-1:] + record)
    assert main(["acct", "--savings", "-j", "4712,4711", "-P", "-o", "JobID,Way"]) == 1
    out, err = capsys.readouterr()
    assert "4711|services" in out and "4712" not in out
    assert "job 4712: nothing to compare: journal" in err
    # a job that is not there is told before anything is simulated
    assert main(["acct", "--savings", "-j", "4711,4713"]) == 2
    out, err = capsys.readouterr()
    assert not out and "4713" in err and "simulating" not in err


def test_sentences_of_several_jobs_name_theirs_and_print(capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    def found(job: str) -> tuple[Savings | None, str]:
        if job == "3":
            return None, "service 'a\x1b[2J'"
        return Savings([Alternative(RECORDED, "elastic", 8), Alternative(
            "fcfs", "fcfs:4", 8, why_not=f"service 'b\x1b{job}'")], assumptions=[
            "of all", f"{job} actions"]), ""

    monkeypatch.setattr(job_savings, "_of_job", found)
    monkeypatch.setattr(job_savings, "_journals", lambda job: iter(()))
    assert main(["acct", "--savings", "-j", "1,2,3"]) == 1
    out, err = capsys.readouterr()
    assert out.partition("\n\n")[2].splitlines() == [
        "- Job 1: \"fcfs\" is impossible: service 'b\\x1b1'.", "- of all", "- Job 1: 1 actions",
        "- Job 2: \"fcfs\" is impossible: service 'b\\x1b2'.", "- Job 2: 2 actions"]
    assert "service 'a\\x1b[2J'" in err and "\x1b" not in out + err


@pytest.mark.parametrize(("words", "says"), [
    *(([f"--{name}", value], f"takes no --{name}") for name, value in [
        ("starttime", "now-1hour"), ("endtime", "now"), ("state", "CD"), ("nodelist", "n1"),
        ("partition", "cpu"), ("name", "build"), ("user", "ada")]),
    *(([f"--{name}"], f"takes no --{name}") for name in ("allusers", "brief", "long")),
    (["-o", "Nope"], "see `tangram acct --savings -e`"),
    (["--by", "name"], "takes no --by"), (["--books"], "takes no --books"),
    (["-j", "4711.1.1"], "name jobs without an action"), (["-o", "State"], "'State'")])
def test_savings_of_anything_but_whole_jobs_are_refused(words: list[str], says: str,
                                                        capsys: pytest.CaptureFixture[str]
                                                        ) -> None:
    assert main(["acct", "--savings", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and says in lines[0]


@pytest.mark.parametrize(("words", "says"), [
    (["missing"], "missing"), (["4711", "--static", "-1"], "--static -1"),
    (["4711", "--simulate", "-5"], "--simulate -5: must be a number of actions"),
    (["4711", "--window", "900:901"], "--window 900:901: the job lasted 18.6 s"),
    (["4711", "-o", "no/such/folder.html"], "--output no/such/folder.html: No such file"),
    (["missing", "-o", "no/such/folder.html"], "--output no/such/folder.html: No such file"),
    (["missing", "-o", "/"], "--output /: Is a directory")])
def test_wrong_input_is_one_line_with_status_2(words: list[str], says: str,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *words, *([] if words[-2:-1] in (["--static"], ["--simulate"])
                                    else ["--simulate", "0"])]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and says in lines[0]


def test_a_wrong_window_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "4711", "--window", "9:3"])
    assert "must be FROM:TO in seconds" in capsys.readouterr().err


def test_without_plotly_one_line_names_the_remedy_and_figures_need_none(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plotly", "plotly.graph_objects"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    assert main(["report", "4711"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "[report]'` installs it" in said
    assert told(capsys, "report", "4711", "--json", "--simulate", "0")["headline"]["actions"] == 117


# ---- series, timeline, advice -------------------------------------------------------------------


def test_a_mean_level_is_exact() -> None:
    edges = np.linspace(0, 100, 11)
    spans = [(5, 15, 2), (0, 100, 1), (42, 44, 10), (90, 250, 3), (-20, 5, 4)]
    plainly = [sum(w * max(0, min(b, edges[n + 1]) - max(a, edges[n])) for a, b, w in spans) / 10
               for n in range(10)]
    assert mean_level(spans, edges) == pytest.approx(plainly)
    assert mean_level([], edges) == pytest.approx(np.zeros(10))


def test_a_peak_is_that_of_an_instant() -> None:
    assert peak([(0, 10, 2), (10, 20, 2), (5, 6, 1), (19, 30, .5), (19, 30, .5)]) == 3
    assert peak([]) == peak([(5, 5, 9)]) == 0


def test_series_add_up_to_the_figures() -> None:
    report = report_of(busy_job(600, 2, 4))
    series = time_series(report)
    core_h = series.cpus_lent.sum() * series.bin_s / 3600
    assert core_h == pytest.approx(report.folded.usage.lent_ns / 3600e9)
    waited = sum(r.planned_ns for r in report.ended) / 1e9
    assert series.waiting.sum() * series.bin_s == pytest.approx(waited)
    assert series.cpus_held[10:].max() == pytest.approx(8)


def test_a_cell_has_the_class_that_held_its_unit_longest() -> None:
    report = report_of(busy_job(60, 1, 3, classes=4))
    grid = lanes(report)
    assert grid.rows == ["n0 cpu 0", "n0 cpu 1", "n0 cpu 2"] and grid.units == 1
    middles = report.since_ns + (np.arange(BINS) + 0.5) * grid.bin_s * 1e9
    for r in report.ended:  # an action that is longer than two cells has all but its first and last
        row = grid.cells[r.grants[0][1][0]]
        inside = (middles > r.start_ns + 1e9 * grid.bin_s) & (middles < r.end_ns - 1e9 * grid.bin_s)
        assert (row[inside] == 1 + grid.names.index(r.action.name)).all()
    narrow = lanes(report, Window(2.0, 3.0))
    assert narrow.bin_s == pytest.approx(1 / BINS) and narrow.since_s == 2.0


def test_a_page_adds_up_the_actions_of_each_class_once(monkeypatch: pytest.MonkeyPatch) -> None:
    report, added = report_of(busy_job(60, 1, 4, classes=3)), list[str]()

    def counted(name: str, *given: Any, add_up: Any = reported_job._group) -> Any:
        added.append(name)
        return add_up(name, *given)

    monkeypatch.setattr(reported_job, "_group", counted)
    series, grid = time_series(report), lanes(report)
    page(report, series, grid, all_plots(report, series, grid))
    assert len(added) == len({*added}) == 3


def test_many_units_share_rows_and_many_classes_share_a_colour() -> None:
    grid = lanes(report_of(busy_job(500, 9, 64, classes=30)))
    assert len(grid.rows) <= ROWS_MAX and grid.units == 3 and grid.rows[0] == "n0 cpu 0-2"
    assert len(grid.names) == 12 and grid.names[-1] == "other classes"
    assert grid.cells.max() == 12


def test_advice_is_given_only_where_it_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    full = report_of(busy_job(2000, 1, 16))
    assert advice(full, time_series(full)) == []
    work, cluster = read_workload(Path("mixed-24")), read_cluster(EXAMPLES / "cluster-24.json")
    events = played(work, cluster, "elastic")[1]
    wide = [ev.NodeJoined(e.at, e.node, wider(e.spec)) if isinstance(e, ev.NodeJoined) else e
            for e in events]
    idle = report_of(wide)
    said = contents(idle, time_series(idle))["advice"]
    assert any(re.match(r"The GPUs were busy \d+% of the time, and never more than 4 of 16 at "
                        r"once: ask for 4 GPUs\.", each) for each in said)
    assert any(each.startswith("The CPUs were lent") for each in said)


def wider(spec: Any) -> Any:
    """The node with four times the GPUs, of which the run used none."""
    return msgspec.structs.replace(spec, gpus=tuple(range(4 * len(spec.gpus))))


def test_advice_names_failures_and_idle_ends() -> None:
    events = busy_job(200, 1, 8)
    failing = [e if not isinstance(e, ev.LeaseFinished) or e.lease % 5 else
               ev.LeaseFinished(e.at, e.lease, _failed(e), True) for e in events]
    late = [*failing[:-1], ev.BrokerStopped(failing[-1].at + 100 * 10**9, "over")]
    said = advice(report_of(late), time_series(report_of(late)))
    assert any("40 of 200 actions ended as FAILED" in each for each in said)
    assert any(each.startswith("Nothing ran for") and "100 s after" in each for each in said)


def _failed(event: ev.LeaseFinished) -> Any:
    return msgspec.structs.replace(event.outcome, state=ActionState.FAILED)


# ---- attempts, percentiles, names ---------------------------------------------------------------


def retried_job() -> list[ev.Event]:
    """One action whose first attempt holds CPU 0 and a GPU for 10 s, until its service sends it
    back, and whose second attempt holds CPU 1 for 2 s, from second 14 on.
    """
    def at(second: int) -> int:
        return BEGAN_NS + second * 10**9

    spec = NodeSpec("n0", "n0", (0, 1), 1000, gpus=(0,))
    sent_back = Outcome(ActionState.PREEMPTED, exec_ns=10 * 10**9, cpu_ns=3 * 10**9)
    done = Outcome(ActionState.COMPLETED, exec_ns=2 * 10**9, cpu_ns=10**9)
    return [ev.BrokerStarted(at(0), "4711", "elastic", "none", "ada"),
            ev.NodeJoined(at(0), 1, spec),
            ev.ActionSubmitted(at(0), Action(mint(1, 1), "build", trajectory="t")),
            ev.LeaseGranted(at(1), 1, mint(1, 1), 1, 1, (0,), gpus=(0,)),
            ev.LeaseFinished(at(11), 1, sent_back, True),
            ev.LeaseGranted(at(14), 2, mint(1, 1), 1, 1, (1,)),
            ev.LeaseFinished(at(16), 2, done, True), ev.BrokerStopped(at(20), "over")]


def test_what_earlier_attempts_held_counts() -> None:
    report = report_of(retried_job())
    head, row, series = headline(report), report.classes[0], time_series(report, 20)
    assert head["cpu_lent_core_h"] == row["cpu_core_h"] == pytest.approx(12 / 3600)
    assert head["cpu_used_core_h"] == row["cpu_used_core_h"] == pytest.approx(4 / 3600)
    assert head["gpu_lent_gpu_h"] == row["gpu_h"] == pytest.approx(10 / 3600)
    assert series.gpus_most == 1 and series.gpus_lent.sum() == pytest.approx(10)
    assert series.cpus_lent.sum() == series.running.sum() == pytest.approx(12)
    assert series.waiting.sum() == pytest.approx(1 + 3)  # not while the first attempt ran
    cells = lanes(report).cells > 0
    assert cells.sum(axis=1).tolist() == [BINS * 10 // 20, BINS * 2 // 20, BINS * 10 // 20]
    bars = slowest_trajectories(report, ["build"]).bars
    assert [(bar.name, bar.from_ns // 10**9, bar.long_ns // 10**9) for bar in bars] == [
        ("waiting", 0, 1), ("build", 1, 10), ("waiting", 11, 3), ("build", 14, 2)]


def test_what_a_running_job_holds_ends_now() -> None:
    events = retried_job()[:-1]
    head = headline(gather(events, True, events[-1].at + 4 * 10**9))
    assert head["elapsed_s"] == 20
    assert head["cpu_held_core_h"] == pytest.approx(2 * 20 / 3600)
    assert head["gpu_held_gpu_h"] == pytest.approx(20 / 3600)


@pytest.mark.parametrize("served", [False, True])
def test_gpus_and_cpus_of_a_lost_node_are_held_alike(served: bool) -> None:
    """Slurm grants two nodes of two CPUs and a GPU at second 0. Their workers join at second 2, one
    node is lost at second 10, and the last event is that of second 20. The job runs on, or ends.
    """
    def at(second: int) -> int:
        return BEGAN_NS + second * 10**9

    spec = NodeSpec("n0", "n0", (0, 1), 1000, allocation="7", gpus=(0,))
    events: list[ev.Event] = [
        ev.BrokerStarted(at(1), "7", "elastic", "none", granted_at=at(0)),
        ev.NodeJoined(at(2), 1, spec),
        ev.NodeJoined(at(2), 2, msgspec.structs.replace(spec, name="n1")),
        ev.NodeLost(at(10), 2, "gone"),
        ev.ActionSubmitted(at(20), Action(mint(1, 1), "waits")) if served else
        ev.BrokerStopped(at(20), "over")]
    head = headline(gather(events, served, at(24 if served else 20)))
    assert head["elapsed_s"] == (24 if served else 20)
    assert head["cpu_held_core_h"] == pytest.approx(4 * head["elapsed_s"] / 3600)
    assert head["gpu_held_gpu_h"] == pytest.approx(2 * head["elapsed_s"] / 3600)


def test_what_running_actions_hold_counts_as_lent() -> None:
    """The CPUs of a job whose actions are long are not idle until the first action ends: no advice
    asks for fewer. `acct --held` and the Comment of the job count the same, to the last event.
    """
    spec = NodeSpec("n", "n", (0, 1), 100, gpus=(0,))
    events: list[ev.Event] = [
        ev.BrokerStarted(BEGAN_NS, "7", "elastic", "none"), ev.NodeJoined(BEGAN_NS, 1, spec),
        ev.ActionSubmitted(BEGAN_NS, Action(mint(1, 1), "train", gpus=1)),
        ev.LeaseGranted(BEGAN_NS, 1, mint(1, 1), 1, 1, (0, 1), gpus=(0,)),
        ev.ActionSubmitted(BEGAN_NS + 10 * 10**9, Action(mint(1, 2), "waits"))]
    report = gather(events, True, BEGAN_NS + 20 * 10**9)
    head = headline(report)
    assert head["cpu_lent_core_h"] == head["cpu_held_core_h"] == pytest.approx(2 * 20 / 3600)
    assert head["gpu_lent_gpu_h"] == head["gpu_held_gpu_h"] == pytest.approx(20 / 3600)
    [row] = held(events)
    assert report.folded.usage.lent_ns == row.used_ns == row.held_ns == 2 * 10 * 10**9
    assert "cpu_lent=100%" in summary(report.folded)
    assert report.folded.records[mint(1, 1)].cpu_held_ns == 0  # of an action that has not ended


def test_a_journal_without_an_event_has_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path, [])
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    page_of_none = tmp_path / "none.html"
    assert main(["report", "4711", "-o", str(page_of_none)]) == 2 and not page_of_none.exists()
    assert "4711: its journal has no event yet" in capsys.readouterr().err


@pytest.mark.parametrize("state", [ActionState.CANCELLED, ActionState.PREEMPTED])
def test_actions_that_were_cancelled_or_gave_their_cpus_back_did_not_fail(state: ActionState
                                                                          ) -> None:
    events = [ev.LeaseFinished(e.at, e.lease, msgspec.structs.replace(
        e.outcome, state=state), True) if isinstance(e, ev.LeaseFinished) else
        ev.ActionSubmitted(e.at, msgspec.structs.replace(
            e.action, kind=Kind.BACKGROUND, session=mint(1, 1 << 20)))
        if isinstance(e, ev.ActionSubmitted) else e for e in busy_job(40, 1, 4)]
    report = report_of(events)
    assert {row["failed"] for row in report.classes} == {0}
    assert not any("ended as" in text for text in advice(report, time_series(report)))
    groups = RollUp("name")
    for r in report.records:
        groups.add_attempt(r)
    assert {row.failed for row in groups.rows()} == {0}


def test_long_names_of_rows_and_classes_stay_apart() -> None:
    node = "ip-10-123-100-101.us-west-2.compute.internal.and-a-longer-name"
    events = [ev.NodeJoined(e.at, e.node, msgspec.structs.replace(e.spec, name=f"{node}{e.node}"))
              if isinstance(e, ev.NodeJoined) else e for e in busy_job(60, 2, 3)]
    rows = lanes(report_of(events)).rows
    assert len({label(row) for row in rows}) == 6 and rows[0].endswith(" cpu 0")
    assert len(set(apart(["x" * 60, "x" * 61, "x" * 62, "y"]))) == 4
    assert max(map(len, apart("x" * n for n in range(47, 70)))) == 48


def test_no_sentence_about_a_smaller_allocation_that_was_not_simulated() -> None:
    work, cluster = read_workload(Path("mixed-24")), read_cluster(EXAMPLES / "cluster-24.json")
    report = report_of(played(work, cluster, "elastic")[1])

    def said(smaller: list[Alternative]) -> str:
        whole = [Alternative(way, "elastic", 24, mean_act_s=1.0) for way in (RECORDED, AS_RUN)]
        report.savings = Savings([*whole, *smaller])
        return " ".join(advice(report, time_series(report)))

    assert headline(report)["cpu_lent_core_h"] < headline(report)["cpu_held_core_h"] / 2
    assert "`tangram size` says" in said([])
    assert "`tangram size` says" in said([Alternative("75%", "elastic", why_not="too small")])
    assert "grows by more than 10%" in said([Alternative("75%", "elastic", 18, mean_act_s=1.2)])


def test_no_advice_from_a_row_of_services_that_lacks_gpus_of_other_actions() -> None:
    def said(gpus: int) -> str:
        events = [ev.ActionSubmitted(e.at, msgspec.structs.replace(e.action, gpus=gpus))
                  if isinstance(e, ev.ActionSubmitted) else e for e in busy_job(40, 1, 4)]
        report = report_of(events)
        ways = ((RECORDED, 1), (AS_RUN, 1), (SERVICES, 2))
        report.savings = Savings([Alternative(way, "elastic", 4, held, 1.0, 1.0, 1.0, float(held))
                                  for way, held in ways])
        return " ".join(advice(report, time_series(report)))

    assert "would hold 2 GPUs instead of 1" in said(0)
    assert "instead of 1" not in said(1)


def test_a_class_is_rigid_only_if_no_action_of_it_can_run_on_one_cpu() -> None:
    def told_of(*fewest: int) -> list[str]:
        sizes = {n: fewest[n % len(fewest)] for n in range(41)}
        events = [ev.ActionSubmitted(e.at, msgspec.structs.replace(
            e.action, degrees=(sizes[e.action.id & 0xffff],))) if isinstance(e, ev.ActionSubmitted)
            else ev.LeaseFinished(e.at, e.lease, msgspec.structs.replace(e.outcome, cpu_ns=1), True)
            if isinstance(e, ev.LeaseFinished) else e for e in busy_job(40, 1, 4, classes=1)]
        report = report_of(events)
        return [text for text in advice(report, time_series(report)) if "at least" in text]

    assert told_of(1, 4) == [] == told_of(4, 1)
    assert "ask for 2 CPUs at least" in told_of(2, 4)[0] and told_of(2, 4) == told_of(4, 2)


def test_the_default_file_names_the_cluster_if_ids_may_be_equal(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path / "home"))
    for cluster in "ab":
        write_job(tmp_path / "home", busy_job(10, 1, 2), f"4711@{cluster}")
    write_job(tmp_path / "home", busy_job(10, 1, 2), "4712@a")
    for job in ("4711@a", "4711@b", "4712@a"):
        assert main(["report", job, "--simulate", "0"]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.html")) == [
        "report-4711.html", "report-4711@a.html", "report-4711@b.html"]
