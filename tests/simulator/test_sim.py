"""The simulator: baselines exactly as the formats define them, invariants, reproducible runs."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.sim_material import CLUSTER, one_node, reference_fcfs, reference_static, workload

from tangram_hpc.cli import main
from tangram_hpc.errors import InvalidInput
from tangram_hpc.scheduler.placement.placers.base import Finder, Placement, Resizing, grant
from tangram_hpc.scheduler.placement.placers.fcfs import Fcfs
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.placement.placers.session_openings import open_by_load
from tangram_hpc.scheduler.state.queue import CPU
from tangram_hpc.simulator.checkers import faults
from tangram_hpc.simulator.message_world import Failure
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, Workload, read_cluster, read_workload

SHARED = Path(__file__).resolve().parents[3] / "shared" / "workloads"
EXAMPLES = Path(__file__).resolve().parents[2] / "tangram_hpc" / "simulator" / "examples"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared workloads are not here")
ALL = ("cpu", "service:judge", "service:teacher", "endpoint:search")


def times(run) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(trajectory, turn, index) -> (submit, end)."""
    return {r.order[:3]: (r.submit, r.end) for r in run.records}


def check_records(work: Path, cluster: Path, records: Path, *more: str) -> None:
    """The checker that shares no code with the project."""
    told = subprocess.run([sys.executable, str(SHARED / "check_records.py"), str(work),
                           str(cluster), str(records), *more], capture_output=True, text=True,
                          check=False)
    assert told.returncode == 0, told.stderr


def write(work: Workload, cluster: dict, folder: Path) -> tuple[Path, Path]:
    """A workload and a cluster as files."""
    lines = [{"format": "tangram-workload/1", "name": work.name},
             *(t.model_dump() for t in work.trajectories)]
    (folder / "w.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "c.json").write_text(json.dumps(cluster))
    return folder / "w.jsonl", folder / "c.json"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("cpus", "k"), [(8, 4), (8, 1), (13, 3), (20, 8)])
def test_fcfs_equals_an_independent_reference(seed: int, cpus: int, k: int) -> None:
    work = workload(seed)
    run = simulate(work, one_node(cpus), make_placer(f"fcfs:{k}"), check=seed < 4)
    assert times(run) == reference_fcfs(work, cpus, k)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("cpus", "k"), [(8, 4), (13, 3), (9, 2)])
def test_static_equals_an_independent_reference(seed: int, cpus: int, k: int) -> None:
    work = workload(seed)
    run = simulate(work, one_node(cpus), make_placer(f"static:{k}"), check=seed < 4)
    assert times(run) == reference_static(work, cpus, k)


@shared
@pytest.mark.parametrize(("policy", "cpus", "mean_act_s"), [
    ("static:4", 800, 2.265112346538), ("static:4", 400, 4.443578979897),
    ("static:4", 232, 7.819026828756), ("fcfs:4", 400, 2.265112346538),
    ("fcfs:4", 232, 2.617639402244), ("fcfs:4", 128, 5.645592574974)])
def test_baseline_figures_are_exact(policy: str, cpus: int, mean_act_s: float) -> None:
    cluster = Cluster.model_validate({"nodes": [{"name": "c", "cpus": cpus, "mem_mib": 4194304}]})
    run = simulate(read_workload(SHARED / "coding-200.jsonl"), cluster, make_placer(policy))
    assert run.figures()["mean_act_s"] == pytest.approx(mean_act_s, abs=1e-6)


@shared
@pytest.mark.parametrize(("name", "policy"), [
    ("coding-200", "fcfs:4"), ("coding-200", "static:4"), ("mopd-512", "static"),
    ("mopd-512", "fcfs:1"), ("deepsearch-256", "fcfs:2"), ("mixed-300", "first-fit"),
    ("mixed-300", "static:4"),
    pytest.param("coding-1280", "fcfs:4", marks=pytest.mark.long)])  # a minute on a busy machine
@pytest.mark.parametrize("share", ["1", "0.29"])
def test_shared_workloads_pass_the_independent_checker(
        name: str, policy: str, share: str, tmp_path: Path) -> None:
    work, cluster = SHARED / f"{name}.jsonl", SHARED / f"cluster-{name}-{share}x.json"
    run = simulate(read_workload(work), read_cluster(cluster), make_placer(policy))
    run.write(tmp_path / "r.jsonl")
    check_records(work, cluster, tmp_path / "r.jsonl")
    assert faults(run, read_workload(work), read_cluster(cluster)) == []


