"""How wide `elastic` makes the copies of GPU services where the load is low, and how it makes them
narrow again when the load rises. To compare, a load is run again with calls of one width only: then
no rule decides on the width.
"""

from __future__ import annotations

import random

import pytest

from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.checkers import faults
from tangram_hpc.simulator.run_records import RunRecords
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, Workload

ANY = (1, 2, 4, 8)


def load(seed: int, services: int, calls: int, every_s: float, degrees: tuple[int, ...],
         serial: float = 0.05, run_s: float = 2.0) -> Workload:
    """Calls of about `run_s` on one GPU, at random times, on average one every `every_s` seconds.
    """
    rng = random.Random(seed)
    return Workload.model_validate({"name": "low", "trajectories": [
        {"trajectory": f"t{i}", "start_s": rng.uniform(0, calls * every_s), "turns": [{
            "think_s": 0, "actions": [{
                "name": f"s{i % services}", "resource": f"service:s{i % services}",
                "work_s": run_s * rng.lognormvariate(-.245, .7), "degrees": degrees,
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
@pytest.mark.parametrize(("services", "gpus", "every_s", "restore_s"), [
    (12, 4, 2.5, 0.3), (6, 8, 1.5, 0.3), (12, 8, 3.0, 0.3), (12, 4, 8.0, 1.2)])
def test_more_services_than_fit_take_turns_on_wide_blocks_if_a_restore_is_short(
        services: int, gpus: int, every_s: float, restore_s: float, durations: str) -> None:
    """A call of 2 s gains more by 4 GPUs than a restore costs."""
    where = cluster(services, gpus, restore_s)
    of_any, wide, narrow = (mean_s(load(2, services, 300, every_s, degrees), where, durations)
                            for degrees in (ANY, (4,), (1,)))
    assert of_any <= 1.2 * wide < narrow


@pytest.mark.parametrize("durations", ["oracle", "learned"])
@pytest.mark.parametrize(("services", "gpus", "every_s", "restore_s"), [
    (8, 8, 5.0, 10.0),  # a call gains less by the width than it waits for its service
    (12, 4, 1.5, 1.0)])  # with a restore for each call the GPUs would be overloaded
def test_services_do_not_take_turns_if_that_costs_more(
        services: int, gpus: int, every_s: float, restore_s: float, durations: str) -> None:
    where = cluster(services, gpus, restore_s)
    of_any, narrow = (mean_s(load(3, services, 300, every_s, degrees), where, durations)
                      for degrees in (ANY, (1,)))
    assert of_any <= 1.2 * narrow


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


def test_wide_copies_do_not_stay_if_the_load_exceeds_them() -> None:
    """What is learned of the serial fraction comes late, so that narrow copies seem to gain little.
    """
    of_any, narrow = (mean_s(load(7, 1, 1000, 20 / (0.85 * 8), degrees, 0.5, 20.0),
                             cluster(1, 8, 15.0), "learned") for degrees in ((1, 2), (1,)))
    assert of_any <= 1.5 * narrow
