"""`tangram plan`: its files, its table, its plan file, its picture, and costs computed by a
command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tangram_hpc.cli import main
from tangram_hpc.config.planner.files import (
    EXAMPLES,
    LengthsTable,
    read_hardware,
    read_history,
    read_measured,
    read_model,
    shipped,
)
from tangram_hpc.config.planner.plan_file import read_plan
from tangram_hpc.config.planner.planner_settings import PlannerSettings, planner_settings
from tangram_hpc.config.settings import load_config
from tangram_hpc.errors import InvalidInput
from tangram_hpc.libra.live.plan_costs import CommandCosts, CostsFailed
from tangram_hpc.libra.planner.costs import AnalyticCosts
from tangram_hpc.libra.planner.shapes import Layout, Search
from tangram_hpc.libra.planner.split import plan
from tangram_hpc.libra.planner.trigger import Triggers

Run = Callable[..., tuple[int, str, str]]

MODEL = """
name = "small"
layers = 8
hidden = 1024
heads = 16
kv_heads = 4
ffn = 4096
vocab = 32000
[training]
batch = 24
[lengths]
prompt = [100, 400]
generated = [50, 100, 300, 4000]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the verb in a folder of its own with a small model file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TANGRAM_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    (tmp_path / "m.toml").write_text(MODEL)

    def go(*words: str, gpus: int = 8, model: str = "m.toml") -> tuple[int, str, str]:
        named = ["--config", "tangram.toml"] if (tmp_path / "tangram.toml").exists() else []
        status = main(["plan", *named, "--model", model, "--gpus", str(gpus), *words])
        told = capsys.readouterr()
        return status, told.out, told.err

    return go


# ---- files --------------------------------------------------------------------------------------


def test_every_shipped_file_can_be_read() -> None:
    assert shipped("model") == ["qwen3-14b", "qwen3-30b-a3b"]
    assert shipped("hardware") == ["a800-80g", "h200-141g"]
    assert len(list(EXAMPLES.glob("*.toml"))) == 4
    dense, moe = (read_model(name).shape() for name in shipped("model"))
    assert dense.params / 1e9 == pytest.approx(14.8, abs=0.05)  # as published: 14.8 B
    assert dense.active_params < dense.params
    assert moe.params / 1e9 == pytest.approx(30.5, abs=0.05)  # as published: 30.5 B
    assert moe.active_params / 1e9 == pytest.approx(3.3, abs=0.3)  # as published: 3.3 B
    for name in shipped("hardware"):
        assert read_hardware(name).hardware().name == name
    assert read_model(str(EXAMPLES / "model-qwen3-14b.toml")) == read_model("qwen3-14b")


@pytest.mark.parametrize(("old", "new", "told"), [
    ("layers = 8", "layer = 8", "layer: is not known; did you mean `layers`?"),
    ("layers = 8", "", "layers: is missing"),
    ("batch = 24", "batsh = 24", "training.batsh: is not known; did you mean `batch`?"),
    ("heads = 16", "heads = 0", "heads: "),
    ("kv_heads = 4", "kv_heads = 5", "kv_heads: 5 must divide heads 16"),
    ("ffn = 4096", "experts = 8", "a mixture needs top_k"),
    ("ffn = 4096", "", "ffn: a model without experts needs it"),
    ("ffn = 4096", "ffn = 4096\ntop_k = 2", "only a model with experts"),
    ("batch = 24", "batch = 24\ndegrees = [1, 3]",
     "training.degrees: must be ascending powers of two"),
    ("generated = [50, 100", "generated = [150, 100", "generated: values must ascend"),
    ("layers = 8", "layers = ", "model file"),
])
def test_a_wrong_model_file_is_refused_in_one_line(
        run: Run, tmp_path: Path, old: str, new: str, told: str) -> None:
    (tmp_path / "m.toml").write_text(MODEL.replace(old, new, 1))
    status, out, err = run()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and "m.toml" in err and told in err


