"""Where resizes take long, `elastic` learns it from leases that ended, and resizes less."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, started

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Profile
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.domain.tenant import TenantSpec
from tangram_hpc.scheduler.placement.placers.cpus.cpu_division import ResizableLease, weight
from tangram_hpc.scheduler.placement.placers.cpus.resize_cost import (
    FREE_NS,
    GAIN,
    MOST_NS,
    PATIENCE,
    counted_cost,
    divide_with_cost,
    is_worth,
)
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.state.ledger import RESIZE_GAP_NS
from tangram_hpc.scheduler.state.speed import speed_gains
from tangram_hpc.simulator.checkers import faults
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, Workload

SECOND = 1_000_000_000


def units_of(world: World, action: int) -> int:
    return world.ledger.leases[world.lease_of(action)].units


def end(world: World, action: int, resize_ns: int = 0) -> None:
    """The action ends and its worker says how long its resizes took."""
    world.now += RESIZE_GAP_NS
    outcome = Outcome(ActionState.COMPLETED, exec_ns=SECOND, resize_ns=resize_ns)
    world.happen(ev.LeaseFinished(world.now, world.lease_of(action), outcome, True))


def resized_once(world: World, resize_ns: int) -> None:
    """An action of two CPUs gives one up to another action, and both end."""
    wide = world.submit((1, 2), profile=Profile(1000 * SECOND))
    world.plan()
    other = world.submit(1, profile=Profile(SECOND))
    world.now += 50 * SECOND  # longer than it has to wait for units that cost much
    world.plan()
    assert units_of(world, wide) == units_of(world, other) == 1
    end(world, wide, resize_ns)
    end(world, other)


def test_a_node_learns_what_a_resize_takes_from_its_own_leases() -> None:
    world = World("elastic")
    world.node(2)
    node = world.ledger.nodes[1]
    resized_once(world, 8 * FREE_NS)
    assert node.resize_ns == 8 * FREE_NS, "the first sample counts whole"
    resized_once(world, 16 * FREE_NS)
    assert node.resize_ns == 9 * FREE_NS, "later ones by an eighth"
    plain = world.submit(1)
    world.plan()
    end(world, plain, 10**12)
    assert node.resize_ns == 9 * FREE_NS, "a lease without a resize says nothing"
    world.node(2)
    assert world.ledger.nodes[2].resize_ns == 0


@pytest.mark.parametrize(("cost", "grows"), [(0, True), (FREE_NS - 1, True), (SECOND, False)])
def test_an_action_grows_only_if_that_saves_more_than_it_costs(cost: int, grows: bool) -> None:
    world = World("elastic")
    world.node(2)
    world.ledger.nodes[1].resize_ns = cost
    short, other = (world.submit((1, 2), profile=Profile(2 * SECOND)) for _ in range(2))
    world.plan()
    assert units_of(world, short) == units_of(world, other) == 1
    end(world, other)
    world.plan()
    assert units_of(world, short) == (2 if grows else 1)


@pytest.mark.parametrize("known", [True, False])
def test_an_action_too_short_to_be_resized_gets_a_size_to_keep(known: bool) -> None:
    """Eight alike share a node. They run on eight CPUs in turn if no resize is worth its cost."""
    world = World("elastic")
    world.node(16)
    world.ledger.nodes[1].resize_ns = SECOND
    profile = Profile(2 * SECOND) if known else None
    for _ in range(8):
        world.submit((1, 2, 4, 8, 16), profile=profile)
    world.plan()
    sizes = [lease.units for lease in world.ledger.leases.values()]
    assert sizes == [8, 8] if known else len(sizes) == 8


def test_a_long_action_grows_where_resizes_cost_much() -> None:
    world = World("elastic")
    world.node(2)
    world.ledger.nodes[1].resize_ns = SECOND
    long, other = (world.submit((1, 2), profile=Profile(200 * SECOND)) for _ in range(2))
    world.plan()
    end(world, other)
    world.plan()
    assert units_of(world, long) == 2


def test_a_unit_that_gains_too_little_by_itself_stays_free() -> None:
    """The action would gain enough by all the CPUs that it can use, but only one is free."""
    world = World("elastic")
    world.node(4)
    world.ledger.nodes[1].resize_ns = MOST_NS
    others = [world.submit(1, profile=Profile(SECOND)) for _ in range(2)]
    world.plan()
    wide = world.submit((1, 2, 4, 8, 16), profile=Profile(88 * SECOND))
    world.plan()
    assert units_of(world, wide) == 2
    end(world, others[0])
    world.plan()
    assert units_of(world, wide) == 2
    end(world, others[1])
    world.plan()
    assert units_of(world, wide) == 4, "two more gain enough"


@pytest.mark.parametrize("cost", [0, SECOND, 100 * SECOND])
def test_an_action_waits_for_the_units_of_others_as_long_as_their_resizes_take(cost: int) -> None:
    world = World("elastic")
    world.node(2)
    world.ledger.nodes[1].resize_ns = cost
    wide = world.submit((1, 2), profile=Profile(100 * SECOND))
    world.plan()
    assert units_of(world, wide) == 2
    world.now += SECOND
    other = world.submit(1, profile=Profile(SECOND))
    submitted = world.now
    made = started(world.plan())
    if not cost:
        assert made == [other]
        return
    assert made == []
    due = submitted + PATIENCE * counted_cost(cost)
    assert world.scheduler.next_deadline() == due
    world.now = due - 2
    assert started(world.plan()) == []
    assert started(world.plan()) == [other] and units_of(world, wide) == 1


@pytest.mark.parametrize(("left_s", "taken"), [(5, True), (3, False)])
def test_no_unit_is_taken_from_an_action_that_ends_within_the_patience(left_s: int, taken: bool
                                                                      ) -> None:
    world = World("elastic")
    world.node(2)
    world.ledger.nodes[1].resize_ns = SECOND
    wide = world.submit((1, 2), profile=Profile(200 * SECOND))
    world.plan()
    world.now += (100 - left_s) * SECOND
    other = world.submit(1, profile=Profile(SECOND))
    assert started(world.plan()) == []
    world.now += PATIENCE * SECOND
    assert started(world.plan()) == ([other] if taken else [])
    end(world, wide)
    assert taken or started(world.plan()) == [other]


def test_an_action_of_a_tenant_at_its_limit_does_not_end_the_patience_of_others() -> None:
    """It has waited long, but it may take no units."""
    world = World("elastic")
    world.node(3)
    world.happen(ev.TenantDeclared(0, TenantSpec("full", grp_tres=(("cpu", 1),))))
    world.happen(ev.ClientJoined(0, 2, "uid-2", "full", 0, 1, "socket"))
    world.happen(ev.TenantNamed(0, 2, "full"))
    world.ledger.nodes[1].resize_ns = SECOND
    world.client = 2
    for _ in range(2):
        world.submit(1, profile=Profile(10**6 * SECOND))
    world.client = 1
    wide = world.submit((1, 2), profile=Profile(10**6 * SECOND))
    world.plan()
    assert units_of(world, wide) == 2
    world.now += 100 * SECOND
    other = world.submit(1, profile=Profile(SECOND))
    assert started(world.plan()) == []
    world.now += PATIENCE * SECOND
    assert started(world.plan()) == [other]


@pytest.mark.parametrize("seed", range(200))
def test_running_actions_give_up_no_unit_for_growth_that_is_not_worth_it(seed: int) -> None:
    rng = random.Random(seed)
    drawn = [(rng.choice((1, 2, 3, 4)), rng.choice((100, 300)), int(rng.uniform(1, 40) * SECOND))
             for _ in range(4)]
    scale = sum(left for _, _, left in drawn) // 2
    holders = [(ResizableLease(number, units, 16, speed_gains(serial, 16), weight(left, scale)),
                serial, left) for number, (units, serial, left) in enumerate(drawn)]
    cost = SECOND // 2
    sizes, starts = divide_with_cost(0, cost, False, holders, [], None)
    new = {lease.id: lease.units for lease, _, _ in holders} | dict(sizes)
    grown = sum(new.values()) - sum(lease.units for lease, _, _ in holders)
    assert grown == 0 and not starts
    for lease, serial, left in holders:
        assert new[lease.id] <= lease.units or is_worth(cost, serial, left, lease.units,
                                                        new[lease.id])


def test_a_free_unit_is_taken_at_once_whatever_resizes_cost() -> None:
    world = World("elastic")
    world.node(3)
    world.ledger.nodes[1].resize_ns = SECOND
    world.submit((1, 2), profile=Profile(100 * SECOND))
    world.plan()
    other = world.submit(1)
    assert started(world.plan()) == [other]


def test_the_cost_that_counts_is_none_below_a_bound_and_bounded_above() -> None:
    assert counted_cost(FREE_NS - 1) == 0
    assert counted_cost(FREE_NS) == FREE_NS
    assert counted_cost(10 * MOST_NS) == MOST_NS
    gained = 5 * SECOND  # 10 s of work on two units for one, perfectly parallel
    assert is_worth(gained // GAIN, 0, 10 * SECOND, 1, 2)
    assert not is_worth(gained // GAIN + 1, 0, 10 * SECOND, 1, 2)
    assert is_worth(10**15, 0, 1, 0, 1), "an action without units always gets one"


def burst(count: int) -> Workload:
    action = {"name": "b", "resource": "cpu", "degrees": [1, 2, 4, 8], "serial": 0.05}
    return Workload.model_validate({"name": "w", "trajectories": [
        {"trajectory": f"t{n}", "start_s": n * 0.7, "turns": [
            {"think_s": 1, "actions": [action | {"work_s": 2 + 3 * (n % 5)}]} for _ in range(4)]}
        for n in range(count)]})


@pytest.mark.parametrize("latency_us", [None, 0])
def test_the_simulator_charges_each_resize(latency_us: int | None) -> None:
    def played(resize_s: float, placer: str) -> dict[str, float]:
        cluster = Cluster.model_validate({"nodes": [
            {"name": "n", "cpus": 16, "mem_mib": 1024, "resize_s": resize_s}]})
        run = simulate(burst(12), cluster, make_placer(placer), "learned", latency_us=latency_us)
        assert faults(run, burst(12), cluster) == []
        return run.figures()

    free, costly = played(0.0, "elastic"), played(0.5, "elastic")
    assert free["resizes"] > 2 * costly["resizes"] > 0
    assert free["mean_act_s"] < costly["mean_act_s"]
    assert played(0.5, "fcfs:4") == played(0.0, "fcfs:4"), "who never resizes pays nothing"
