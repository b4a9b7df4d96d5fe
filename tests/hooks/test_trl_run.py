"""A few steps of the training run with TRL: rewards do not depend on where tools run, and nothing
is left. TRL is in a virtual environment of its own (`make trl`)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
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


def test_the_log_of_tensorboard_has_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained("broker-all", tmp_path, "--tensorboard", str(tmp_path / "log"))
    log = EventAccumulator(str(next((tmp_path / "log").rglob("events.*")).parent))
    log.Reload()
    names = set(log.Tags()["scalars"])
    assert {"train/reward", "train/tangram/tools/act_s", "train/tangram/job/cpus_held"} <= names
