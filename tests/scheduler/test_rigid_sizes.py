"""Actions that keep their size start on one that suits the load."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from helpers.builders import World, started

from tangram_hpc.domain.action import Profile
from tangram_hpc.scheduler.placement.placers.cpus.cpu_division import WaitingCandidate, divide_cpus
from tangram_hpc.scheduler.placement.placers.cpus.rigid_sizes import (
    NodeLoad,
    good_sizes,
    sizes_to_start,
)
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.placement.placers.waiting import OVERDUE_NS
from tangram_hpc.scheduler.state.speed import run_ns, speed_gains
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, Workload

DEGREES = (1, 2, 4, 8, 16)
SECOND = 1_000_000_000


def cost(degree: int, serial: int, load: NodeLoad) -> Fraction:
    """The cost of a degree as the module defines it, in fractions."""
    run = Fraction(serial, 1000) + Fraction(1000 - serial, 1000) / degree
    used = Fraction(min(load.cpus, load.cpus - load.free + load.waiting), load.cpus)
    return run * (1 + degree * max(load.present * used ** 2, Fraction(1, 4)) / load.cpus)


def drawn(rng: random.Random) -> NodeLoad:
    cpus = rng.choice((1, 3, 16, 96, 1000))
    free = rng.randrange(cpus + 1)
    waiting = rng.choice((0, 1, 5, 400))
    return NodeLoad(cpus, free, waiting + rng.randrange(cpus - free + 1), waiting)


def best_size(degrees: tuple[int, ...], serial: int, load: NodeLoad) -> int:
    """The best of the sizes that are good enough."""
    return good_sizes(degrees, serial, load)[-1]


def test_the_best_size_has_the_least_cost_and_half_of_it_is_good_at_little_more() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        load, serial = drawn(rng), rng.randrange(1001)
        degrees = tuple(sorted(rng.sample(range(1, 65), rng.randrange(1, 6))))
        *_, best = good = good_sizes(degrees, serial, load)
        costs = {d: cost(d, serial, load) for d in degrees}
        most = Fraction(3, 2) * min(costs.values())
        more = Fraction(10001, 10000)  # whole numbers round
        assert costs[best] <= min(costs.values()) * more
        assert all(costs[d] <= most * more and d <= best <= 2 * d for d in good)
        assert all(costs[d] > most / more for d in degrees if d < best <= 2 * d and d not in good)


def test_the_more_actions_there_are_the_smaller_is_the_size() -> None:
    sizes = [best_size(DEGREES, 100, NodeLoad(96, 0, present, 0))
             for present in (1, 10, 50, 200, 1000)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 16 and sizes[-1] == 1


def test_on_an_idle_node_an_action_gets_its_largest_size() -> None:
    assert best_size(DEGREES, 200, NodeLoad(256, 256, 1, 1)) == 16


def test_an_action_leaves_others_the_units_that_would_add_little_to_its_speed() -> None:
    idle = NodeLoad(8, 8, 1, 1)
    assert best_size((1, 2, 4, 8), 600, idle) == 4, "eight would make it 7 % faster"
    assert best_size((1, 2, 4, 8), 300, idle) == 8, "eight make it 18 % faster"


@pytest.mark.parametrize("free", range(8, 33))
def test_units_that_no_degree_takes_raise_other_actions_to_their_next_degree(free: int) -> None:
    alike = [WaitingCandidate(n, (2, 4, 8), True, speed_gains(20, 8), 1 << 20, False)
             for n in range(4)]
    sizes = [units for _, units in divide_cpus(free, [], alike)[1]]
    left = free - sum(sizes)
    assert len(sizes) == 4 and set(sizes) <= {2, 4, 8} and left >= 0
    assert all(units == 8 or units > left for units in sizes), "a further step takes as many again"


def test_an_action_waits_for_a_good_size_only_while_that_pays() -> None:
    load = NodeLoad(16, 2, 2, 1)
    good, lasts = sizes_to_start(DEGREES, 0, 16 * SECOND, load, 0)
    assert good == (8, 16), "eight cost a third more"
    assert lasts == run_ns(16 * SECOND, 0, 2) - run_ns(16 * SECOND, 0, 8) == 6 * SECOND
    assert sizes_to_start(DEGREES, 0, 16 * SECOND, load, 2 * SECOND)[1] == 4 * SECOND
    assert sizes_to_start(DEGREES, 0, 16 * SECOND, load, 6 * SECOND) == (DEGREES, 0)
    busy = load._replace(free=8, present=6, waiting=5)
    assert sizes_to_start(DEGREES, 0, 16 * SECOND, busy, 0) == ((8, 16), 0)
    idle = NodeLoad(16, 16, 1, 1)
    assert sizes_to_start(DEGREES, 0, 16 * SECOND, idle, 0)[0] == (16,), "eight cost 1.8 times that"
    assert sizes_to_start(DEGREES, 0, 16 * SECOND, idle, 0, idle)[0] == (8, 16)
    assert sizes_to_start(DEGREES, 0, 9999 * SECOND, load, 0)[1] == OVERDUE_NS


def test_no_action_is_left_without_a_size() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        load, serial = drawn(rng), rng.randrange(1001)
        degrees = tuple(sorted(rng.sample(range(1, 65), rng.randrange(1, 6))))
        work = rng.randrange(1, 99 * SECOND)
        for waited in (0, rng.randrange(OVERDUE_NS)):
            sizes, lasts = sizes_to_start(degrees, serial, work, load, waited)
            assert sizes and set(sizes) <= set(degrees) and 0 <= lasts <= OVERDUE_NS - waited
        sizes, lasts = sizes_to_start(degrees, serial, work, load, OVERDUE_NS)
        assert lasts == 0 and (sizes[0] == degrees[0] or sizes[0] <= load.free)


def test_two_equal_actions_run_one_after_the_other_on_an_idle_node() -> None:
    world = World("elastic", now=SECOND)
    world.node(cpus=8)
    both = [world.submit((2, 4, 8), resizable=False, profile=Profile(8 * SECOND))
            for _ in range(2)]
    for each in both:
        assert started(world.plan()) == [each]
        assert len(world.ledger.leases[world.lease_of(each)].cores) == 8
        world.now += SECOND
        world.finish(each)


class Beside:
    """A node of 16 CPUs, on which a rigid action of 16 s waits beside others that stay."""

    def __init__(self, degrees: tuple[int, ...], work_s: int, **kept: bool) -> None:
        self.world = world = World("elastic", now=SECOND)
        world.node(cpus=16)
        others = [self.submit(degrees, work_s, **kept) for _ in range(16 // degrees[-1])]
        assert sorted(started(world.plan())) == sorted(others)

    def submit(self, degrees: tuple[int, ...], work_s: float, resizable: bool = False) -> int:
        return self.world.submit(degrees, resizable=resizable,
                                 profile=Profile(round(work_s * SECOND), 0))

    def start_of(self, action: int, limit_s: int, every_s: float = 0.0) -> tuple[float, int]:
        """When an action starts, in seconds from now, and on how many CPUs. Meanwhile a command of
        one core and one second comes each `every_s` seconds, if that is given.
        """
        world = self.world
        began, commands, ends = world.now, 0, list[tuple[int, int]]()
        while world.now - began <= limit_s * SECOND:
            fresh = started(world.plan())
            if action in fresh:
                lease = world.ledger.leases[world.lease_of(action)]
                return (world.now - began) / SECOND, len(lease.cores)
            ends += [(world.now + SECOND, each) for each in fresh]
            world.now = min([world.scheduler.next_deadline() or 1 << 62, *(at for at, _ in ends),
                             *([began + round(commands * every_s * SECOND)] if every_s else [])])
            for at, each in [end for end in ends if end[0] <= world.now]:
                ends.remove((at, each))
                world.finish(each)
            if every_s and world.now >= began + round(commands * every_s * SECOND):
                commands += 1
                self.submit((1,), 1.0)
        raise AssertionError("it did not start")


def test_beside_an_action_that_stays_another_one_starts_on_the_rest() -> None:
    """The units of the first do not come free; the second waits as long as it pays, and no more."""
    beside = Beside((12,), 10_000)
    began, cpus = beside.start_of(beside.submit(DEGREES, 16), 30)
    # 16 s of work take 4 s on the 4 units that are left, and 2 s on 8
    assert cpus == 4 and began == pytest.approx(2.0, abs=0.01)


def test_a_long_action_that_waits_for_its_size_holds_up_nobody_for_more_than_the_bound() -> None:
    beside = Beside((9,), 36_000)
    wide = beside.submit(DEGREES, 8 * 3600)
    began = beside.world.now
    assert started(beside.world.plan()) == []
    behind = beside.submit((1,), 0.1)
    assert beside.start_of(behind, 30) is not None
    assert (beside.world.now - began) / SECOND <= 20.1
    beside.world.finish(behind)
    if beside.world.ledger.actions[wide].lease == 0:
        beside.start_of(wide, 30)
    assert (beside.world.now - began) / SECOND <= 20.1


def test_short_commands_that_keep_coming_do_not_prolong_the_wait_for_a_size() -> None:
    beside = Beside((12,), 10_000)
    began, cpus = beside.start_of(beside.submit(DEGREES, 16), 60, every_s=0.5)
    assert began <= 8 and cpus >= 1


def test_resizable_actions_that_keep_their_units_delay_a_rigid_one_no_longer_than_it_pays() -> None:
    beside = Beside((1, 2, 4), 3600, resizable=True)
    began, cpus = beside.start_of(beside.submit(DEGREES, 2), 30)
    assert began <= 2 and cpus >= 1


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
def test_rigid_actions_end_about_as_soon_as_by_the_best_simple_rule(cpus: int) -> None:
    """Simulated, with durations that are learned; each rule lends K CPUs to each action."""
    cluster = Cluster.model_validate({"nodes": [{"name": "c", "cpus": cpus, "mem_mib": 1 << 20}]})

    def played(placer: str) -> tuple[float, float]:
        told = simulate(rigid(101), cluster, make_placer(placer), "learned").figures()
        return told["mean_act_s"], told["step_s"]

    best = min(played(f"fcfs:{k}") for k in DEGREES)
    ours = played("elastic")
    assert ours[0] <= 1.1 * best[0] and ours[1] <= 1.4 * best[1], (ours, best)