@pytest.mark.parametrize(("words", "told"), [
    (["--hardware", "nope"], "hardware 'nope': there is no such file; shipped are a800-80g"),
    (["--hardware", "nope.toml"], "hardware file nope.toml: No such file"),
    (["--history", "nope.jsonl"], "nope.jsonl: No such file"),
    (["--explain", "8"], "--explain 8: the number of training GPUs must be from 1 to 7"),
    (["--top", "0"], "--top 0"),
    (["--force"], "--force: needs --apply"),
    (["--plot", "x.gif"], "--plot x.gif: the file's name must end in .svg or .png"),
    (["--apply", "no/such/folder.json"], "plan file no/such/folder.json: No such file"),
])
def test_wrong_options_of_tangram_plan_are_refused_in_one_line(
        run: Run, words: list[str], told: str) -> None:
    status, _, err = run(*words)
    assert status == 2 and err.count("\n") == 1 and told in err


@pytest.mark.parametrize(("line", "told"), [
    ('{"prompt": 5}', "generated: is missing"), ("[]", "not a JSON object"), ("x", "line 2"),
    ('{"prompt": -1, "generated": 2}', "prompt: "), ('{"prompt": 1, "generated": 0}', "generated"),
    ('{"prompt": 1, "generated": 1, "tool_s": 1e999}', "tool_s: "),
])
def test_a_wrong_history_file_is_refused_in_one_line(
        run: Run, tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "h.jsonl").write_text('{"prompt": 1, "generated": 2}\n' + line + "\n")
    status, _, err = run("--history", "h.jsonl")
    assert status == 2 and err.count("\n") == 1 and "h.jsonl line 2: " in err and told in err
    (tmp_path / "h.jsonl").write_text("\n")
    assert "the file holds no line" in run("--history", "h.jsonl")[2]


def test_history_and_measured_files_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text('{"prompt": 10, "generated": 20, "tool": 5, "tool_s": 0.5, "id": 7}\n\n'
                    '{"prompt": 1, "generated": 2}\n')
    first, second = read_history(path)
    assert (first.prompt, first.generated, first.tool_ns) == (15, 20, 500_000_000)
    assert (second.prompt, second.generated, second.tool_ns) == (1, 2, 0)
    path.write_text('{"stage": "train", "degree": 2, "modelled_s": 1, "measured_s": 1, '
                    '"mean_tokens": 5}\n')
    with pytest.raises(InvalidInput, match="line 1: degree: "):
        read_measured(path)


def test_lengths_of_a_model_file_are_spread_evenly() -> None:
    table = LengthsTable(prompt=(0, 100), generated=(10, 20, 1000))
    found = table.requests(4)
    assert [r.prompt for r in found] == [12, 38, 62, 88]
    assert [r.generated for r in found] == [12, 18, 265, 755]
    assert len({r.total for r in LengthsTable(prompt=(5,), generated=(7,)).requests(3)}) == 1


# ---- settings -----------------------------------------------------------------------------------


def test_planner_settings_have_the_defaults_of_the_planner() -> None:
    settings = planner_settings({})
    assert settings.search() == Search()
    assert settings.triggers() == Triggers()
    assert settings.learning().slow == 0.1 and settings.learning().fast == 0.8


def test_settings_come_from_the_config_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tangram.toml").write_text("[planner]\ngranularity = 4\nmin_rollout = 3\n")
    table = load_config({"TANGRAM_CONFIG": "tangram.toml"}).planner
    assert planner_settings(table) == PlannerSettings(granularity=4, min_rollout=3)
    told = json.loads(run("--json")[1])
    assert [s["train_gpus"] for s in told["splits"]] == [4]
    (tmp_path / "tangram.toml").write_text("[planner]\nbuble = 0.1\n")
    status, _, err = run()
    assert status == 2 and "[planner] buble: is not known; did you mean `bubble`?" in err


# ---- the verb -----------------------------------------------------------------------------------


