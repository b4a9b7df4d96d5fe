"""The reference trainer: its parts that need torch, and that it learns in every configuration."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.backend_rig import NEEDS_TORCH
from helpers.forked_start import Script

from tangram_hpc.hooks.reference import reference_task as task

FORKED = [Script(Path(__file__).resolve().parents[1] / "data" / "module.py")]
NEEDED = [*NEEDS_TORCH, pytest.mark.skipif(not find_spec("mpi4py"), reason="needs the extra: mpi")]


def needs_all(test: Any) -> Any:
    for mark in NEEDED:
        test = mark(test)
    return test


@pytest.mark.parametrize(("completion", "worth"), [
    ("3+4", 1.0), ("9-2", 1.0), ("7*1", 1.0), ("4+4", 0.45), ("9*9", 0.1), ("7", 0.0), ("", 0.0),
    ("=7", 0.0), ("+", 0.0), ("08+1", 0.0), ("3+", 0.0), ("2+5+", 0.0), ("1+2*3", 1.0)])
def test_the_reward_of_a_completion_is_what_its_program_computes(
        completion: str, worth: float) -> None:
    ran = subprocess.run(task.check(completion), capture_output=True, check=False)
    assert task.reward("7=", task.value(ran.returncode, ran.stdout)) == pytest.approx(worth)


def test_prompts_are_reproducible_by_seed() -> None:
    assert task.prompts(3, 8, 1) == task.prompts(3, 8, 1) != task.prompts(4, 8, 1)


def program(*words: str, start: Sequence[str] = FORKED) -> subprocess.CompletedProcess[str]:
    told = subprocess.run([sys.executable, *start, "tangram_hpc.hooks.reference", *words],
                          capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 2 and told.stdout == "" and told.stderr.count("\n") == 1
    return told


@pytest.mark.parametrize(("words", "why"), [
    (["--lend", "4"], "--lend: '4' is not FROM:TO"), (["--steps", "1"], "steps: 1 must be at"),
    (["--lend", "1:2", "--slots", "1"], "slots: 1 must be at least 2"),
    (["--plan", "--slots", "1"], "slots: 1 must be at least 2"),
    (["--plan", "--lend", "1:2"], "lend: the planner says"), (["--hidden", "60"], "hidden: 60"),
    (["--compare", "--router", "on"], "--compare: it sets --router"),
    (["--compare", "--slots", "1"], "slots: 1 must be at least 2"),
    (["--lend", "9:2"], "lend: from step 9 to 2 there is"),
    (["--device", "tpu"], "device: 'tpu'")])
def test_a_wrong_trainer_option_is_refused_in_one_line(words: list[str], why: str) -> None:
    assert program(*words).stderr.startswith(f"tangram: error: {why}")


@pytest.mark.skipif(bool(find_spec("torch")), reason="torch is installed")
def test_without_torch_one_line_says_what_to_install() -> None:
    assert program(start=["-m"]).stderr.endswith("[torch,mpi]'\n")


@needs_all
def test_the_gradient_of_a_batch_is_the_sum_over_its_parts(tmp_path: Path) -> None:
    from tangram_hpc.hooks.reference import reference_model as model

    policy = model.Policy(model.make_policy(tmp_path / "m", 3))
    vector = policy.vector()
    samples = []
    for n in range(6):
        learnt = [False] * 3 + [True] * (2 + n % 2) + [False] * 2 + [True]
        samples.append({"tokens": [1, 5, 16, 4 + n, 14, 7, 1, 5, 16][: len(learnt)],
                        "learnt": learnt, "logprobs": [-2.5 * mine for mine in learnt],
                        "advantage": [(0.5 - n) * mine for mine in learnt]})
    whole = policy.gradient(vector, samples)
    parts = policy.gradient(vector, samples[:2]) + policy.gradient(vector, samples[2:])
    assert np.abs(whole - parts).max() < 1e-4 * np.abs(whole).max() and np.abs(whole).max() > 0
    assert not policy.gradient(vector, []).any()
    names = policy.named(vector)
    assert sum(t.numel() for t in names.values()) == len(vector)


@needs_all
def test_tool_output_is_context_and_contributes_no_gradient(tmp_path: Path) -> None:
    from tangram_hpc.hooks.reference import reference_model as model

    policy = model.Policy(model.make_policy(tmp_path / "m", 3))
    vector = policy.vector()
    sample = {"tokens": [1, 5, 16, 4, 13, 8, 16, 9, 1, 5, 16, 6], "logprobs": [-2.5] * 12,
              "learnt": [n in (3, 4, 5, 11) for n in range(12)]}

    def gradient(**other: Any) -> Any:
        return policy.gradient(vector, [{**sample, "advantage": [1.0] * 12, **other}])

    mine = gradient()
    loud = gradient(advantage=[1.0 if here else 99.0 for here in sample["learnt"]],
                    logprobs=[-2.5 if here else -0.1 for here in sample["learnt"]])
    assert np.array_equal(mine, loud)  # whatever is said of the tool's tokens counts for nothing
    read = gradient(tokens=[1, 5, 16, 4, 13, 8, 16, 11, 1, 5, 16, 6])
    assert np.abs(mine - read).max() > 1e-4  # and yet another return makes another gradient
    assert np.abs(mine - gradient(learnt=[n in (3, 4, 5) for n in range(12)])).max() > 1e-4


def check_learning(told: dict[str, Any]) -> None:
    assert told["reward_last"] > 2 * told["reward_first"] + 0.05, told["rewards"]
    assert told["turns_last"] < told["turns_first"]  # it is right sooner
    assert told["stale_max"] <= 2
    assert all(told["buckets"].values()) and len(told["buckets"]) == 2


@needs_all
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_reference_trainer_learns_with_pool_and_router_on_and_off() -> None:
    from tangram_hpc.hooks.reference.reference_compare import STEPS, compare, table
    from tangram_hpc.hooks.reference.reference_run import RunPlan

    told = compare(RunPlan(folder="", steps=STEPS))
    print(table(told))
    assert [(one["pool"], one["routed"]) for one in told["runs"]] == [
        (False, False), (True, False), (False, True), (True, True)]
    for one in told["runs"]:
        check_learning(one)
        helped = one["steps_with_a_replica"]
        assert (helped >= 1 and one["joined"] >= 1 and one["added"] >= 1) if one["pool"] else (
            helped == one["added"] == 0)
        if one["routed"]:
            routed = one["router"]
            assert routed["ended"] == (STEPS + 1) * 96 and routed["after_returns"] > 500
            assert routed["accuracy_after_returns"] > routed["base_rate"] + 0.05, routed


@needs_all
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_planner_lends_no_gpu_when_rollout_is_the_longer_stage(tmp_path: Path) -> None:
    """The split stays, and the planner's prediction of a step approaches the measured time."""
    from tangram_hpc.hooks.reference.reference_run import RunPlan, run

    told = run(RunPlan(str(tmp_path), steps=12, planner=True))
    check_learning(told)
    plan = told["plan"]
    assert plan["plans"] >= 2 and plan["lent_at_end"] == 0
    # no such machine was described; what trajectories waited for their tools is told, not modelled
    assert plan["steps"][-1]["factors"]["train"] > 2
    assert plan["off_last"]["train_s"] < 0.7 * plan["off_first"]["train_s"], plan


@needs_all
@pytest.mark.long
@pytest.mark.timeout(900)
def test_training_continues_when_a_lent_replica_is_killed(tmp_path: Path) -> None:
    """The action ends with its process, its GPU serves rollouts again, and another incarnation is
    lent."""
    from tangram_hpc.hooks.reference.reference_run import RunPlan, run

    named = tmp_path / "replica.pid"
    killed: list[int] = []

    def kill() -> None:
        for _ in range(16_000):
            if named.exists() and (text := named.read_text()):
                os.kill(int(text), 9)
                killed.append(int(text))
                return
            time.sleep(0.05)

    threading.Thread(target=kill, daemon=True).start()
    told = run(RunPlan(str(tmp_path), steps=16, lend=(1, 16)))
    check_learning(told)
    assert killed and "LOST" in [end for _, end, _ in told["news"]], told["news"]
