"""The parts of the training run with TRL that need no TRL: the task and its verifier, the durations
of tools, what is left, and the comparison of runs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tangram_hpc import LocalCluster

BENCH = Path(__file__).resolve().parents[2] / "bench" / "trl_run"
sys.path.append(str(BENCH))

import judge  # noqa: E402
import plots  # noqa: E402
import summary  # noqa: E402
import task  # noqa: E402
import what_is_left  # noqa: E402
from environments import (  # noqa: E402
    Attempts,
    FolderTask,
    SandboxTask,
    Setting,
    folder_reward,
    sandbox_score,
)
from tool_times import ToolTimes  # noqa: E402

from tangram_hpc.hooks.process_client import use_client  # noqa: E402

# ---- the task and its verifier -------------------------------------------------------------------


def verified(tmp_path: Path, candidates: list[str], number: int, **environ: str) -> str:
    (tmp_path / task.VERIFIER).write_text(task.VERIFIER_TEXT)
    command = task.command(sys.executable, candidates, task.cases(number), 0.01, 0.1)
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ,
                          check=False, timeout=60).stdout


@pytest.mark.parametrize("number", range(len(task.EXPRESSIONS)))
def test_only_a_tasks_own_expression_passes_all_its_tests(number: int, tmp_path: Path) -> None:
    scores = {each: task.share(verified(tmp_path, [each], number)) for each in task.EXPRESSIONS}
    assert [each for each, score in scores.items() if score == 1] == [task.EXPRESSIONS[number]]


@pytest.mark.parametrize("candidate", ["1 / 0", "nothing", "__import__('os').abort", "a +"])
def test_a_candidate_that_fails_passes_no_test(candidate: str, tmp_path: Path) -> None:
    assert task.verdict(verified(tmp_path, [candidate], 0)) == "0 of 4 tests passed"


def test_the_reward_counts_every_candidate(tmp_path: Path) -> None:
    output = verified(tmp_path, ["a + b", "nothing"], 0)
    assert task.share(output) == 0.5
    assert task.share("a traceback") == 0 and task.verdict("") == "the tests did not run"


@pytest.mark.parametrize("number", [0, 4, 7])
def test_judging_in_the_trainer_says_what_the_verifier_says(number: int, tmp_path: Path) -> None:
    candidates = [*task.EXPRESSIONS, "a // 0"]
    assert task.judged(candidates, task.cases(number)) == verified(
        tmp_path, candidates, number).strip()


def test_the_verifier_follows_the_cpus_that_it_is_told(tmp_path: Path) -> None:
    told = tmp_path / "cpus"
    told.write_text("0\n")
    (tmp_path / task.VERIFIER).write_text(task.VERIFIER_TEXT)
    command = task.command(sys.executable, ["a + b"], task.cases(0), 0.01, 0.0)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env={
            "TANGRAM_CPUS_FILE": str(told), "TANGRAM_CPUS_MAX": "8"}) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)  # without CPUs it does not go on, however long it waits
        told.write_text("8\n")
        assert task.verdict(process.communicate(timeout=60)[0]) == "4 of 4 tests passed"


# ---- durations -----------------------------------------------------------------------------------


def test_durations_have_the_mean_and_the_quantiles_of_the_trace() -> None:
    trace = json.loads((BENCH / "tool_times.json").read_text())
    times = ToolTimes(0, scale=1.0, limit_s=1e9)
    for share, seconds in trace["quantiles"]:
        assert times.at(share) == pytest.approx(seconds)
    mean = statistics.fmean(times.at((n + 0.5) / 20000) for n in range(20000))
    assert mean == pytest.approx(trace["mean_s"], rel=0.03)


def test_a_duration_depends_on_the_seed_and_the_names_alone() -> None:
    first, again, other = ToolTimes(1, 0.1), ToolTimes(1, 0.1), ToolTimes(2, 0.1)
    drawn = [first.draw(*names) for names in ((0, 1), (1, 0), (0, 1))]
    assert drawn[0] == drawn[2] == again.draw(0, 1) and drawn[0] != drawn[1]
    assert other.draw(0, 1) != drawn[0]
    assert all(0 < each <= 12.0 for each in (first.draw(n) for n in range(1000)))


def test_quantiles_that_fall_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"quantiles": [[0.0, 1.0], [0.5, 0.5], [1.0, 2.0]]}))
    with pytest.raises(ValueError, match="quantiles must rise"):
        ToolTimes(0, 1.0, path=path)


# ---- environments --------------------------------------------------------------------------------


def test_a_folder_and_a_sandbox_answer_and_score_alike(tmp_path: Path) -> None:
    import asyncio

    folder = FolderTask(local := Setting(ToolTimes(0, 0.001), sys.executable))
    told: dict[str, list[Any]] = {"folder": [], "sandbox": []}
    with LocalCluster(cpus=4, home=tmp_path) as cluster:
        use_client(cluster)
        try:
            box = SandboxTask(Setting(ToolTimes(0, 0.001), sys.executable, cpus=(1, 4)))
            for number in (0, 3):
                folder.reset(task=number, prompt=[])
                box.reset(task=number, prompt=[])
                for candidate in ("a + b", "a * 2"):
                    told["folder"].append(folder.run_tests(candidate))
                    told["sandbox"].append(box.run_tests(candidate))
                told["folder"].append(folder._score())
                told["sandbox"].append(asyncio.run(sandbox_score(box)))
            assert what_is_left.leftovers(cluster, patience_s=0)["sandboxes"] == 1
            box.slot.close()
            assert what_is_left.leftovers(cluster) == {"sandboxes": 0, "actions": 0}
        finally:
            use_client(None)
    assert told["folder"] == told["sandbox"] and "4 of 4 tests passed" in told["folder"]
    assert local.open_folders == set()


def test_environments_of_two_runs_draw_the_same_durations() -> None:
    runs = [Setting(ToolTimes(0, 1.0), "python") for _ in range(2)]
    commands = [[one.check("a") for one in [Attempts(run), Attempts(run)]] for run in runs]
    assert commands[0] == commands[1] and commands[0][0] != commands[0][1]


# ---- the data of the judge -----------------------------------------------------------------------


def test_labels_are_the_verdicts_of_the_runs_own_reward_function() -> None:
    setting = Setting(ToolTimes(0, 0.001), sys.executable)
    wanted = [(number, each) for number in (0, 4) for each in task.EXPRESSIONS] * 2
    found = judge.labels(wanted, lambda: FolderTask(setting), folder_reward(None))
    assert set(found) == set(wanted) and setting.open_folders == set()
    assert [each for each, right in found.items() if right] == [
        (number, task.EXPRESSIONS[number]) for number in (0, 4)]


def test_a_candidate_without_a_label_ends_the_run() -> None:
    setting = Setting(ToolTimes(0, 0.001), sys.executable)

    async def lost(environments: list[Any], **columns: Any) -> list[float | None]:
        return [None, *folder_reward(None)(None, environments)][:len(environments)]

    with pytest.raises(RuntimeError, match="1 of 2 candidates have no label"):
        judge.labels([(0, "a + b"), (0, "a - b")], lambda: FolderTask(setting), lost)


def test_a_task_has_as_many_right_as_wrong_candidates_or_none() -> None:
    right = {(0, "a + b"): True, (0, "a - b"): False, (1, "a - b"): True, (2, "a"): False}
    drawn = [(0, "a + b")] * 3 + [(0, "a - b")] * 9 + [(1, "a - b")] * 5 + [(2, "a")] * 5
    rows = judge.balanced(drawn, right, seed=0)
    prompts = {row["prompt"][0]["content"]: row["right"] for row in rows}
    assert [row["right"] for row in rows].count(True) == 3 == len(rows) / 2
    assert prompts == {f"task 0{task.call_text('a + b')}": True,
                       f"task 0{task.call_text('a - b')}": False}
    assert judge.balanced(drawn, right, seed=0) == rows


def test_a_verdict_is_rewarded_if_it_is_the_label() -> None:
    said = [[{"role": "assistant", "content": each}]
            for each in (judge.RIGHT, judge.RIGHT, judge.WRONG, judge.WRONG, "nothing")]
    assert judge.verdict_reward(said, right=[True, False, True, False, False]) == [1, 0, 0, 1, 0]


# ---- accounting ----------------------------------------------------------------------------------


def test_the_usage_of_a_job_is_that_of_its_accounting(tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    with LocalCluster(cpus=2, home=tmp_path) as cluster:
        for name in ("run_tests", "run_tests", "other"):
            cluster.submit(["true"], name=name).result()
        found = what_is_left.usage(cluster.job)
    assert found["tool_calls"] == 2 and found["tool_cpus_max"] == 1
    assert found["tool_act_s"] >= found["tool_queue_s"] + found["tool_run_s"] > 0
    assert found["held_core_h"] == pytest.approx(found["used_core_h"] + found["idle_core_h"])
    assert found["held_core_h"] > 0


# ---- the comparison ------------------------------------------------------------------------------


def run(mode: str, rewards: list[float], tool_loop_s: float, cpus: str = "1") -> dict[str, Any]:
    step = {"rollout_s": tool_loop_s + 2.0, "tool_loop_s": tool_loop_s, "reward_s": 1.0,
            "step_s": tool_loop_s + 2.5}
    return {"format": "trl-run/1", "mode": mode, "tool_cpus": cpus, "seed": 0, "usage": {},
            "left": {"sandboxes": 0}, "steps_done": [{**step, "reward": r} for r in rewards]}


def test_speed_ups_are_those_of_the_tools_part_beside_amdahls_bound() -> None:
    rows = {row["kind"]: row for row in summary.speedup_rows(
        [run("local", [0.1, 0.2], 9.0), run("broker-all", [0.1, 0.2], 1.0, "1-8")])}
    fast = rows["broker-all 1-8"]
    assert fast["tools_shorter"] == 5 and fast["rollout_shorter"] == pytest.approx(11 / 3)
    assert fast["amdahl_bound"] == 11 and rows["local"]["tools_shorter"] == 1


def test_the_first_step_with_another_reward_is_named() -> None:
    first, same, other = (run(mode, rewards, 1.0) for mode, rewards in (
        ("local", [0.1, 0.2, 0.3]), ("pool", [0.1, 0.2]), ("broker", [0.1, 0.25, 0.3])))
    assert summary.first_difference(first, same) is None
    assert summary.first_difference(first, other) == 1
    assert summary.differences([first, same, other]) == [
        "seed 0: local and pool: rewards equal in 2 steps",
        "seed 0: local and broker: rewards differ at step 1"]


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="trl-run/1"):
        summary.read_runs([tmp_path / "x.json"])


def test_the_picture_has_a_line_for_each_run_and_a_bar_for_each_kind(tmp_path: Path) -> None:
    timed = [run("local", [0.1], 3.0), run("pool", [0.1], 1.0)]
    plots.draw([run("pool", [0.1, 0.5], 1.0), run("pool", [0.2], 1.0)], timed, tmp_path / "x.svg")
    picture = ElementTree.fromstring((tmp_path / "x.svg").read_text())
    lines = picture.findall("{*}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 1]
    bars = [float(each.attrib["width"]) for each in picture.findall("{*}rect")][1:5]
    assert bars[0] == pytest.approx(2 * bars[2], rel=0.01) and bars[1] == bars[3]
    words = {each.text for each in picture.findall("{*}text")}
    assert {"local", "pool", "5.0 s", "3.0 s", "seed 0"} <= words


def test_smoothing_keeps_the_length_and_looks_back_only() -> None:
    assert plots.smooth([0.0, 1.0, 2.0, 3.0], 2) == [0.0, 0.5, 1.5, 2.5]
