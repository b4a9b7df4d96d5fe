"""A frame of `tangram top` fits its screen whatever the job holds, and says what was left out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tangram_hpc.cli.views.top_frame import frame


def answer(nodes: int, running: int, resources: int, reasons: int) -> dict[str, Any]:
    """A broker's answer about a job of this size; lists have at most 50 rows, as a broker's."""
    window = {"ended": 7, "failed": 1, "rate": 1.4, "act_s": 0.5, "wait_s": 0.2, "held_s": 0.3}
    never = {"ended": 0, "failed": 0, "rate": 0.0, "act_s": None, "wait_s": None, "held_s": None}
    return {
        "job": "4711", "placer": "elastic", "now_ns": 10**18, "cpus": 64 * nodes,
        "cpus_free": 16 * nodes, "gpus": 8, "gpus_free": 8, "mem_mib": 1000, "mem_mib_free": 0,
        "clients": 3, "sessions": 9, "sessions_waiting": 2, "running": running, "calls": 4,
        "reasons": {f"Reason{n}": 10 for n in range(reasons)},
        "recent": [{"window_s": 5, **never}] + [{"window_s": s, **window} for s in (60, 300, 900)],
        "nodes": nodes, "node_rows": [
            {"name": f"node{n}" * 5, "state": "UP", "component": "", "cpus": 64, "cpus_free": 16,
             "gpus": 0, "gpus_free": 0, "mem_mib": 100, "mem_mib_free": 1, "sessions": 2,
             "leases": 3} for n in range(min(50, nodes))],
        "running_rows": [
            {"action": f"1.{n}", "name": "tool" * 20, "state": "RUNNING", "client_name": "rank 0",
             "key": "cpu", "ncpus": 4, "gpus": 0, "node": f"node{n}", "elapsed_ns": n * 10**11}
            for n in range(min(50, running))],
        "services": [{"name": f"s{n}", "stands_on": ["n1:0,1"] * n, "parked_mib": 10}
                     for n in range(resources)],
        "endpoints": [{"name": "search", "inside": 1, "concurrency_now": 8, "rate": 5.0,
                       "rate_now": 2.5, "waiting": 3, "calls": 9, "throttled_s": 1.5}] * resources,
        "rollouts": [{"name": "policy", "waiting": 3, "turns": 5, "trajectories": 8,
                      "loads": [["tp1", 3, 8]]}] * resources}


@pytest.mark.parametrize("height", [1, 5, 12, 24, 60])
@pytest.mark.parametrize("nodes, running, resources, reasons",
                         [(0, 0, 0, 0), (1, 2, 0, 1), (1, 2, 1, 1), (200, 1000, 9, 30),
                          (3, 1000, 0, 2), (200, 3, 2, 2)])
def test_a_frame_fits_and_counts_what_it_leaves_out(height: int, nodes: int, running: int,
                                                    resources: int, reasons: int) -> None:
    lines = [line.text for line in frame(answer(nodes, running, resources, reasons), 80, height)]
    assert len(lines) <= height and max(map(len, lines)) <= 80
    if height < 24:
        return
    text = "\n".join(lines)
    for total, row in ((nodes, r"^node\d"), (running, r"^ *1\.\d"),
                       (3 * resources, r"^(service|pool|endpoint) ")):
        shown = len(re.findall(row, text, re.M))
        assert shown <= total and (shown or not total)
        if shown < total:
            assert f"... and {total - shown} more" in text
    if height == 24 and running > 100:
        assert len(lines) == 24, "the screen is used"


def test_a_service_on_no_gpu_is_not_called_parked_as_it_may_be_loading_or_refused() -> None:
    lines = [line.text for line in frame(answer(1, 0, 2, 0), 80, 0)]
    assert "service s0           on no GPU, 10 MiB when parked" in lines
    assert "service s1           n1:0,1" in lines


def test_a_frame_without_a_height_has_all_rows() -> None:
    lines = [line.text for line in frame(answer(200, 1000, 2, 1), 80, 0)]
    assert "... and 150 more" in lines and lines[-1] == "... and 950 more"
    text = "\n".join(lines)
    assert "throttled for 1.5 s" in text and "1:06:40" in text and "8:20" in text
    assert re.search(r"^CPUs \[\|{22} {8}\]  75%  9600/12800 lent$", text, re.M)
    assert re.search(r"^mean ACT s +- +0\.500 +0\.500 +0\.500$", text, re.M)