def test_the_printed_table_matches_the_plan(run: Run, tmp_path: Path) -> None:
    status, out, err = run("--top", "3")
    assert (status, err) == (0, "")
    model = read_model(str(tmp_path / "m.toml"))
    costs = AnalyticCosts(model.shape(), read_hardware("a800-80g").hardware(), model.job(),
                          model.engine(), model.lengths.requests(24) if model.lengths else [])
    found = plan(costs, 8, Search())
    lines = out.splitlines()
    head = next(k for k, line in enumerate(lines) if line.startswith(" train rollout"))
    for split, line in zip(found.splits[:3], lines[head + 1:], strict=False):
        cells = line.split()
        assert [int(cells[0]), int(cells[1])] == [split.train_gpus, split.rollout_gpus]
        assert float(cells[2]) == pytest.approx(split.step_ns / 1e9, abs=0.006)
        assert f"tp{split.layout.tp} pp{split.layout.pp} dp{split.layout.dp}" in line
    assert f"and {len(found.splits) - 3} slower splits" in out
    told = json.loads(run("--json", "--top", "99")[1])
    assert [s["step_s"] for s in told["splits"]] == [s.step_ns / 1e9 for s in found.splits]
    assert told["splits"][0]["layout"]["micro"] == found.best.layout.micro
    assert sum(told["splits"][0]["train_parts_s"].values()) == pytest.approx(
        told["splits"][0]["train_s"])
    assert run("--json", "--top", "99")[1] == json.dumps(told) + "\n", "the same words twice"


def test_plan_explain_lists_every_layout_considered(run: Run) -> None:
    everything = run("--explain")[1].split("\n\n")[0].splitlines()
    four = run("--explain", "4")[1].split("\n\n")[0].splitlines()
    assert four == [x for x in everything if x.startswith(("4 GPUs: ", "rollout TP"))]
    assert [x.split(":")[0] for x in four[-4:]] == [f"rollout TP{d}" for d in (1, 2, 4, 8)]
    assert "4 GPUs: tp8: cut: TP does not divide 4 GPUs" in four
    assert any(line.startswith("4 GPUs: tp1 ep1 pp1 dp4 micro1: ") and " s, " in line
               for line in four)
    assert any("the pipeline idles" in line for line in everything)
    assert len(json.loads(run("--json", "--explain")[1])["nodes"]) == len(everything)


def test_measured_times_correct_the_predicted_step(run: Run, tmp_path: Path) -> None:
    before = json.loads(run("--json")[1])["splits"][0]
    (tmp_path / "m.jsonl").write_text("\n".join(json.dumps(
        {"stage": stage, "modelled_s": 2.0, "measured_s": 5.0, "mean_tokens": 100, **more})
        for stage, more in (("train", {}), ("rollout", {"degree": 1}))))
    status, out, _ = run("--measured", "m.jsonl")
    assert status == 0 and "corrected by measured times: training x 2.500, TP1 x 2.500" in out
    after = json.loads(run("--json", "--measured", "m.jsonl")[1])["splits"][0]
    assert after["step_s"] == pytest.approx(2.5 * before["step_s"], rel=1e-6)


