"""Live replay: every action once, in order, within capacity, at about the simulated speed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc.cli import main
from tangram_hpc.errors import InvalidInput
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.replay.countdown import POLL_S, command
from tangram_hpc.simulator.replay.replay_run import first, replay
from tangram_hpc.simulator.run_records import RunRecords
from tangram_hpc.simulator.workload import Cluster, Workload, WorkloadTrajectory, read_workload

CHECKER = Path(__file__).resolve().parents[3] / "shared" / "workloads" / "check_records.py"
CLUSTER = {"nodes": [{"name": "v", "cpus": 12, "mem_mib": 4000}]}


def trajectories(seed: int, size: int) -> list[dict[str, Any]]:
    """Shell commands and builds of a small coding step."""
    rng = random.Random(seed)

    def act() -> dict[str, Any]:
        if rng.random() < 0.6:
            return {"name": "shell", "resource": "cpu", "degrees": [1], "serial": 0.0,
                    "work_s": round(rng.uniform(0.2, 1.5), 3), "resize": rng.random() < 0.5}
        return {"name": "build", "resource": "cpu", "degrees": [1, 2, 4, 8],
                "serial": round(rng.uniform(0, 0.2), 3), "work_s": round(rng.uniform(2, 9), 3)}

    return [{"trajectory": f"t{i}", "start_s": 0.0, "session": {"mem_mib": 200},
             "turns": [{"think_s": round(rng.uniform(0.1, 1), 3), "actions": [act()]}
                       for _ in range(rng.randrange(1, 5))]} for i in range(size)]


def write(folder: Path, rows: list[dict[str, Any]]) -> tuple[Path, Path]:
    work, cluster = folder / "w.jsonl", folder / "c.json"
    head = {"format": "tangram-workload/1", "name": "small"}
    work.write_text("".join(json.dumps(row) + "\n" for row in [head, *rows]))
    cluster.write_text(json.dumps(CLUSTER))
    return work, cluster


def check_live_run(run: RunRecords, work: Workload, cpus: int) -> None:
    """Checks order, completeness and capacity of a live run."""
    wanted = [(i, j, k, 0) for i, t in enumerate(work.trajectories)
              for j, turn in enumerate(t.turns) for k in range(len(turn.actions))]
    assert [r.order for r in run.records] == wanted
    changes = []
    homes = {r.trajectory: r.node for r in run.records}
    for r in run.records:
        assert r.node == homes[r.trajectory]
        assert r.state == "COMPLETED" and r.submit <= r.start <= r.end
        ends = [*(since for since, _, _ in r.grants[1:]), r.end]
        for (since, units, ids), until in zip(r.grants, ends, strict=True):
            assert units == len(set(ids)) and all(0 <= core < cpus for core in ids)
            changes += [(since, 1, r.node, units), (until, 0, r.node, -units)]
    held: Counter[str] = Counter()
    for _, _, node, units in sorted(changes):
        held[node] += units
        assert held[node] <= cpus
    by_turn = {r.order[:2]: r for r in run.records}
    for (i, j), r in by_turn.items():
        assert (i, j - 1) not in by_turn or by_turn[i, j - 1].end <= r.submit


def is_policy(policy: str) -> bool:
    try:
        make_placer(policy)
    except InvalidInput:
        return False
    return True


@pytest.mark.parametrize("policy", [*filter(is_policy, ["fcfs:4", "static:4", "elastic"])])
def test_a_live_replay_matches_the_simulation(
        policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work, cluster = write(tmp_path, trajectories(7, 6))
    records = tmp_path / "r.jsonl"
    words = ["replay", str(work), "--cluster", str(cluster), "--scale", "0.2", "--policy", policy,
             "--records", str(records), "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["live"] and told["figures"]["actions"] == told["simulated"]["actions"]
    assert told["ratio"] > 0.9, told  # how near it is from above depends on who else is busy here
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert rows[0]["policy"] == policy and len(rows) == told["figures"]["actions"] + 1
    if CHECKER.exists():
        done = subprocess.run([sys.executable, str(CHECKER), str(work), str(cluster),
                               str(records), "--live"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_a_live_replay_on_two_nodes_violates_no_invariant() -> None:
    work = Workload(name="two", trajectories=tuple(
        WorkloadTrajectory.model_validate(t) for t in trajectories(3, 5)))
    cluster = Cluster.model_validate(
        {"nodes": [{"name": "v", "count": 2, "cpus": 8, "mem_mib": 2000}]})
    run = replay(work, cluster, "fcfs:4", 0.1)
    assert {r.node for r in run.live.records} == {"v0", "v1"}
    check_live_run(run.live, work, 8)


def test_a_replayed_action_runs_at_the_speed_of_its_cpus_file(tmp_path: Path) -> None:
    """40 s of work: a moment on 4 units, a moment suspended, the rest on 400 units."""
    file = tmp_path / "cpus"

    def say(units: int) -> float:
        """Returns when it was written. On a busy disk it may be renamed much later."""
        fresh = tmp_path / "fresh"
        fresh.write_text(f"{units}\n")
        fresh.rename(file)
        return file.stat().st_mtime

    began = say(4)
    child = subprocess.Popen(command(40.0, 0.0, True), env={"TANGRAM_CPUS_FILE": str(file)})
    time.sleep(0.1)
    paused = say(0)
    time.sleep(0.1)
    assert child.poll() is None
    resumed = say(400)
    assert child.wait(60) == 0
    least = (40 - 4 * (paused - began)) / 400 + (resumed - began)
    assert time.time() - began > least - 10 * POLL_S


def test_a_workload_that_cannot_be_replayed_is_refused_in_one_line(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = trajectories(1, 2)
    rows[1]["turns"][0]["actions"][0]["resource"] = "service:judge"
    work, cluster = write(tmp_path, rows)
    for words, said in ((["--scale", "0.2"], "CPU actions only"), (["--scale", "2"], "--scale"),
                        (["--scale", "1e-320"], "must be at least 1e-09"),
                        (["--scale", "0.2", "--policy", "best"], "best")):
        assert main(["replay", str(work), "--cluster", str(cluster), *words]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and said in told
    for cpus in ("0", "100000000000"):
        assert main(["replay", str(work), "--scale", "0.2", "--cpus", cpus]) == 2
        assert capsys.readouterr().err == (
            f"tangram: error: --cpus {cpus}: must be from 1 to 10000000\n")
    with pytest.raises(InvalidInput, match="--first"):
        first(read_workload(work), 0)


def test_a_replay_that_is_killed_leaves_no_folder(tmp_path: Path, short_folder: Path) -> None:
    work, cluster = write(tmp_path, trajectories(1, 2))
    ran = subprocess.Popen([sys.executable, "-m", "tangram_hpc", "replay", str(work), "--cluster",
                            str(cluster), "--scale", "1"],
                           env=os.environ | {"TMPDIR": str(short_folder)}, start_new_session=True)
    deadline = time.monotonic() + 60
    while not [*short_folder.glob("tangram-replay-*/jobs/*/access.json")]:
        assert time.monotonic() < deadline and ran.poll() is None
        time.sleep(0.05)
    ran.terminate()
    assert ran.wait(60) == 128 + signal.SIGTERM
    assert [*short_folder.glob("tangram-replay-*")] == []
