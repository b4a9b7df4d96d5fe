"""Actions that keep their size start on one that suits the load."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from helpers.builders import World, started

from tangram_hpc.domain.action import Profile
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.placement.placers.rigid_sizes import (
    NodeLoad,
    best_size,
    sizes_to_start,
)
from tangram_hpc.scheduler.state.speed import run_ns
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, Workload

DEGREES = (1, 2, 4, 8, 16)
SECOND = 1_000_000_000


def cost(degree: int, serial: int, load: NodeLoad) -> Fraction:
    """The cost of a degree as the module defines it, in fractions."""
    run = Fraction(serial, 1000) + Fraction(1000 - serial, 1000) / degree
    used = Fraction(min(load.cpus, load.held + load.waiting), load.cpus)
    return run * (1 + degree * Fraction(load.present, load.cpus) * used ** 2)


def drawn(rng: random.Random) -> NodeLoad:
    cpus = rng.choice((1, 3, 16, 96, 1000))
    held = rng.randrange(cpus + 1)
    waiting = rng.choice((0, 1, 5, 400))
    return NodeLoad(cpus, held, rng.randrange(cpus + 1), waiting + rng.randrange(held + 1), waiting,
                    0)


def test_the_best_size_has_the_least_cost() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        load, serial = drawn(rng), rng.randrange(1001)
        degrees = tuple(sorted(rng.sample(range(1, 65), rng.randrange(1, 6))))
        best = best_size(degrees, serial, load)
        least = min(cost(d, serial, load) for d in degrees)
        assert cost(best, serial, load) <= least * Fraction(10001, 10000)  # whole numbers round


def test_the_more_actions_there_are_the_smaller_is_the_size() -> None:
    sizes = [best_size(DEGREES, 100, NodeLoad(96, 96, 0, present, 0, 0))
             for present in (1, 10, 50, 200, 1000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 16 and sizes[-1] == 1


def test_on_an_idle_node_an_action_gets_its_largest_size() -> None:
    assert best_size(DEGREES, 200, NodeLoad(256, 0, 256, 1, 1, 0)) == 16


def test_an_action_waits_for_a_good_size_only_while_that_pays() -> None:
    load = NodeLoad(16, 14, 2, 2, 1, 0)
    best = best_size(DEGREES, 0, load)
    assert best == 16
    good, lasts = sizes_to_start(DEGREES, 0, 16 * SECOND, load, 0)
    assert good == (8, 16)
    assert lasts == run_ns(16 * SECOND, 0, 2) - run_ns(16 * SECOND, 0, 8) == 6 * SECOND
    assert sizes_to_start(DEGREES, 0, 16 * SECOND, load, 2 * SECOND)[1] == 4 * SECOND
    assert sizes_to_start(DEGREES, 0, 16 * SECOND, load, 6 * SECOND) == (DEGREES, 0)
    assert sizes_to_start(DEGREES, 0, 16 * SECOND, load._replace(room=8), 0) == ((8, 16), 0)


def test_no_action_is_left_without_a_size() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        load, serial = drawn(rng), rng.randrange(1001)
        degrees = tuple(sorted(rng.sample(range(1, 65), rng.randrange(1, 6))))
        for ready in (0, rng.randrange(100 * SECOND), 10 ** 6 * SECOND):
            sizes, lasts = sizes_to_start(degrees, serial, rng.randrange(1, 99 * SECOND), load,
                                          ready)
            assert sizes and set(sizes) <= set(degrees) and lasts >= 0
        # whoever has waited for long enough may start on whatever fits
        assert lasts == 0 and (sizes[0] <= load.room or degrees[0] > load.room)


def test_beside_an_action_that_stays_another_one_starts_on_the_rest() -> None:
    """The units of the first do not come free; the second waits as long as it pays, and no more."""
    world = World("elastic", now=SECOND)
    world.node(cpus=16)

    def submit(degrees: tuple[int, ...], work_s: int) -> int:
        return world.submit(degrees, resizable=False, profile=Profile(work_s * SECOND, 0))

    first = submit((12,), 10_000)
    assert started(world.plan()) == [first]
    second = submit(DEGREES, 16)
    began = world.now
    assert started(world.plan()) == []
    # 16 s of work take 4 s on the 4 units that are left, and 2 s on 8
    assert world.scheduler.next_deadline() - began == pytest.approx(2 * SECOND, abs=100)
    world.now = world.scheduler.next_deadline()
    assert started(world.plan()) == [second]
    assert len(world.ledger.leases[world.lease_of(second)].cores) == 4


def rigid(seed: int) -> Workload:
    """Short commands of one core, and builds that keep their size."""
    rng = random.Random(seed)

    def drawn_action() -> dict[str, object]:
        if rng.random() < 0.7:
            return {"name": "shell", "resource": "cpu", "degrees": [1],
                    "work_s": round(rng.lognormvariate(-0.7, 0.7), 4)}
        return {"name": "build", "resource": "cpu", "degrees": list(DEGREES), "resize": False,
                "work_s": round(20 * rng.lognormvariate(0, 0.8), 4),
                "serial": round(rng.uniform(0.02, 0.2), 3)}

    return Workload.model_validate({"name": "rigid", "trajectories": [
        {"trajectory": f"t{n}", "start_s": round(rng.uniform(0, 3), 3), "session": {"mem_mib": 64},
         "turns": [{"think_s": round(rng.expovariate(1 / 3), 3), "actions": [drawn_action()]}
                   for _ in range(6)]} for n in range(40)]})


@pytest.mark.parametrize("cpus", [24, 64, 160])
def test_rigid_actions_end_no_later_than_by_the_best_simple_rule(cpus: int) -> None:
    """Simulated, with durations that are learned; each rule lends K CPUs to each action."""
    cluster = Cluster.model_validate({"nodes": [{"name": "c", "cpus": cpus, "mem_mib": 1 << 20}]})

    def played(placer: str) -> tuple[float, float]:
        told = simulate(rigid(101), cluster, make_placer(placer), "learned").figures()
        return told["mean_act_s"], told["step_s"]

    best = min(played(f"fcfs:{k}") for k in DEGREES)
    ours = played("elastic")
    assert ours[0] <= 1.1 * best[0] and ours[1] <= 1.4 * best[1], (ours, best)
