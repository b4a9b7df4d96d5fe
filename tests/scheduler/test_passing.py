"""A waiting action that needs more units than are free lets later ones pass, for a bounded time."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, started

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Profile
from tangram_hpc.domain.tenant import TenantSpec
from tangram_hpc.scheduler.placement.placers.cpus.start_choice import PASSED_RUNS
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, Workload

SECOND = 10**9
CPUS = 4


def submit(world: World, cpus: int, run_s: float, client: int = 1) -> int:
    """Submits an action that keeps its size and is told to run for so long."""
    world.client = client
    return world.submit(cpus, resizable=False, profile=Profile(round(run_s * cpus * SECOND), 0))


def join(world: World, client: int) -> None:
    """Lets a further client join."""
    world.happen(ev.ClientJoined(world.now, client, f"uid-{client}", "test", 0, 1, "socket"))


def two_tenants() -> World:
    """A world in which client 1 belongs to the tenant `ahead`, and client 2 to `behind`."""
    world = World("elastic", now=SECOND)
    join(world, 2)
    for client, tenant in ((1, "ahead"), (2, "behind")):
        world.happen(ev.TenantDeclared(world.now, TenantSpec(tenant)))
        world.happen(ev.TenantNamed(world.now, client, tenant))
    return world


def busy(world: World, run_s: float = 1.0) -> None:
    """Adds a node and gives it an action of one CPU for each CPU but one."""
    world.node(cpus=CPUS)
    for _ in range(CPUS - 1):
        submit(world, 1, run_s)
    assert len(started(world.plan())) == CPUS - 1


def waits_s(world: World, wide: int, narrow_client: int = 1) -> float:
    """How long a wide action waits while narrow ones with more work come as fast as any can start.
    One of those that run ends each quarter of a second, so the CPUs come free one by one.
    """
    began, running = world.now, [lease.action for lease in world.ledger.leases.values()]
    while world.now - began < 100 * SECOND:
        submit(world, 1, 1.0, narrow_client)
        fresh = started(world.plan())
        if wide in fresh:
            return (world.now - began) / SECOND
        running += fresh
        world.now += SECOND // CPUS
        if running:
            world.finish(running.pop(0))
    raise AssertionError("the wide action never started")


def test_an_action_that_fits_starts_before_one_that_does_not() -> None:
    world = World("elastic")
    busy(world)
    wide, narrow = submit(world, 2, 1.0), submit(world, 1, 1.0)
    assert started(world.plan()) == [narrow] and not world.ledger.actions[wide].lease


def test_an_action_that_fits_waits_for_nobody_behind_it() -> None:
    world = World("elastic")
    busy(world)
    first = submit(world, 1, 1.0)
    submit(world, 1, 1.0)
    assert started(world.plan()) == [first]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("cpus", [2, 3, 4])
def test_a_wide_action_is_passed_for_a_multiple_of_its_run_at_most(cpus: int, several: bool
                                                                   ) -> None:
    world = World("elastic", now=SECOND)
    if several:
        join(world, 2)
    busy(world)
    run_s = 0.2
    wide = submit(world, cpus, run_s, 2 if several else 1)
    waited = waits_s(world, wide)
    # from then on the CPUs gather for it, one each quarter of a second
    assert PASSED_RUNS * run_s <= waited <= PASSED_RUNS * run_s + cpus / CPUS + 0.26


def test_no_action_of_another_tenant_passes_one_whose_tenant_stays_behind() -> None:
    world = two_tenants()
    busy(world)  # with actions of the tenant that is ahead
    wide, narrow = submit(world, 2, 1.0, 2), submit(world, 1, 1.0, 1)
    assert started(world.plan()) == []
    world.now += SECOND
    world.finish(next(iter(world.ledger.leases.values())).action)
    assert started(world.plan())[0] == wide and not world.ledger.actions[narrow].lease


def test_a_wide_action_lets_its_own_tenant_pass_where_tenants_are_compared() -> None:
    world = two_tenants()
    busy(world)
    submit(world, 2, 1.0, 2)
    world.now += SECOND
    world.finish(next(iter(world.ledger.leases.values())).action)
    world.plan()  # the tenant that was behind holds two CPUs now
    world.finish(next(iter(world.ledger.leases.values())).action)
    # the narrow one may have the unit that is kept for the other tenant, because it is short
    wide, narrow = submit(world, 3, 1.0, 2), submit(world, 1, 0.2, 2)
    assert started(world.plan()) == [narrow] and not world.ledger.actions[wide].lease


def widths(seed: int) -> Workload:
    """Programs of one class on 1 to 4 CPUs, which load 16 CPUs to 80 %."""
    rng, at = random.Random(seed), 0.0
    trajectories = []
    for n in range(400):
        cpus, seconds = rng.randint(1, 4), min(1.0, rng.lognormvariate(-2.526, 0.7))
        trajectories.append(
            {"trajectory": f"t{n}", "start_s": round(at, 4), "session": {"mem_mib": 1},
             "turns": [{"think_s": 0.0, "actions": [
                 {"name": "program", "resource": "cpu", "work_s": round(seconds * cpus, 4),
                  "degrees": [cpus], "serial": 0.0, "resize": False}]}]})
        at += rng.expovariate(0.8 * 16 / 0.25)
    return Workload.model_validate({"name": "widths", "trajectories": trajectories})


@pytest.mark.parametrize("seed", [1, 3, 5])
def test_rigid_actions_of_unknown_length_end_as_soon_as_by_first_fit(seed: int) -> None:
    cluster = Cluster.model_validate({"nodes": [
        {"name": "c", "count": 1, "cpus": 16, "mem_mib": 1 << 20}]})

    def mean_s(placer: str) -> float:
        told = simulate(widths(seed), cluster, make_placer(placer), "learned").figures()
        return told["mean_act_s"]

    ours, strict = mean_s("elastic"), mean_s("fcfs:4")
    assert ours <= 1.03 * mean_s("first-fit") and ours < 0.95 * strict