def test_measured_mixtures_correct_the_routing_loss(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tangram.toml").write_text("[planner]\nrouting_loss = 0.1\n")

    def told(mixed_s: float) -> tuple[float, str]:
        (tmp_path / "m.jsonl").write_text("\n".join(json.dumps(
            {"stage": "rollout", "degree": degree, "modelled_s": 1.0, "measured_s": took,
             "mean_tokens": 100, "mixed": mixed})
            for degree, took, mixed in [(1, 1.0, False)] * 5 + [(1, mixed_s, True)] * 5))
        out = json.loads(run("--json", "--measured", "m.jsonl")[1])
        return out["splits"][0]["step_s"], out["costs"]

    plain = json.loads(run("--json")[1])
    assert told(1.1) == (plain["splits"][0]["step_s"], plain["costs"]), "the loss is as configured"
    step_s, costs = told(1.65)
    assert costs == f"{plain['costs']}, routing loss 0.542 as measured", "1.1 x 1.5 ** (5 / 6)"
    assert step_s >= plain["splits"][0]["step_s"]
    (tmp_path / "m.jsonl").write_text('{"stage": "train", "modelled_s": 1, "measured_s": 1, '
                                      '"mean_tokens": 1, "mixed": true}')
    assert "mixed: only rollouts have it" in run("--measured", "m.jsonl")[2]


def test_the_picture_is_drawn(run: Run, tmp_path: Path) -> None:
    assert run("--plot", "plan.svg")[0] == 0
    text = (tmp_path / "plan.svg").read_text()
    root = ElementTree.fromstring(text)
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 6
    points = lines[0].get("points")
    assert points is not None and len(points.split()) == len(
        json.loads(run("--json", "--top", "99")[1])["splits"])
    for word in ("Splits of 8 GPUs", "GPUs that train", "a ring is the best split"):
        assert word in text


# ---- the plan file ------------------------------------------------------------------------------


def test_plan_apply_writes_the_best_plan(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("--apply")
    assert status == 0
    assert "tangram-plan.json: written (there was no plan)" in out
    assert "no process was touched" in out
    best = json.loads(run("--json")[1])["splits"][0]
    found = read_plan(tmp_path / "tangram-plan.json")
    assert found.training.gpus == best["train_gpus"] and found.gpus == 8
    assert found.degrees() == [one["degree"] for one in best["instances"]]
    assert found.expected_step_s == pytest.approx(best["step_s"])
    taken = [(b.node, g) for b in [*found.training.blocks, *(i.block for i in found.rollout)]
             for g in b.gpus]
    assert len(set(taken)) == len(taken)
    ups = [b.up_to_tokens for b in found.buckets]
    assert ups == sorted(ups) and ups[-1] == best["instances"][-1]["longest"]
    assert sum(b.instances for b in found.buckets) == len(found.rollout)
    assert [p.name for p in tmp_path.iterdir() if "plan" in p.name] == ["tangram-plan.json"]


def test_plan_apply_keeps_a_plan_unless_the_new_one_is_worth_the_switch(
        run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    run("--apply", "p.json")
    first = path.read_bytes()
    assert "kept as it is: nothing to gain" in run("--apply", "p.json")[1]
    (tmp_path / "h.jsonl").write_text("\n".join(
        json.dumps({"prompt": 10, "generated": n}) for n in (9000, 12000, 20000, 30000)))
    (tmp_path / "tangram.toml").write_text("[planner]\nreconfiguration_cost_s = 1000000\n")
    told = run("--apply", "p.json", "--history", "h.jsonl")[1]
    assert "kept as it is" in told and path.read_bytes() == first
    (tmp_path / "tangram.toml").write_text("[planner]\nreconfiguration_cost_s = 0\n"
                                           "min_gain_ratio = 0\n")
    told = run("--apply", "p.json", "--history", "h.jsonl")[1]
    assert "p.json: written (" in told and "of switching" in told
    assert path.read_bytes() != first
    (tmp_path / "tangram.toml").write_text("")
    assert "written (--force)" in run("--apply", "p.json", "--force")[1]
    assert path.read_bytes() == first
    assert "the old plan was for 8 GPUs" in run("--apply", "p.json", gpus=6)[1]
    path.write_text('{"format": "other"}')
    status, _, err = run("--apply", "p.json")
    assert status == 2 and "plan file p.json: format: " in err


# ---- costs by a command -------------------------------------------------------------------------

PROGRAM = """
import json, sys
asked = json.load(sys.stdin)
assert asked["format"] == "tangram-costs/1" and asked["hardware"]["gpus_per_node"] == 8
if asked["kind"] == "train":
    total = sum(asked["lengths"])
    seconds = [total / (x["tp"] * x["pp"] * x["dp"]) / 1e3 for x in asked["layouts"]]
    json.dump({"seconds": seconds, "mem_bytes": [1 << 30] * len(seconds)}, sys.stdout)
else:
    ends = [sum(map(sum, asked["requests"][:k])) for k in range(len(asked["requests"]) + 1)]
    d = asked["degree"]
    json.dump({"seconds": [None if d == 8 else (ends[b] - ends[a]) / d / 500
                           for a, b in asked["segments"]]}, sys.stdout)
"""


def configured(tmp_path: Path, program: str, more: str = "") -> None:
    (tmp_path / "costs.py").write_text(program)
    command = json.dumps([sys.executable, str(tmp_path / "costs.py")])
    (tmp_path / "tangram.toml").write_text(f"[planner]\ncost_command = {command}\n{more}")


def test_plan_costs_can_come_from_a_command(run: Run, tmp_path: Path) -> None:
    configured(tmp_path, PROGRAM)
    told: dict[str, Any] = json.loads(run("--json", "--top", "99")[1])
    assert told["costs"] == f"the command {sys.executable}"
    model = read_model("m.toml")
    assert model.lengths is not None
    batch = model.lengths.requests(24)
    total = sum(r.total for r in batch)
    for split in told["splits"]:
        assert split["train_s"] == pytest.approx(total / split["train_gpus"] / 1e3, rel=1e-6)
        assert split["mem_bytes"] == 1 << 30
        assert all(one["degree"] < 8 for one in split["instances"])
        least = total / split["rollout_gpus"] / 500
        assert least - 1e-6 <= split["rollout_s"] < 3 * least


@pytest.mark.parametrize(("program", "told"), [
    ("import sys; sys.exit('no licence')", "exit status 1: no licence"),
    ("print('hello')", "its answer is not JSON"),
    ("print('[]')", "its answer is not a JSON object"),
    ("print('{}')", "seconds: must be a list of "),
    ("import json, sys; n = len(json.load(sys.stdin)['layouts']);"
     "print(json.dumps({'seconds': [-1] * n}))",
     "seconds: each must be null or a number of 0 or more"),
    ("import json, sys; n = len(json.load(sys.stdin)['layouts']);"
     "print(json.dumps({'seconds': [1] * n, 'mem_bytes': [1]}))", "mem_bytes: one whole number"),
    ("import json, sys; n = len(json.load(sys.stdin)['layouts']);"
     "print(json.dumps({'seconds': [1] * n, 'mem_bytes': 5}))", "mem_bytes: one whole number"),
    ("import time; time.sleep(60)", "no answer within 0.5 s"),
    ("while True: print('y' * 65536)", "it prints more than 64 MiB"),
])
def test_a_failing_cost_command_is_an_error_or_falls_back_to_the_model(
        run: Run, tmp_path: Path, program: str, told: str) -> None:
    limit = "cost_timeout_s = 0.5\n" if "sleep" in program else ""
    configured(tmp_path, program, limit)
    status, out, err = run()
    assert (status, out) == (1, "") and err.count("\n") == 1 and told in err
    own = json.loads(run("--json")[1]) if not (tmp_path / "tangram.toml").unlink() else {}
    configured(tmp_path, program, limit + "cost_fallback = true\n")
    fallen = json.loads(run("--json")[1])
    assert told in fallen["costs"] and fallen["costs"].startswith("the own model, as ")
    assert fallen["splits"] == own["splits"]


@pytest.mark.parametrize("seconds", ["10**400", "1e305"])
def test_infinite_seconds_from_a_cost_command_mean_infeasible(
        run: Run, tmp_path: Path, seconds: str) -> None:
    configured(tmp_path, "import json, sys; n = len(json.load(sys.stdin)['layouts']);"
                         f"print(json.dumps({{'seconds': [{seconds}] * n}}))", "")
    status, out, err = run()
    assert (status, out, err.count("\n")) == (2, "", 1) and "no training layout can run" in err


def test_a_missing_cost_command_is_an_error(tmp_path: Path) -> None:
    model = read_model("qwen3-14b")
    assert model.lengths is not None
    own = AnalyticCosts(model.shape(), read_hardware("a800-80g").hardware(), model.job(),
                        model.engine(), model.lengths.requests(512))
    costs = CommandCosts(own, [str(tmp_path / "none")], 5.0)
    assert len(costs.train([])) == 0
    with pytest.raises(CostsFailed, match="it cannot be started"):
        costs.train([Layout(1, 1, 1, 1, 1)])
