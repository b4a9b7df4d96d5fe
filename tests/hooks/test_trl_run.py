"""A few steps of the training run with TRL: rewards do not depend on where tools run, and nothing
is left. TRL is in a virtual environment of its own (`make trl`)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).resolve().parents[2] / "bench" / "trl_run" / "run.py"
STEPS, ROLLOUTS = 3, 16

pytestmark = [
    pytest.mark.long, pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None,
                       reason="TRL is not installed here; `make trl` runs this")]


def trained(mode: str, folder: Path, *words: str) -> dict[str, Any]:
    out = folder / f"{mode}.json"
    told = subprocess.run(
        [sys.executable, str(RUN), "--mode", mode, "--steps", str(STEPS), "--generations", "2",
         "--scale", "0.005", "--out", str(out), *words], capture_output=True, text=True,
        check=False, timeout=600, cwd=folder)
    assert told.returncode == 0, told.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_rewards_are_equal_wherever_tools_run_and_nothing_is_left(tmp_path: Path) -> None:
    runs = {mode: trained(mode, tmp_path, *words) for mode, words in (
        ("inside", ()), ("local", ()), ("pool", ()), ("broker", ()),
        ("broker-all", ("--tool-cpus", "1-4")))}
    curves = {mode: [step["reward"] for step in run["steps_done"]] for mode, run in runs.items()}
    assert len(curves["local"]) == STEPS and sum(curves["local"]) > 0
    assert all(curve == curves["local"] for curve in curves.values()), curves
    assert {count for run in runs.values() for count in run["left"].values()} == {0}
    for mode in ("broker", "broker-all"):
        steps, usage = runs[mode]["steps_done"], runs[mode]["usage"]
        calls = round(sum(step["calls"] for step in steps) * ROLLOUTS)
        assert usage["tool_calls"] == calls > 0
        assert usage["held_core_h"] >= usage["used_core_h"] > 0
        # the final tests of a rollout are actions too, and a rollout without a guess has none
        assert calls <= sum(step["metrics"]["tangram/tools/count"] for step in steps) <= (
            calls + STEPS * ROLLOUTS)


def test_a_policy_that_judged_verified_candidates_generates_from_the_judges_weights(
        tmp_path: Path) -> None:
    judge_steps = 4
    runs = [trained(mode, tmp_path, "--judge-steps", str(judge_steps))
            for mode in ("inside", "broker-all")]
    # sandboxes give the labels that judging in the trainer gives, so both stages go the same way
    inside, broker = ([[step["reward"] for step in steps]
                       for steps in (run["judge"]["steps"], run["steps_done"])] for run in runs)
    assert inside == broker and [len(curve) for curve in inside] == [judge_steps, STEPS]
    assert 0 < sum(inside[0]) < judge_steps
    for run in runs:
        weights, judge = run["weights"], run["judge"]
        assert weights["judge_began"] != weights["judge_ended"] == weights["began"]
        assert 0 < judge["right"] < judge["verified"] <= judge["rows"] <= judge["candidates"]
        assert set(run["left"].values()) == {0}
    # the candidates were verified by actions in sandboxes, beside those of the rollouts
    steps, verified = runs[1]["steps_done"], runs[1]["judge"]["verified"]
    assert verified > STEPS * ROLLOUTS  # so that they are more than the rollouts' final tests
    assert (sum(step["metrics"]["tangram/tools/count"] for step in steps)
            >= runs[1]["usage"]["tool_calls"] + verified)


def test_a_run_that_is_killed_goes_on_from_its_last_whole_step(tmp_path: Path) -> None:
    steps, kept = 40, tmp_path / "kept"

    def command(out: str, *words: str) -> list[str]:
        return [sys.executable, str(RUN), "--mode", "inside", "--generations", "2", "--steps",
                str(steps), "--out", str(tmp_path / out), *words]

    with subprocess.Popen(command("cut.json", "--checkpoints", str(kept)),
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as cut_off:
        until = time.monotonic() + 120
        while not (kept / "checkpoint-7").exists() and time.monotonic() < until:
            time.sleep(0.02)
        cut_off.kill()
    assert not (tmp_path / "cut.json").exists()
    for words in (command("cut.json", "--checkpoints", str(kept)), command("whole.json")):
        told = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        assert told.returncode == 0, told.stderr[-3000:]
    cut, whole = (json.loads((tmp_path / out).read_text())["steps_done"]
                  for out in ("cut.json", "whole.json"))
    assert len(cut) == steps
    assert [step["reward"] for step in cut] == [step["reward"] for step in whole]


def test_the_log_of_tensorboard_has_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained("broker-all", tmp_path, "--tensorboard", str(tmp_path / "log"))
    log = EventAccumulator(str(next((tmp_path / "log").rglob("events.*")).parent))
    log.Reload()
    names = set(log.Tags()["scalars"])
    assert {"train/reward", "train/tangram/tools/act_s", "train/tangram/job/cpus_held"} <= names
