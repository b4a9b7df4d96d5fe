"""`tangram size`: the search on known curves, clusters of other sizes, the picture, and the
command."""

from __future__ import annotations

import json
import random
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.sim_material import one_node
from helpers.sim_material import workload as random_workload

from tangram_hpc.cli import main
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.pictures import curve_png
from tangram_hpc.simulator.pictures.curve_svg import Axis, Panel, PolicyCurve, svg
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.sizing import (
    Curve,
    Holding,
    RunFigures,
    Scale,
    Target,
    full_holding,
    grid,
    resized,
    scale_of,
    search,
    threshold,
)
from tangram_hpc.simulator.workload import Cluster, read_cluster, read_workload

EXAMPLES = Path(__file__).resolve().parents[2] / "tangram_hpc" / "simulator" / "examples"
WORK, CLUSTER = EXAMPLES / "mixed-24.jsonl", EXAMPLES / "cluster-24.json"
SIZE = ["size", str(WORK), "--cluster", str(CLUSTER)]
SVG = "{http://www.w3.org/2000/svg}"


def scale(cpus: int, gpus: int = 0, times: int = 8) -> Scale:
    levels = min(1000, cpus)
    return Scale(Holding(cpus, gpus), True, gpus > 0, levels, levels * times)


def curve(act: Callable[[Holding], float | None], over: Scale, target: Target) -> Curve:
    """Searches over a known function of the held resources."""
    asked: list[Holding] = []

    def measure(policy: str, held: Holding) -> RunFigures | None:
        asked.append(held)
        value = act(held)
        return None if value is None else RunFigures(value, 3 * value, 10 * value)

    found = search("p", over, target, measure)
    assert len(asked) == len(set(asked)), "measured twice"
    return found


# ---- the search ---------------------------------------------------------------------------------


@pytest.mark.parametrize("true", [1, 2, 3, 99, 100, 317, 799, 800, 801, 2500, 6400])
def test_the_threshold_of_a_monotone_curve_is_found(true: int) -> None:
    found = curve(lambda h: true / h.cpus, scale(800), Target(act_s=1.0))
    assert found.answer is not None and found.answer.held == Holding(true, 0)
    assert found.answer.figures.mean_act_s == 1.0


def test_both_targets_must_be_reached() -> None:
    found = curve(lambda h: 100 / h.cpus, scale(400), Target(act_s=1.0, step_s=5.0))
    assert found.answer is not None and found.answer.held == Holding(200, 0)


def test_the_answer_of_the_search_holds_for_the_next_larger_sizes() -> None:
    reach = {40, *range(71, 101)}
    assert threshold(lambda n: n in reach, 0, 100) == 71
    reach = {*range(68, 71), *range(72, 101)}  # bisection lands above the hole
    assert threshold(lambda n: n in reach, 0, 100) in (68, 72)
    for seed in range(300):
        rng = random.Random(seed)
        noisy = {n for n in range(1, 200) if rng.random() < (n - 60) / 60} | {200}
        best = threshold(noisy.__contains__, 0, 200)
        assert set(range(best, min(best + 2, 200) + 1)) <= noisy


def test_an_unreachable_target_gives_the_best_measured_size() -> None:
    found = curve(lambda h: max(2.0, 200 / h.cpus), scale(50), Target(act_s=1.5))
    assert found.answer is not None and found.answer.held is None
    assert found.answer.figures.mean_act_s == 2.0
    assert found.answer.at == Holding(100, 0), "the smallest size with the best result"
    assert curve(lambda h: None, scale(50), Target(act_s=1.5)).answer is None


def test_sizes_at_which_the_workload_cannot_run_are_too_small() -> None:
    found = curve(lambda h: None if h.cpus < 37 else 1.0, scale(100), Target(act_s=1.5))
    assert found.answer is not None and found.answer.held == Holding(37, 0)
    assert next(p.figures for p in found.shown()) is None


def test_cpus_and_gpus_are_reduced_separately() -> None:
    found = curve(lambda h: max(300 / h.cpus, 2 / h.gpus), scale(800, 40), Target(act_s=1.0))
    assert found.answer is not None and found.answer.held == Holding(300, 2)
    assert found.scale.holding(found.answer.level) == Holding(300, 15)


def test_a_curve_has_its_grid_and_its_answer() -> None:
    over = scale(100)
    found = curve(lambda h: 30 / h.cpus, over, Target(act_s=1.0))
    assert grid(over) == [12, 18, 25, 35, 50, 71, 100]
    assert [p.level for p in found.shown()] == [12, 18, 25, 30, 35, 50, 71, 100]