class Restless:
    """A placer that resizes leases at random and starts them at any size, to test the
    invariants."""

    reserve, block_max = 0, 8
    name = "restless"

    def __init__(self, seed: int) -> None:
        self._rng, self._fcfs = random.Random(seed), Fcfs(4, strict=False)

    def place(self, view):
        placement = Placement()
        open_by_load(view, placement)
        if placement.openings:
            return placement
        rng, soon = self._rng, 0
        for lease in view.ledger.leases.values():
            action = view.ledger.actions[lease.action].action
            if lease.key != "cpu" or not action.resizable:
                continue
            node = view.nodes[lease.node]
            if view.now_ns >= lease.resizable_at:
                most = min(action.degrees[-1], lease.units + node.free_cpus)
                units = rng.randrange(most + 1)
                if units != lease.units:
                    node.free_cpus -= units - lease.units
                    placement.resizings.append(Resizing(lease.lease, units))
            at = max(view.now_ns, lease.resizable_at) + rng.randrange(1, 400_000_000)
            soon = min(soon, at) if soon else at
        walk = view.ledger.ready.walk(CPU)
        while (head := walk.head()) is not None:
            units = rng.randrange(head[1].degrees[-1] + 1) if head[1].resizable else (
                head[1].degrees[0])
            node = Finder(view).node(head[1], units)
            if node is None:
                walk.skip_shape()
                continue
            grant(view, placement, *head, node, units)
            walk.next()
        self._fcfs._services(view, placement)
        placement.again_at = soon or (view.now_ns + 50_000_000 if placement.grants else 0)
        return placement


@pytest.mark.parametrize("seed", range(12))
def test_random_resizing_violates_no_invariant(seed: int, tmp_path: Path) -> None:
    work, cluster = workload(seed, 14, ("cpu", "cpu", "service:judge")), Cluster.model_validate(
        CLUSTER)
    run = simulate(work, cluster, Restless(seed), check=True)
    assert run.figures()["resizes"] > 10
    assert faults(run, work, cluster) == []
    assert len(run.records) == sum(len(u.actions) for t in work.trajectories for u in t.turns)
    if SHARED.is_dir():
        w, c = write(work, CLUSTER, tmp_path)
        run.write(tmp_path / "r.jsonl")
        check_records(w, c, tmp_path / "r.jsonl")


@pytest.mark.parametrize("policy", ["first-fit", "fcfs:4", "fcfs:1", "static:4", "paper",
                                    "elastic"])
@pytest.mark.parametrize("seed", range(6))
def test_random_mixed_workloads_violate_no_invariant(
        seed: int, policy: str, tmp_path: Path) -> None:
    work = workload(seed, 16, ALL)
    if policy == "static:4":  # which deals single GPUs
        rows = [json.loads(t.model_dump_json().replace('"degrees":[2],', '"degrees":[1,2],'))
                for t in work.trajectories]
        work = Workload.model_validate({"name": work.name, "trajectories": rows})
    cluster = Cluster.model_validate(CLUSTER)
    run = simulate(work, cluster, make_placer(policy), check=True)
    assert faults(run, work, cluster) == []
    if SHARED.is_dir():
        w, c = write(work, CLUSTER, tmp_path)
        run.write(tmp_path / "r.jsonl")
        check_records(w, c, tmp_path / "r.jsonl")


def examples(out: Path, hash_seed: str) -> list[bytes]:
    """The records of the shipped example by five policies, from a process with this hash seed."""
    program = ("import sys\nfrom tangram_hpc.cli import main\n"
               "work, cluster, out, *policies = sys.argv[1:]\nfor policy in policies:\n"
               "    assert main(['sim', work, '--cluster', cluster, '--records',\n"
               "                 f'{out}/{policy}', '--seed', '3', '--policy', policy]) == 0")
    policies = ("first-fit", "fcfs:4", "static:2", "paper", "elastic")
    subprocess.run([sys.executable, "-c", program, EXAMPLES / "mixed-24.jsonl",
                    EXAMPLES / "cluster-24.json", out, *policies], check=True,
                   capture_output=True, env={**os.environ, "PYTHONHASHSEED": hash_seed})
    return [(out / policy).read_bytes() for policy in policies]


def test_one_seed_gives_the_same_records_for_any_hash_seed(tmp_path: Path) -> None:
    first = examples(tmp_path, "0")
    assert len(set(first)) == len(first)
    assert examples(tmp_path, "1") == examples(tmp_path, "77") == first


