"""While units gather for a wide action, others that end in time may use them."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, started

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Profile
from tangram_hpc.scheduler.placement.placers.cpus import start_choice
from tangram_hpc.scheduler.placement.placers.cpus.backfill import lent_until
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


def test_no_unit_is_lent_after_the_time_however_long_the_actions_run() -> None:
    """Each is told to end in time and runs for 30 s. Only those that began in time are in the way.
    """
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
        submitted_at, until = now - rng.randrange(1000), 0
        for _ in range(5):
            ends = [(now + rng.randrange(500), rng.randrange(1, 5))
                    for _ in range(rng.randrange(12))]
            before, until = until, lent_until(until, submitted_at, lacking, ends, now)
            assert until <= max(now, before or 2 * now - submitted_at)
            if until > now and until in (end for end, _ in ends):
                enough = sum(units for end, units in ends if end <= until) >= lacking
                assert enough or until in (before, 2 * now - submitted_at)
            if until <= now:
                break
            now += rng.randrange(100)
    assert lent_until(0, 1, 1, [(17, 1)], 10) == 17
    assert lent_until(0, 6, 1, [(17, 1)], 10) == 14, "as far away as it has waited"
    assert lent_until(0, 1, 2, [(17, 1)], 10) == 10, "never enough"


def test_the_time_of_an_action_stays_though_units_gather_for_another_one_in_between(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients, each with a wide action, and narrow ones that run for longer than told."""
    world, rng, order = World("elastic", now=SECOND), random.Random(3), list[int]()
    times = dict[int, int]()  # until when units are lent, by when the wide action was submitted

    def watched(before: int, submitted_at: int, lacking: int, ends: list[tuple[int, int]], now: int
                ) -> int:
        until = lent_until(before, submitted_at, lacking, ends, now)
        assert before == times.get(submitted_at, 0)
        if until > now:
            times[submitted_at] = until
            order.append(submitted_at)
        return until

    monkeypatch.setattr(start_choice, "lent_until", watched)
    world.happen(ev.ClientJoined(world.now, 2, "uid-2", "test", 0, 1, "socket"))
    world.node(cpus=CPUS)
    submit(world, 1, 35.0)
    ends = [(world.now + 35 * SECOND, each) for each in started(world.plan())]
    for world.client in (1, 2):
        submit(world, CPUS, 1.0)
    world.now += OVERDUE_NS
    for _ in range(800):
        for world.client in (1, 2):
            if rng.random() < .25:
                submit(world, 1, 30.0, told_s=2.0)
        ends += [(world.now + 30 * SECOND, each) for each in started(world.plan())]
        world.now += SECOND // 4
        for end in [end for end in ends if end[0] <= world.now]:
            ends.remove(end)
            world.finish(end[1])
    again = [at for k, at in enumerate(order) if at in order[:k] and order[k - 1] != at]
    assert again, "units gathered for an action, for another one, and for the first again"


def test_a_lease_without_units_is_no_end_to_wait_for() -> None:
    """An action on a file holds a lease of no CPU, and has no end on CPUs."""
    world = World("elastic", now=SECOND)
    world.node(cpus=CPUS)
    submit(world, 1, 60.0)
    reads = world.submit(0)
    assert reads in started(world.plan())
    submit(world, CPUS, 1.0)
    world.now += OVERDUE_NS
    assert started(world.plan()) == []
    short = submit(world, 1, 1.0)
    assert started(world.plan()) == [short]


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