# ---- clusters of another size -------------------------------------------------------------------


def test_resizing_a_cluster_keeps_its_node_proportions() -> None:
    cluster = Cluster.model_validate({"nodes": [
        {"name": "c", "count": 3, "cpus": 10, "mem_mib": 100},
        {"name": "g", "count": 2, "cpus": 5, "gpus": 8, "mem_mib": 50}]})
    assert full_holding(cluster) == (40, 16)
    assert resized(cluster, full_holding(cluster)).node_specs() == cluster.node_specs()

    def shape(cpus: int, gpus: int) -> list[tuple[str, int, int, int]]:
        smaller = resized(cluster, Holding(cpus, gpus))
        assert full_holding(smaller) == (cpus, gpus)
        return [(n.name, n.cpus, n.gpus, n.mem_mib) for n in smaller.nodes]

    assert shape(13, 0) == [("c0", 6, 0, 100), ("c1", 7, 0, 100)]
    assert shape(1, 10) == [("c0", 1, 0, 100), ("g0", 0, 8, 0), ("g1", 0, 2, 0)]
    assert shape(80, 16)[0] == ("c0", 20, 0, 200)
    for cpus in range(1, 130, 7):
        shape(cpus, cpus % 20)


def test_only_resources_that_the_workload_uses_are_searched() -> None:
    cluster = read_cluster(CLUSTER)
    found = scale_of(read_workload(WORK), cluster)
    assert found.cpus and found.gpus and found.holding(found.levels) == (20, 4)
    cpus = scale_of(random_workload(1), cluster)
    assert cpus.cpus and not cpus.gpus and cpus.holding(1) == (1, 4)
    assert cpus.top > cpus.levels


@pytest.mark.parametrize("policy", ["fcfs:2", "static:2"])
def test_the_search_agrees_with_the_simulator_at_every_size(policy: str) -> None:
    work, cluster = random_workload(5, 10), one_node(24)

    def measure(name: str, held: Holding) -> RunFigures | None:
        told = simulate(work, resized(cluster, held), make_placer(name)).figures()
        return RunFigures(told["mean_act_s"], told["p99_act_s"], told["step_s"])

    target = Target(act_s=1.2 * measure(policy, Holding(24, 0)).mean_act_s)  # type: ignore[union-attr]
    good = [n for n in range(2, 25) if target.reached(measure(policy, Holding(n, 0)))]
    found = search(policy, scale_of(work, cluster, 2), target,
                   lambda name, held: None if held.cpus < 2 else measure(name, held))
    assert found.answer is not None and found.answer.held is not None
    assert found.answer.held.cpus == good[0]


# ---- the picture --------------------------------------------------------------------------------


def test_the_svg_picture_has_one_line_per_policy() -> None:
    lines = [PolicyCurve(f"p{i} <&>", f"p{i} <&>: 3 CPUs", [(1, 9), (10, 3), (800, 1)], (10, 3))
             for i in range(9)]
    lines.append(PolicyCurve("none", "none: not reached", []))
    text = svg([Panel("Mean ACT", "CPUs held", "seconds", lines, 2.0),
                Panel("Step", "CPUs held", "seconds", lines)])
    root = ET.fromstring(text)
    assert len(root.findall(f"{SVG}polyline")) == 2 * len(lines)
    assert len(root.findall(f"{SVG}circle")) == 2 * (len(lines) - 1)
    words = [t.text for t in root.findall(f"{SVG}text")]
    assert {"Mean ACT", "Step", "p8 <&>: 3 CPUs", "100"} <= set(words)
    wide, high = float(root.get("width", 0)), float(root.get("height", 0))
    for spot in root.findall(f"{SVG}circle"):
        assert 0 < float(spot.get("cx", -1)) < wide and 0 < float(spot.get("cy", -1)) < high
    assert ET.fromstring(svg([])) is not None


@pytest.mark.parametrize("ends", [(1, 1), (99, 101), (100, 800), (1, 10**6), (0.001, 40),
                                  (2.2, 18)])
def test_axis_ticks_are_few_and_within_the_axis(ends: tuple[float, float]) -> None:
    axis = Axis(ends, 0, 400, 8)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 8 and all(axis.low <= t <= axis.high for t in ticks)
    assert [axis.at(t) for t in ticks] == sorted(axis.at(t) for t in ticks)