def test_tangram_sim_prints_figures_as_json_and_text(capsys: pytest.CaptureFixture) -> None:
    files = [str(EXAMPLES / "mixed-24.jsonl"), "--cluster", str(EXAMPLES / "cluster-24.json")]
    assert main(["sim", *files, "--policy", "fcfs:4", "--json", "--durations", "learned"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["durations"] == "learned" and told["actions"] > 50 and told["restores"] > 0
    assert main(["sim", *files, "--policy", "fcfs:4"]) == 0
    assert "mean_act_s" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "percentiles_s"), [
    (1, (1, 1, 1)), (10, (5, 10, 10)), (100, (50, 95, 99)), (101, (51, 96, 100))])
def test_percentiles_are_by_nearest_rank(count: int, percentiles_s: tuple[int, ...]) -> None:
    """The ACTs are 1, 2, 3, ... s: a percentile is the first ACT that at least so many percent of
    the actions do not exceed, as in `tangram acct --by`.
    """
    work = Workload.model_validate({"name": "steps", "trajectories": [
        {"trajectory": f"t{n}", "start_s": 0, "session": {"mem_mib": 1}, "turns": [
            {"think_s": 0, "actions": [
                {"name": "x", "resource": "cpu", "work_s": n, "degrees": [1]}]}]}
        for n in range(1, count + 1)]})
    figures = simulate(work, one_node(count), make_placer("fcfs:1")).figures()
    assert tuple(figures[f"p{q}_act_s"] for q in (50, 95, 99)) == percentiles_s


@pytest.mark.parametrize(("line", "told"), [
    ('{"trajectory": "a", "start_s": 0}', "line 2: turns: is missing"),
    ('{"trajectory": "a", "start_s": -1, "turns": []}', "line 2: start_s: .*greater"),
    ('{"trajectory": "a", "start_s": 0, "turns": [{"think_s": 0, "actions": [{"name": "x", '
     '"resource": "disk", "work_s": 1, "degrees": [1]}]}]}', r"turns.0.actions.0.resource"),
    ('{"trajectory": "a", "start_s": 0, "turns": [{"think_s": 0, "actions": [{"name": "x", '
     '"resource": "cpu", "work_s": 1, "degrees": [2, 1]}]}]}', "degrees: .*ascending"),
    ('{"trajectory": "a", "start_s": 1e300, "turns": []}', "line 2: start_s: .*less than"),
    ('{"trajectory": "a", "start_s": 0, "turns": [{"think_s": 0, "actions": [{"name": "x", '
     '"resource": "cpu", "work_s": 1e300, "degrees": [1]}]}]}', "work_s: .*less than"),
    ('{"trajectory": "a", "start_s": 0, "turns": [{"think_s": 0, "actions": [{"name": "x", '
     '"resource": "cpu", "work_s": 1, "degrees": [1, 10000000000000]}]}]}',
     "degrees.1: .*less than"),
    ("{", "line 2: .*JSON")])
def test_a_wrong_workload_is_refused_in_one_line(line: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"format": "tangram-workload/1", "name": "w"}\n' + line + "\n")
    with pytest.raises(InvalidInput, match=told) as error:
        read_workload(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("more", [{"gpus": 10**23}, {"cpus": 10**12}, {"count": 10**5,
                                                                      "cpus": 10**5}])
def test_a_cluster_that_is_too_large_is_refused_in_one_line(more: dict[str, int], tmp_path: Path
                                                            ) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"nodes": [{"name": "n", "cpus": 1, "mem_mib": 0, **more}]}))
    with pytest.raises(InvalidInput, match=r"cluster\.json: nodes\.0") as refused:
        read_cluster(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("more", [
    '"services": [{"name": "s", "restore_s": 1e300}]', '"services": [{"name": "s", "restore_s": '
    '1e999}]', '"endpoints": [{"name": "e", "concurrency": 1, "rate_per_s": 1e999}]',
    '"endpoints": [{"name": "e", "concurrency": 1, "burst": 1e999}]'])
def test_a_cluster_with_numbers_without_end_is_refused_in_one_line(more: str, tmp_path: Path
                                                                   ) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"nodes": [{"name": "n", "cpus": 1, "mem_mib": 0}], ' + more + "}")
    with pytest.raises(InvalidInput, match=r"cluster\.json: (services|endpoints)\.0\.") as refused:
        read_cluster(path)
    assert "\n" not in str(refused.value)


def test_a_name_may_hold_what_other_formats_take_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"format": "tangram-workload/1", "name": "w"}\n'
                    '{"trajectory": "a\u2028b\x85", "start_s": 0, "turns": []}\r\n')
    assert [t.trajectory for t in read_workload(path).trajectories] == ["a\u2028b\x85"]


