"""`Client.metrics`: stable names, sums that agree with each action's details, and a new window for
each call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.client.client_metrics import METRIC_NAMES, ActionWindow, ActionWindows
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.message import ActionResult

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "METRICS.md"
INFO = {"nodes": 2, "cpus": 16, "cpus_free": 5, "gpus": 4, "gpus_free": 1, "mem_mib": 1000,
        "mem_mib_free": 400, "sessions": 20,
        "actions": {"CONFIGURING": 4, "PENDING": 7, "RUNNING": 7},
        "sessions_waiting": 3, "clients": 1}
MS = 10**6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=4, mem_mib=4096, home=tmp_path_factory.mktemp("home")) as c:
        yield c


def ended(state: ActionState = ActionState.COMPLETED, exec_ms: int = 30, restore_ms: int = 0,
          **result: object) -> ActionResult:
    fields: dict[str, object] = {"node": "n", "cores": (0,), "attempt": 1, "queue_ns": 10 * MS,
                                 "held_ns": 35 * MS}
    return ActionResult(1, Outcome(state, exec_ns=exec_ms * MS, restore_ns=restore_ms * MS,
                                   cpu_ns=20 * MS), **(fields | result))  # type: ignore[arg-type]


def action(kind: Kind = Kind.EXEC) -> Action:
    return Action(1, "tool", kind)


# ---- the sums ----------------------------------------------------------------------------------


def test_the_act_is_split_into_queue_restore_run_and_system() -> None:
    window = ActionWindow()
    window.add(ended(), 50 * MS)
    window.add(ended(exec_ms=50, restore_ms=20), 90 * MS)
    figures = window.figures()
    assert figures["count"] == 2 and figures["failed"] == 0
    assert figures["act_s"] == pytest.approx(0.070) and figures["act_max_s"] == 0.090
    parts = [figures[name] for name in ("queue_s", "restore_s", "run_s", "system_s")]
    assert parts == pytest.approx([0.010, 0.010, 0.040, 0.010])
    assert sum(parts) == pytest.approx(figures["act_s"])


def test_the_overhead_is_split_into_set_up_and_return() -> None:
    window = ActionWindow()
    for setup_ms, act_ms in ((4, 50), (900, 50), (-1, 50)):  # the last one was not measured
        result = ended()
        outcome = msgspec.structs.replace(result.outcome, setup_ns=setup_ms * MS)
        window.add(msgspec.structs.replace(result, outcome=outcome), act_ms * MS)
    figures = window.figures()
    assert figures["system_s"] == pytest.approx(0.010)
    assert figures["setup_s"] == pytest.approx((0.004 + 0.010) / 3)
    assert figures["setup_s"] + figures["return_s"] == pytest.approx(figures["system_s"])


def test_an_action_whose_size_changed_held_the_sum_of_its_sizes() -> None:
    window = ActionWindow()
    window.add(ended(grants=((0, 1), (10 * MS, 4), (20 * MS, 0)), held_ns=50 * MS), 60 * MS)
    assert window.held_core_ns == 10 * MS + 4 * 10 * MS


def test_an_action_without_a_grant_held_nothing() -> None:
    window = ActionWindow()
    window.add(ended(ActionState.CANCELLED, cores=(), held_ns=0), 5 * MS)
    assert (window.held_core_ns, window.failed) == (0, 1)


@pytest.mark.parametrize(("kind", "group"), [
    (Kind.EXEC, "tools"), (Kind.FUNCTION, "tools"), (Kind.CALL, "services"),
    (Kind.GRANT, "endpoints"), (Kind.FILE, "")])
def test_each_kind_of_action_counts_in_one_group(kind: Kind, group: str) -> None:
    windows = ActionWindows()
    windows.add(action(kind), ended(), 50 * MS)
    figures = windows.read(INFO, "")
    counts = {name: value for name, value in figures.items() if name.endswith("/count")}
    assert {name for name, value in counts.items() if value} == ({f"{group}/count"} - {"/count"})


def test_a_reading_begins_a_new_window_and_keeps_the_names() -> None:
    windows = ActionWindows()
    windows.add(action(), ended(ActionState.FAILED), 50 * MS)
    first, second = windows.read(INFO, "x/"), windows.read(INFO, "x/")
    assert tuple(first) == tuple(second) == tuple(f"x/{name}" for name in METRIC_NAMES)
    assert {type(value) for value in first.values()} == {float}
    assert (first["x/tools/count"], first["x/tools/failed"]) == (1, 1)
    assert (second["x/tools/count"], second["x/tools/act_s"]) == (0, 0)


def test_the_gauges_are_those_of_the_whole_job() -> None:
    figures = ActionWindows().read(INFO, "")
    assert figures["job/cpus_held"] == 16 and figures["job/cpus_lent"] == 11
    assert figures["job/gpus_lent"] == 3 and figures["job/mem_lent_mib"] == 600
    assert figures["job/actions_waiting"] == 7 and figures["job/actions_running"] == 11
    assert figures["job/sessions"] == 20 and figures["job/sessions_waiting"] == 3


# ---- the document ------------------------------------------------------------------------------


def test_the_document_lists_every_name_and_no_other() -> None:
    text = DOCUMENT.read_text()
    of_group = re.findall(r"^\| `GROUP/(\w+)`", text, re.MULTILINE)
    named = re.findall(r"^\| `((?:tools|job)/\w+)`", text, re.MULTILINE)
    groups = {name.partition("/")[0] for name in METRIC_NAMES} - {"job"}
    assert {*(f"{group}/{name}" for group in groups for name in of_group), *named} == set(
        METRIC_NAMES)


# ---- a real broker -----------------------------------------------------------------------------


def test_metrics_agree_with_the_details_of_what_ended(cluster: LocalCluster) -> None:
    cluster.metrics()
    futures = [cluster.submit(["sleep", "0.05"], cpus=2), cluster.submit(["false"]),
               cluster.submit(abs, -3)]
    for future in futures:
        future.result()
    details = [future.details for future in futures]
    figures = cluster.metrics()
    assert figures["tangram/tools/count"] == 3 and figures["tangram/tools/failed"] == 1
    for name, field in (("queue_s", "queue_s"), ("run_s", "exec_s"), ("act_s", "act_s")):
        mean = sum(getattr(each, field) for each in details) / 3
        assert figures[f"tangram/tools/{name}"] == pytest.approx(mean, abs=0.005)
    held = sum(len(each.cores) * each.held_s for each in details)
    assert figures["tangram/tools/held_core_s"] == pytest.approx(held, rel=0.2)
    assert figures["tangram/job/cpus_held"] == 4
    assert cluster.metrics()["tangram/tools/count"] == 0


def test_metrics_of_a_closed_client_raise(tmp_path: Path, cluster: LocalCluster) -> None:
    with tangram_hpc.connect(cluster.access) as client:
        assert client.metrics(prefix="")["job/clients"] >= 2
    with pytest.raises(tangram_hpc.TangramError):
        client.metrics()