# ---- the verb -----------------------------------------------------------------------------------


def test_tangram_size_prints_json_and_draws_a_picture(
        tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "c.svg"
    assert main([*SIZE, "--like", "static:4", "--policies", "fcfs:4,static:4,fcfs:4", "--json",
                 "--plot", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [p["policy"] for p in told["policies"]] == ["fcfs:4", "static:4"]
    assert told["full"] == {"CPUs": 20, "GPUs": 4}
    for policy in told["policies"]:
        assert policy["reached"] and policy["held"]["CPUs"] <= 20
        assert policy["best"]["mean_act_s"] <= told["target"]["mean_act_s"]
        assert policy["best"]["step_s"] <= told["target"]["step_s"]
        assert len(policy["points"]) >= 7
    assert len(ET.fromstring(out.read_text()).findall(f"{SVG}polyline")) == 4


def test_tangram_size_answers_with_learned_durations_and_the_oracles_beside_them(
        capsys: pytest.CaptureFixture) -> None:
    def told(*words: str) -> dict:
        assert main([*SIZE, "--target-act", "1.8", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    learned = told("--policies", "elastic,fcfs:4")
    oracle = told("--policies", "elastic,fcfs:4", "--durations", "oracle")
    assert (learned["durations"], oracle["durations"]) == ("learned", "oracle")
    elastic, fcfs = learned["policies"]
    assert elastic["oracle"] == {key: oracle["policies"][0][key]
                                 for key in ("reached", "held", "best")}
    assert elastic["points"] != oracle["policies"][0]["points"]
    assert fcfs["oracle"] is None and fcfs["points"] == oracle["policies"][1]["points"]
    assert all(policy["oracle"] is None for policy in oracle["policies"])


def test_tangram_size_prints_a_table_and_the_answer(capsys: pytest.CaptureFixture) -> None:
    assert main([*SIZE, "--target-act", "1.8", "--durations", "learned"]) == 0
    out = capsys.readouterr().out
    assert "mean ACT s" in out and "<- reaches the target" in out and "durations learned" in out
    assert "\nfcfs:4: " in out and " needs " in out
    beside = [line for line in out.splitlines() if "run times known beforehand" in line]
    assert len(beside) == 2, "elastic and paper decide by run times; the others do not"
    assert main([*SIZE, "--target-step", "30", "--policies", "fcfs:4"]) == 0
    assert "target step 30.000 s" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "told"), [
    (["--target-act", "0.001"],
     "no policy reaches it, even with unlimited resources; the best result is mean ACT"),
    (["--target-act", "0"], "--target-act 0.0: must be finite and above 0"),
    (["--target-step", "nan"], "--target-step nan: must be finite and above 0"),
    (["--target-act", "2", "--policies", "nice"], "placer 'nice' is not known"),
    (["--target-act", "2", "--policies", ","], "--policies: name at least one"),
    (["--like", "fcfs:x"], "placer 'fcfs:x'"),
    (["--like", "static:64"], "--like static:64: .*reserves more CPUs than any node"),
    (["--target-act", "2", "--plot", "c.pdf"], "must end in .svg or .png"),
    (["--target-step", "60", "--policies", "fcfs:4", "--plot", "/none/c.svg"], "No such file"),
])
def test_wrong_input_of_tangram_size_is_refused_in_one_line(
        words: list[str], told: str, capsys: pytest.CaptureFixture) -> None:
    assert main([*SIZE, *words]) == 2
    error = "".join(line for line in capsys.readouterr().err.splitlines(keepends=True)
                    if not line.startswith("tangram: size: simulations:"))  # told if it takes long
    assert error.count("\n") == 1
    assert re.search(told, error), error


def test_a_workload_without_actions_is_refused_by_tangram_size(
        tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    work = tmp_path / "w.jsonl"
    work.write_text('{"format": "tangram-workload/1", "name": "w"}\n')
    assert main(["size", str(work), "--cluster", str(CLUSTER), "--target-act", "1"]) == 2
    assert "nothing to size" in capsys.readouterr().err


def test_png_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SIZE, "--target-act", "2", "--plot", str(tmp_path / "c.png")]) == 2
    assert "[plot]'" in capsys.readouterr().err


def test_png_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = PolicyCurve("p", "p: 3 CPUs", [(1, 9), (10, 3)], (10, 3))
    curve_png.write([Panel("a", "x", "y", [line], 4.0), Panel("b", "x", "y", [line])],
                    tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