@pytest.mark.parametrize(("words", "told"), [
    (["--fail", "n@-5"], "--fail 'n@-5': must be NODE@SECONDS"),
    (["--fail", "n@1+-2"], r"--fail 'n@1\+-2': must be NODE@SECONDS"),
    (["--fail", "n@nan"], "--fail 'n@nan': must be NODE@SECONDS"),
    (["--latency-us", "-5"], "--latency-us -5: must be from 0 to 60000000"),
    (["--latency-us", "1" * 30], "--latency-us 1+: must be from 0 to 60000000")])
def test_wrong_options_of_tangram_sim_are_refused_in_one_line(
        words: list[str], told: str, capsys: pytest.CaptureFixture) -> None:
    files = [str(EXAMPLES / "mixed-24.jsonl"), "--cluster", str(EXAMPLES / "cluster-24.json")]
    assert main(["sim", *files, "--policy", "fcfs:4", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(told, error), error


def test_other_wrong_simulator_input_is_refused_in_one_line(tmp_path: Path) -> None:
    work, cluster = write(workload(1, 3, ALL), CLUSTER, tmp_path)
    with pytest.raises(InvalidInput, match="No such file"):
        read_workload(tmp_path / "none")
    with pytest.raises(InvalidInput, match="first line must say"):
        read_workload(cluster)
    (tmp_path / "bad.json").write_text('{"nodes": [{"name": "c", "cpus": -1, "mem_mib": 1}]}')
    with pytest.raises(InvalidInput, match=r"nodes\.0\.cpus"):
        read_cluster(tmp_path / "bad.json")
    with pytest.raises(InvalidInput, match=r"no (service|endpoint)"):
        simulate(read_workload(work), one_node(8), make_placer("fcfs:1"))
    with pytest.raises(InvalidInput, match=r"cpus: .* asked for"):
        simulate(workload(1), one_node(1), make_placer("fcfs:1"))
    few = Cluster.model_validate(CLUSTER | {"nodes": [
        {"name": "c", "cpus": 12, "mem_mib": 900, "gpus": 1}]})
    with pytest.raises(InvalidInput, match="2 services want a GPU each"):
        simulate(workload(1, 3, ("cpu",)), few, make_placer("static"))


# for placers in order of arrival: another order may give one instant's actions other cores
@pytest.mark.parametrize("policy", ["first-fit", "fcfs:4", "static:4", "paper"])
@pytest.mark.parametrize("seed", range(4))
def test_drivers_and_frames_without_delay_change_nothing(seed: int, policy: str) -> None:
    work, cluster = workload(seed, 12), Cluster.model_validate(CLUSTER)
    alone = simulate(work, cluster, make_placer(policy))
    wired = simulate(work, cluster, make_placer(policy), latency_us=0, check=True)
    assert [r.line() for r in wired.records] == [r.line() for r in alone.records]


@pytest.mark.parametrize("policy", ["first-fit", "fcfs:4", "static:4", "paper", "elastic"])
def test_a_slow_network_changes_the_act_reproducibly(policy: str, tmp_path: Path) -> None:
    work, cluster = workload(5, 12), Cluster.model_validate(CLUSTER)
    runs = [simulate(work, cluster, make_placer(policy), latency_us=us, seed=9, check=True)
            for us in (100, 100, 2000)]
    assert [r.line() for r in runs[0].records] == [r.line() for r in runs[1].records]
    fast, slow = (run.figures() for run in (runs[0], runs[2]))
    assert fast["actions"] == slow["actions"] and fast["mean_act_s"] != slow["mean_act_s"]
    if SHARED.is_dir():
        w, c = write(work, CLUSTER, tmp_path)
        runs[2].write(tmp_path / "r.jsonl")
        check_records(w, c, tmp_path / "r.jsonl", "--live")


def test_the_checker_finds_each_kind_of_broken_record() -> None:
    work, cluster = workload(3, 10, ALL), Cluster.model_validate(CLUSTER)

    def broken(change) -> str:
        run = simulate(work, cluster, make_placer("first-fit"))
        change(run.records)
        return "; ".join(faults(run, work, cluster))

    def of(records, kind: str, most: bool = False):
        found = [r for r in records if r.action.resource.startswith(kind)]
        return max(found, key=lambda r: r.end - r.start) if most else found[-1]

    def late(records) -> None:
        of(records, "cpu").end += 1

    def elsewhere(records) -> None:
        of(records, "service").restore += 10**9

    def twice(records) -> None:
        one = of(records, "cpu", True)
        for r in records:
            if r.action.resource == "cpu":
                r.node, r.grants = one.node, [(r.start, r.grants[0][1], tuple(
                    range(r.grants[0][1])))]

    def crowd(records) -> None:
        for r in records:
            if r.action.resource.startswith("endpoint"):
                r.start, r.end = 0, 10**9

    assert broken(lambda records: None) == ""
    assert "ns, not" in broken(late)
    assert "restore of" in broken(elsewhere)
    assert "is lent twice" in broken(twice)
    assert "at once" in broken(crowd) and "no token" in broken(crowd)
    assert "no record" in broken(lambda records: records.pop())


@pytest.mark.parametrize("policy", ["first-fit", "fcfs:4", "static:4", "paper", "elastic"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("latency_us", [0, 700])
def test_a_node_that_dies_loses_no_action(seed: int, policy: str, latency_us: int, tmp_path: Path
                                          ) -> None:
    # plenty of memory: the shared checker takes a sandbox that was lost and opened again on the
    # same node for one that stood all the time
    rich = CLUSTER | {"nodes": [n | {"mem_mib": 10**5} for n in CLUSTER["nodes"]]}
    work, cluster = workload(seed, 14, ALL), Cluster.model_validate(rich)
    if policy == "static:4":
        work = workload(seed, 14)
    failures = [Failure("c0", 10**9, 2 * 10**9), Failure("g", 2 * 10**9, 10**8),
                Failure("c1", 3 * 10**9)]
    if policy in ("paper", "elastic"):  # a call that comes while no GPU is up is refused
        failures[1] = Failure("c0", 4 * 10**9, 10**8)
    run = simulate(work, cluster, make_placer(policy), latency_us=latency_us, failures=failures,
                   check=True)
    again = simulate(work, cluster, make_placer(policy), latency_us=latency_us, failures=failures)
    assert [r.line() for r in run.records] == [r.line() for r in again.records]
    assert {r.state for r in run.records} == {"COMPLETED", "NODE_FAIL"}
    assert any(r.migrated for r in run.records)
    if not latency_us:
        assert faults(run, work, cluster) == []
    if SHARED.is_dir():
        w, c = write(work, rich, tmp_path)
        run.write(tmp_path / "r.jsonl")
        check_records(w, c, tmp_path / "r.jsonl", "--live")


class Waiting:
    """A placer that starts nothing and always wants to be asked again."""

    name, reserve, block_max = "waiting", 0, 8

    def place(self, view):
        return Placement(again_at=view.now_ns + 20_000_000)


@pytest.mark.parametrize("latency_us", [None, 0])
def test_a_simulation_that_cannot_end_is_reported(latency_us: int | None) -> None:
    placer = Waiting() if latency_us is None else make_placer("fcfs:4")
    failures = [] if latency_us is None else [Failure("c", 10**8)]
    with pytest.raises(InvalidInput, match="3 trajectories never end"):
        simulate(workload(1, 3), one_node(8), placer, latency_us=latency_us, failures=failures)
    with pytest.raises(InvalidInput, match="no such node"):
        simulate(workload(1, 3), one_node(8), make_placer("fcfs:4"), failures=[Failure("x", 1)])


@pytest.mark.parametrize("latency_us", [None, 0])
def test_a_trajectory_that_ends_by_thinking_gives_its_reservation_back(latency_us: int | None
                                                                      ) -> None:
    turns = [{"think_s": 1, "actions": [{"name": "a", "resource": "cpu", "work_s": 1,
                                         "degrees": [1]}]}, {"think_s": 2, "actions": []}]
    work = Workload.model_validate({"name": "w", "trajectories": [
        {"trajectory": f"t{n}", "start_s": 0, "turns": turns} for n in range(3)]})
    run = simulate(work, one_node(4), make_placer("static:4"), latency_us=latency_us)
    assert run.figures()["step_s"] == pytest.approx(12)  # one after another, 4 s each


def test_a_simulation_of_30_hours_ends() -> None:
    rows = [{"trajectory": "t", "start_s": 9000, "turns": [{"think_s": 9000, "actions": [
        {"name": "x", "resource": "cpu", "work_s": 90000, "degrees": [1]}]}]}]
    work = Workload.model_validate({"name": "long", "trajectories": rows})
    for latency_us in (None, 0):
        run = simulate(work, one_node(1), make_placer("fcfs:1"), latency_us=latency_us)
        assert run.figures()["step_s"] == 108000
