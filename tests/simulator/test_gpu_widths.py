"""How wide `elastic` makes the copies of GPU services where the load is low, and how it makes them
narrow again when the load rises.

Each load is also run with calls of one width only: then no rule decides on the width.
"""

from __future__ import annotations

import random

import pytest

from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.state.demand import ONE, Calls
from tangram_hpc.scheduler.state.speed import run_ns
from tangram_hpc.simulator.checkers import faults
from tangram_hpc.simulator.run_records import RunRecords
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, Workload

S = 10**9
ANY = (1, 2, 4, 8)


def load(seed: int, services: int, calls: int, every_s: float, degrees: tuple[int, ...],
         serial: float = 0.05) -> Workload:
    """Calls of about 2 s on one GPU, at random times, on average one `every_s` seconds."""
    rng = random.Random(seed)
    return Workload.model_validate({"name": "low", "trajectories": [
        {"trajectory": f"t{i}", "start_s": rng.uniform(0, calls * every_s), "turns": [{
            "think_s": 0, "actions": [{
                "name": f"s{i % services}", "resource": f"service:s{i % services}",
                "work_s": 2 * rng.lognormvariate(-.245, .7), "degrees": degrees,
                "serial": serial}]}]} for i in range(calls)]})


def cluster(services: int, gpus: int, restore_s: float) -> Cluster:
    return Cluster.model_validate({
        "nodes": [{"name": "g", "cpus": 1, "mem_mib": 100, "gpus": gpus}],
        "services": [{"name": f"s{n}", "restore_s": restore_s} for n in range(services)]})


def mean_s(work: Workload, where: Cluster, durations: str) -> float:
    run = simulate(work, where, make_placer("elastic"), durations)
    assert faults(run, work, where) == []
    return float(run.figures()["mean_act_s"])


@pytest.mark.parametrize("durations", ["oracle", "learned"])
@pytest.mark.parametrize(("services", "gpus", "every_s", "restore_s", "fair"), [
    (1, 8, 5.0, 30.0, 4),  # half of all GPUs
    (2, 8, 5.0, 20.0, 4),  # an even part of them
    (4, 8, 5.0, 30.0, 2)])
def test_a_copy_takes_its_even_part_of_idle_gpus_though_a_restore_is_long(
        services: int, gpus: int, every_s: float, restore_s: float, fair: int,
        durations: str) -> None:
    """A narrow copy would serve each call for longer, and would not pay a second restore."""
    where = cluster(services, gpus, restore_s)
    of_any, of_part = (mean_s(load(1, services, 200, every_s, degrees), where, durations)
                       for degrees in (ANY, (fair,)))
    assert of_any <= 1.1 * of_part


@pytest.mark.parametrize("durations", ["oracle", "learned"])
@pytest.mark.parametrize(("services", "gpus", "every_s"), [(12, 4, 2.5), (6, 8, 1.5), (12, 8, 3.0)])
def test_more_services_than_fit_take_turns_on_wide_blocks_if_a_restore_is_short(
        services: int, gpus: int, every_s: float, durations: str) -> None:
    """A call of 2 s gains more by 4 GPUs than a restore of 0.3 s costs."""
    where = cluster(services, gpus, 0.3)
    of_any, wide, narrow = (mean_s(load(2, services, 300, every_s, degrees), where, durations)
                            for degrees in (ANY, (4,), (1,)))
    assert of_any <= 1.2 * wide < narrow


@pytest.mark.parametrize("durations", ["oracle", "learned"])
def test_services_whose_restores_are_long_do_not_take_turns(durations: str) -> None:
    """Six services on eight GPUs: on wide blocks nearly each call would wait for a restore."""
    work, where = load(3, 6, 300, 1.5, ANY), cluster(6, 8, 10.0)
    run = simulate(work, where, make_placer("elastic"), durations)
    assert sum(1 for record in run.records if record.restore) <= 2 * 6


def test_a_load_that_rises_makes_a_wide_copy_narrow_at_once() -> None:
    """On half of the width a copy would still be too slow, and would soon be restored again."""
    first = load(4, 1, 20, 10.0, ANY, serial=0.3)
    rest = load(5, 1, 400, 0.35, ANY, serial=0.3)
    later = tuple(one.model_copy(update={"trajectory": f"l{n}", "start_s": 200 + one.start_s})
                  for n, one in enumerate(rest.trajectories))
    work = Workload(name="rises", trajectories=(*first.trajectories, *later))
    run: RunRecords = simulate(work, cluster(1, 8, 5.0), make_placer("elastic"), "learned")
    brought = [record for record in sorted(run.records, key=lambda r: r.start) if record.restore]
    widths = [len(record.gpus) for record in brought]
    assert widths[0] == 4
    assert next(width for width in widths if width < 4) == 1


def calls_of(work_ns: int, restore_ns: int = S) -> Calls:
    return Calls(4 * restore_ns, 1, 0, work_ns)


@pytest.mark.parametrize("windows", [0.2, 0.5, 1, 2, 5])
def test_a_steady_load_is_seen_before_its_window_has_passed(windows: float) -> None:
    calls, now, every = calls_of(5 * S), 10**15, S
    calls.came(now, 0, 5 * S)
    window = calls.window
    assert window == 40 * S
    for _ in range(round(windows * window / every)):
        now += every
        calls.came(now, 0, 5 * S)
    seen = calls.in_window(now, scaled=True) / ONE
    assert seen == pytest.approx(window / every, rel=0.25)
    if windows <= 1:
        assert calls.in_window(now, scaled=False) / ONE < 0.7 * window / every


def test_one_call_that_runs_for_long_is_not_a_load() -> None:
    """It runs for longer than a horizon, in which no other call comes."""
    calls, now = calls_of(60 * S), 10**15
    calls.came(now, 0, 60 * S)
    assert calls.window == 8 * run_ns(60 * S, 0, 1) > calls.horizon
    busy = calls.in_window(now + calls.window, scaled=True) / ONE * 60 * S / calls.window
    assert busy < 0.2


def test_the_window_follows_what_is_learned_of_the_calls() -> None:
    calls, now = calls_of(S), 10**15
    for _ in range(60):
        now += S
        calls.came(now, 0, 30 * S)
    assert 220 * S < calls.window <= 240 * S
    for _ in range(90):
        now += S
        calls.came(now, 0, S // 10)
    assert calls.window == calls.horizon == 4 * S
