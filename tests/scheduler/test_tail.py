"""What the TAIL of `elastic` does: long actions count more, and the mean pays for that."""

from __future__ import annotations

import random
from fractions import Fraction
from functools import cache

import pytest
from helpers.builders import World, started

from tangram_hpc.domain.action import Profile
from tangram_hpc.errors import InvalidInput
from tangram_hpc.scheduler.placement.placers.cpus.cpu_division import weight
from tangram_hpc.scheduler.placement.placers.placer_name import (
    TAIL,
    TAIL_MAX,
    parse_placer_name,
)
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.placement.placers.waiting import AGED_NS, OVERDUE_NS
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, Workload

SECOND = 1_000_000_000


def test_a_weight_is_the_fourth_root_of_a_power_of_the_completion_time() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        tail = rng.randrange(1, TAIL_MAX + 1)
        left, scale, age = (round(10 ** rng.uniform(6, 14)) for _ in range(3))
        of, other = (Fraction((a + left // 2 + scale) ** tail, left + scale) for a in (age, 0))
        got = Fraction(weight(left, scale, age, tail), weight(left, scale, 0, tail))
        assert got ** 4 == pytest.approx(of / other, rel=0.02)


def test_without_a_tail_the_time_since_its_submission_does_not_count() -> None:
    assert weight(SECOND, SECOND, 10**12, 0) == weight(SECOND, SECOND)


def test_the_name_says_the_tail() -> None:
    assert parse_placer_name("elastic") == ("elastic", TAIL)
    assert make_placer(f"elastic:{TAIL}").name == "elastic"
    assert make_placer("elastic:6").name == "elastic:6"


@pytest.mark.parametrize("name", ["elastic:", "elastic:-1", f"elastic:{TAIL_MAX + 1}",
                                  "elastic:10", "elastic:x"])
def test_a_wrong_tail_is_refused_with_the_bounds(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"from 0, .* to {TAIL_MAX}, .*elastic:{TAIL}"):
        parse_placer_name(name)


@pytest.mark.parametrize("tail", range(TAIL_MAX + 1))
def test_a_clock_that_was_set_back_changes_no_weight(tail: int) -> None:
    """As after a restart of the broker on a node whose clock is behind that of its journal."""
    placed = []
    for back in (0, 3600 * SECOND):
        world = World(f"elastic:{tail}")
        world.node(4)
        for work in (1, 8):
            world.submit((1, 2, 4), profile=Profile(work * SECOND, 0))
        world.now -= back
        world.plan()
        placed.append([lease.units for lease in world.ledger.leases.values()])
    assert placed[0] == placed[1] != []


@pytest.mark.parametrize(("placer", "first"), [("elastic:3", True), ("elastic:0", False)])
def test_an_action_that_has_waited_comes_first(placer: str, first: bool) -> None:
    world = World(placer)
    world.node(1)
    running = world.submit(1)
    world.plan()
    long = world.submit(1, profile=Profile(10**13))
    world.now += AGED_NS
    short = world.submit(1, profile=Profile(10**6))
    world.finish(running)
    assert started(world.plan()) == [long if first else short]


@pytest.mark.parametrize(("placer", "at_once"), [("elastic:3", False), ("elastic:0", True)])
def test_a_long_action_keeps_its_units_until_another_one_is_overdue(placer: str, at_once: bool
                                                                   ) -> None:
    world = World(placer)
    world.node(2)
    old = world.submit((1, 2), profile=Profile(10**14))
    assert started(world.plan()) == [old]
    world.now += 3600 * SECOND
    short = world.submit(1, profile=Profile(SECOND))
    assert started(world.plan()) == [short] * at_once
    world.now += OVERDUE_NS - 3  # each plan takes 1 ns
    assert started(world.plan()) == []
    assert started(world.plan()) == [short] * (not at_once)


def overload(seed: int) -> Workload:
    """Short commands of one core, and builds that could use five times the cores of `NODE`."""
    rng = random.Random(seed)

    def action() -> dict[str, object]:
        if rng.random() < 0.7:
            return {"name": "shell", "resource": "cpu", "degrees": [1],
                    "work_s": round(rng.lognormvariate(-0.7, 0.7), 4)}
        return {"name": "build", "resource": "cpu", "degrees": [1, 2, 4, 8, 16],
                "work_s": round(20 * rng.lognormvariate(0, 0.8), 4),
                "serial": round(rng.uniform(0.02, 0.2), 3)}

    return Workload.model_validate({"name": "overload", "trajectories": [
        {"trajectory": f"t{n}", "start_s": round(rng.uniform(0, 3), 3), "session": {"mem_mib": 64},
         "turns": [{"think_s": round(rng.expovariate(1 / 3), 3), "actions": [action()]}
                   for _ in range(8)]} for n in range(40)]})


NODE = Cluster.model_validate({"nodes": [{"name": "c", "cpus": 16, "mem_mib": 1 << 20}]})
SEEDS = (1, 2)


@cache
def figures(placer: str, seed: int) -> dict[str, float]:
    """The figures of one run; durations are learned."""
    return simulate(overload(seed), NODE, make_placer(placer), "learned").figures()


def over_seeds(placer: str, key: str) -> float:
    """A figure added up over the seeds."""
    return sum(figures(placer, seed)[key] for seed in SEEDS)


def test_a_longer_tail_pays_for_the_mean_and_the_reverse() -> None:
    order = ("elastic:0", "elastic:3", "elastic:6")
    means = [over_seeds(placer, "mean_act_s") for placer in order]
    tails = [over_seeds(placer, "p99_act_s") for placer in order]
    assert means == sorted(means) and tails == sorted(tails, reverse=True)
    assert tails[1] < 0.85 * tails[0]


def test_a_moderate_tail_is_no_worse_than_simple_rules_by_the_mean() -> None:
    simple = min(over_seeds(f"fcfs:{k}", "mean_act_s") for k in (1, 2, 4))
    assert over_seeds("elastic:3", "mean_act_s") <= 1.1 * simple
