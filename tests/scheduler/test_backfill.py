"""While units gather for a wide action, others that end in time may use them."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, started

from tangram_hpc.domain.action import Profile
from tangram_hpc.scheduler.placement.placers.cpus.backfill import NOTHING, Gathering, lent_until
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.placement.placers.waiting import OVERDUE_NS
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, Workload

SECOND = 10**9
CPUS = 8


def submit(world: World, cpus: int, run_s: float, told_s: float = 0.0) -> int:
    """Submits an action that keeps its size, and that is told to run for so long."""
    return world.submit(cpus, resizable=False,
                        profile=Profile(round((told_s or run_s) * cpus * SECOND)))


def gathering(left_s: float = 60.0) -> tuple[World, int]:
    """A node with one action of one CPU that runs for `left_s` more, and a waiting one that needs
    all CPUs and is overdue."""
    world = World("elastic", now=SECOND)
    world.node(cpus=CPUS)
    submit(world, 1, left_s + OVERDUE_NS / SECOND)
    world.plan()
    wide = submit(world, CPUS, 1.0)
    world.now += OVERDUE_NS
    assert started(world.plan()) == []
    return world, wide


def test_actions_that_end_in_time_use_the_units_that_gather() -> None:
    world, wide = gathering(15)
    fits, late = submit(world, 1, 14.0), submit(world, 1, 16.0)
    assert started(world.plan()) == [fits]
    world.now += 14 * SECOND
    world.finish(fits)
    world.now += SECOND
    world.finish(next(iter(world.ledger.leases.values())).action)
    assert started(world.plan()) == [wide] and not world.ledger.actions[late].lease


def test_no_more_is_lent_than_is_idle() -> None:
    world, _ = gathering()
    short = [submit(world, 2, 5.0) for _ in range(5)]
    assert started(world.plan()) == short[:3], "three of two CPUs fit beside the one that runs"


def test_units_are_lent_for_as_long_as_the_wide_action_has_waited_at_most() -> None:
    world, _ = gathering(1000)
    waited = OVERDUE_NS / SECOND
    fits, late = submit(world, 1, waited - 0.1), submit(world, 1, waited + 0.1)
    assert started(world.plan()) == [fits] and not world.ledger.actions[late].lease


def test_actions_that_run_for_longer_than_told_delay_a_wide_one_once() -> None:
    """Each is told to end in time and runs for 30 s. No further one starts after that time."""
    world, wide = gathering(15)
    begun, first = dict[int, int](), next(iter(world.ledger.leases.values())).action
    for second in range(120):
        submit(world, 1, 30.0, told_s=2.0)
        for each in started(world.plan()):
            if each == wide:
                assert second < 46, "the last that was lent units ends 45 s later"
                return
            begun[each] = world.now
        world.now += SECOND
        for each in [a for a, at in begun.items() if world.now - at >= 30 * SECOND]:
            world.finish(each)
            del begun[each]
        if second == 14:
            world.finish(first)
    raise AssertionError("the wide action never started")


def test_actions_that_start_together_count_for_when_the_wide_one_can_start() -> None:
    """The narrow ones that may not be overtaken start first; what ends with them goes along."""
    world = World("elastic", now=SECOND)
    world.node(cpus=CPUS)
    whole = submit(world, CPUS, 30.0)
    world.plan()
    first, wide = submit(world, 1, 10.0), submit(world, CPUS, 10.0)
    alike = [submit(world, 1, 10.0) for _ in range(CPUS)]
    world.now += 200 * SECOND  # all have waited for as long as in order of arrival
    world.finish(whole)
    assert started(world.plan()) == [first, *alike[:-1]] and not world.ledger.actions[wide].lease


def test_the_time_until_which_units_are_lent_only_becomes_earlier() -> None:
    rng = random.Random(1)
    for _ in range(500):
        now, lacking = rng.randrange(1000, 2000), rng.randrange(1, 20)
        submitted_at, found = now - rng.randrange(1000), NOTHING
        for _ in range(5):
            ends = [(now + rng.randrange(500), rng.randrange(1, 5))
                    for _ in range(rng.randrange(12))]
            before, found = found, lent_until(found, 1, submitted_at, lacking, ends, now)
            late = [end for end, _ in sorted(ends)]
            in_time = sum(units for end, units in ends if end <= found.until)
            assert found.action == 1 and found.until <= max(now, 2 * now - submitted_at)
            if before is not NOTHING:
                assert found.until <= max(before.until, now)
            if found.until in late and found.until > now:
                assert in_time >= lacking or found.until == before.until
            now += rng.randrange(100)
    assert lent_until(Gathering(1, now + 9), 2, now - 4, 1, [(now + 7, 1)], now) == (2, now + 4)
    assert lent_until(NOTHING, 2, now - 4, 2, [(now + 3, 1)], now) == (2, now), "never enough"


@pytest.mark.parametrize("durations", ["learned", "oracle"])
def test_wide_and_narrow_actions_under_overload_fill_a_node(durations: str) -> None:
    """Each second action needs the whole node, the others one CPU for 9 s. In order of arrival,
    seven CPUs would be idle beside each narrow one."""
    rng = random.Random(7)
    work = Workload.model_validate({"name": "mixed", "trajectories": [
        {"trajectory": f"t{n}", "start_s": 0, "session": {"mem_mib": 1}, "turns": [
            {"think_s": 0.1, "actions": [
                {"name": "all", "resource": "cpu", "work_s": 8.0, "degrees": [CPUS],
                 "resize": False} if rng.random() < .5 else
                {"name": "one", "resource": "cpu", "work_s": 9.0, "degrees": [1],
                 "resize": False}]} for _ in range(4)]} for n in range(60)]})
    cluster = Cluster.model_validate({"nodes": [{"name": "c", "cpus": CPUS, "mem_mib": 10000}]})
    least_s = sum(a.work_s for t in work.trajectories for u in t.turns for a in u.actions) / CPUS
    step_s = simulate(work, cluster, make_placer("elastic"), durations).figures()["step_s"]
    assert step_s <= 1.3 * least_s
