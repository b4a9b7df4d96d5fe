"""Settings of allocations that grow and shrink: one line for each mistake, and the scripts that
they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tangram_hpc.cli import main
from tangram_hpc.cli.broker import _scripts
from tangram_hpc.cli.helpers.allocation_view import elastic_lines
from tangram_hpc.cli.template import left_open
from tangram_hpc.config.allocations import ElasticSettings, Satellite, alloc_policy, elastic
from tangram_hpc.errors import InvalidInput

REPO = Path(__file__).resolve().parents[2]
GOOD = {"max_nodes": 4, "max_core_hours": 10,
        "satellites": [{"name": "spot", "partition": "scav", "cpus": 16, "gpus": 2}]}


@pytest.mark.parametrize(("wrong", "told"), [
    ({"max_node": 4}, "elastic.max_node"),
    ({"max_nodes": -1}, "elastic.max_nodes"),
    ({"max_core_hours": 0}, "elastic.max_core_hours"),
    ({"satellites": []}, "elastic.satellites"),
    ({"satellites": [{"name": "a b", "cpus": 1}]}, "elastic.satellites.0.name"),
    ({"satellites": [{"name": "a"}]}, "elastic.satellites.0.cpus"),
    ({"satellites": [{"name": "a", "cpus": 1}] * 2}, "two entries have the name 'a'; give each"),
    ({"min_nodes": 0}, "elastic.min_nodes"),
    ({"give_back": "some"}, "elastic.give_back"),
])
def test_a_wrong_elastic_setting_is_refused_in_one_line(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        elastic(GOOD | wrong)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_no_satellite_is_allowed_by_default() -> None:
    policy = alloc_policy(elastic({}))
    assert policy.max_nodes == 0 and policy.max_core_ns == 0 and not policy.components


def test_the_allocation_policy_has_the_values_of_the_settings() -> None:
    policy = alloc_policy(elastic(GOOD, {"max_nodes": 2, "idle_release_s": None}))
    assert (policy.max_nodes, policy.max_core_ns) == (2, 36_000 * 10**9)
    (shape,) = policy.shapes
    assert (shape.partition, shape.cpus, shape.gpus) == ("scav", 16, 2)
    assert shape.core_ns == 16 * 3600 * 10**9
    assert policy.idle_ns == 120 * 10**9 and policy.shape("spot") == shape


def test_satellite_scripts_have_no_placeholder_left() -> None:
    made = _scripts(elastic(GOOD), "77", {"TANGRAM_HOME": "/shared/t", "TANGRAM_JOB": "77"})
    text = made.scripts["spot"]
    assert left_open(text) == [] and 'TANGRAM_JOB="77"' in text
    assert "#SBATCH --gres=gpu:2" in text and "--account" not in text
    assert made.environ == {"TANGRAM_HOME": "/shared/t"}
    assert made.output == "/shared/t/jobs/77/%x-%j.out"


def test_a_broker_refuses_incomplete_elastic_settings(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tangram.toml").write_text("[elastic]\nmax_nodes = 2\n")
    assert main(["broker", "--job", "1", "--config", "tangram.toml"]) == 2
    assert "elastic.max_core_hours" in capsys.readouterr().err


def test_the_page_names_every_key() -> None:
    page = (REPO / "docs" / "ELASTIC.md").read_text()
    missing = [f"`{name}`" for model in (ElasticSettings, Satellite) for name in model.model_fields
               if f"`{name}`" not in page]
    assert missing == []


def test_the_elastic_state_is_printed_as_lines() -> None:
    told = {
        "nodes": 1, "max_nodes": 4, "core_h": 0.5, "promised_core_h": 2.0, "max_core_h": 10.0,
        "idle_release_s": 120.0, "target_s": 60.0, "verdict": "enough", "trouble": "away",
        "demand": [{"kind": "cpu", "component": "x", "waiting": 3, "bound": 2, "held": 0,
                    "needs_s": None, "sessions": 1, "mem_mib": 50}],
        "allocations": [
            {"job": "7", "own": True, "state": "RUNNING", "name": "", "nodes": ["c1"], "for_s": 9,
             "idle_s": 0, "slurm_reason": "", "why": ""},
            {"job": "9", "own": False, "state": "PENDING", "name": "spot", "nodes": [], "for_s": 1,
             "idle_s": 0, "slurm_reason": "Priority", "why": "needed"}],
        "left_alone": [{"name": "odd", "for_s": 30.0, "rejections": 2, "why": "no such QOS"}],
        "decisions": [{"ago_s": float(i), "what": f"decision {i}"} for i in range(5)]}
    whole, brief = elastic_lines(told), elastic_lines(told, brief=True)
    assert len(whole) > len(brief)
    assert any("waits: Priority" in line for line in brief)
    assert any("no such QOS" in line and "30 s" in line for line in brief)
    assert sum("decision" in line for line in brief) == 3
    assert any("cannot drain" in line and "on more nodes, 2 could not" in line for line in whole)
