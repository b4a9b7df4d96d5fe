"""What the bench of the peers computes and writes: the ideal, the figures of rounds, the page."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

REPO = Path(__file__).resolve().parents[2]
PEERS = REPO / "bench" / "peers"
NAMES = ("work", "ideal", "adapter", "peers", "cluster_peers", "pool_peers", "program_peers",
         "ours", "results", "common")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports one of the bench's modules; their short names are forgotten afterwards."""
    for folder in (PEERS.parent, PEERS):
        monkeypatch.syspath_prepend(str(folder))
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}

    def get(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield get
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_mixed_tasks_are_the_same_for_the_same_seed_and_load_the_cores(module: Any) -> None:
    work = module("work")
    tasks = work.mixed_tasks(7, 4000, 16)
    assert tasks == work.mixed_tasks(7, 4000, 16) != work.mixed_tasks(8, 4000, 16)
    assert {task.cores for task in tasks} == {1, 2, 3, 4}
    assert [task.at_s for task in tasks] == sorted(task.at_s for task in tasks)
    load = sum(task.cores * task.seconds for task in tasks) / tasks[-1].at_s / 16
    assert load == pytest.approx(work.LOAD, rel=0.1)


def test_the_ideal_puts_the_short_task_first_and_is_never_below_the_bound(module: Any) -> None:
    work, ideal = module("work"), module("ideal")
    tasks = [work.Task(0.0, 2, 1.0), work.Task(0.0, 4, 3.0), work.Task(0.0, 2, 1.0)]
    assert ideal.mean_completion_s(tasks, 4, [0, 1, 2], pass_over=False) == pytest.approx(10 / 3)
    assert ideal.mean_completion_s(tasks, 4, [0, 1, 2]) == pytest.approx(2.0)
    for seed in range(3):
        found = ideal.ideal(work.mixed_tasks(seed, 60, 8), 8, 20)
        assert found["bound_s"] <= found["mean_s"] < 3 * found["bound_s"]


def rounds_of_two() -> list[dict[str, dict[str, Any]]]:
    """Two rounds as `run.py` collects them, with figures that are easy to check."""
    rounds = []
    for factor in (1.0, 2.0):
        steps = {"plain process": {"cold_s": 0.01, "step_s": [0.002] * 150},
                 "tangram_hpc, exec (bwrap)": {"cold_s": 0.03, "step_s": [0.003] * 150}}
        rounds.append({
            "tangram_hpc": {"functions": 9000 * factor, "commands": 1000, "idle": [0.001] * 100,
                            "cold_s": 1.0, "mixed": [0.11] * 400},
            "Ray": {"functions": 1000 * factor, "commands": 500, "idle": [0.003] * 100,
                    "cold_s": 5.0, "mixed": [0.5] * 400},
            "ProcessPool": {"functions": 5000 * factor, "idle": [0.0006] * 100, "cold_s": 0.2},
            "trajectory": {"trajectory": steps}, "ideal": {"mean_s": 0.1, "bound_s": 0.09}})
    return rounds


def test_figures_are_medians_with_ranges_and_ratios_within_a_round(module: Any) -> None:
    figures = module("results").figures(rounds_of_two(), {"Parsl": "not installed"}, {})
    assert figures["functions_per_s"]["tangram_hpc"] == {"median": 13500, "range": [9000, 18000]}
    assert figures["times_better"]["functions"]["Ray"] == {"median": 9.0, "range": [9.0, 9.0]}
    assert figures["times_better"]["idle"]["Ray"]["median"] == pytest.approx(3.0)
    assert figures["mixed_over_ideal"]["tangram_hpc"]["median"] == pytest.approx(1.1)
    told = figures["trajectories"]["tangram_hpc, exec (bwrap)"]
    assert told["overhead_ms"]["median"] == pytest.approx(1.0)
    assert told["worker_hours_per_million"] == 42
    assert figures["left_out"]["peers"] == {"Parsl": "not installed"}
    met = {name: bar["met"] for name, bar in figures["bars"].items()}
    assert met == {"functions, over Ray": True, "functions, over the best scheduling peer": True,
                   "commands, over the best scheduling peer": True,
                   "idle p50, over ProcessPool": True,
                   "idle p99 in ms, below every scheduling peer": True,
                   "mixed tasks, rigid, over the ideal": True}


def test_the_page_gets_the_figures_between_its_marks_and_pictures(module: Any, tmp_path: Path
                                                                  ) -> None:
    line = {"parameters": {"date": "2026-01-02 03:04 UTC", "rounds": 2, "minutes": 1.0, "seed": 1,
                           "load": [0.1, 0.2], "other_work_cpu_share": 0.25,
                           "peer_versions": {"Ray": "2.60.0"}},
            "figures": module("results").figures(rounds_of_two(), {"Parsl": "not installed"}, {}),
            "versions": {"python": "3.11", "kernel": "6"}, "cpus": 2, "commit": "abc"}
    (tmp_path / "line.json").write_text(json.dumps(line))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "BENCHMARKS.md").write_text(
        "before\n<!-- figures: begin -->\nof last year\n<!-- figures: end -->\nafter\n")
    for _ in range(2):  # the second time over its own marks
        subprocess.run([sys.executable, PEERS / "page.py", tmp_path / "line.json", "--docs",
                        tmp_path], check=True, timeout=60)
    page = (tmp_path / "BENCHMARKS.md").read_text()
    assert page.startswith("before\n") and page.endswith("after\n") and (
        "last year" not in page)
    assert "| Ray | 1 500 (1 000–2 000) |" in page and "- Parsl: not installed." in page
    for picture in (tmp_path / "pictures").glob("*.svg"):
        ElementTree.parse(picture)
    assert (tmp_path / "pictures" / "peers-functions.svg").exists()


def test_the_page_in_the_documents_has_the_marks() -> None:
    page = (REPO / "docs" / "BENCHMARKS.md").read_text()
    assert page.index("<!-- figures: begin -->") < page.index("<!-- figures: end -->")
