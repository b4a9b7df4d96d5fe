"""Tenants share the concurrent calls of an endpoint over time, and find those again that they used
lately."""

from __future__ import annotations

import pytest
from helpers.builders import World
from test_tenants import tenants

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Kind, Profile
from tangram_hpc.domain.ids import client_of
from tangram_hpc.domain.service import MICRO, THROTTLED, EndpointSpec
from tangram_hpc.domain.tenant import TenantSpec
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.placement.placers.recent_use import PERIODS_NS
from tangram_hpc.scheduler.placement.placers.tenant_parts import BALANCE_NS

S = 10**9
CALLS = 8  # that the endpoint allows at once
BATCH, AGENTS = 1, 2  # clients, each of a tenant of its own


def two_tenants(placer: str = "elastic", rate: int = 0, calls: int = CALLS, **agents: int) -> World:
    """An endpoint; client BATCH is of the tenant `batch`, and client AGENTS of `agents`, which is
    granted what is named."""
    world = tenants(placer, batch=TenantSpec("batch"), agents=TenantSpec("agents", **agents))
    world.happen(ev.EndpointDeclared(0, EndpointSpec("e", calls, rate * MICRO, 8 * MICRO)))
    world.now = S
    return world


def call(world: World, client: int, run_s: float, kind: Kind = Kind.CALL) -> int:
    """Submits a call that is told to run for so long."""
    world.client = client
    return world.submit(1, key="endpoint:e", kind=kind, profile=Profile(round(run_s * S), 0))


def running(world: World, client: int) -> list[int]:
    """The calls of a client that run."""
    return [lease.action for lease in world.ledger.leases.values()
            if client_of(lease.action) == client]


def turn_of_agents(world: World, calls: int = 2, kind: Kind = Kind.CALL) -> None:
    """Lets `agents` make some calls, beside many long ones of `batch`."""
    mine = [call(world, AGENTS, 0.5, kind) for _ in range(calls)]
    world.plan()
    assert running(world, AGENTS) == mine, "they start at once"
    for _ in range(2 * CALLS):
        call(world, BATCH, 100.0)
    world.plan()
    world.now += S // 2
    for each in mine:
        world.finish(each)
    world.plan()


@pytest.mark.parametrize("placer", ["elastic", "fcfs:1", "static:1", "paper"])
@pytest.mark.parametrize("rate", [0, 4])
def test_tenants_share_an_endpoint_by_time_whatever_the_length_of_their_calls(
        placer: str, rate: int) -> None:
    world, run_s = two_tenants(placer, rate, shares=1), {BATCH: 20.0, AGENTS: 2.5}
    ends: dict[int, int] = {}
    busy = {BATCH: 0, AGENTS: 0}
    for client in run_s:
        for _ in range(2 * CALLS):
            call(world, client, run_s[client])
    while world.now < 400 * S:
        world.plan()
        for client, span_s in run_s.items():
            for each in running(world, client):
                ends.setdefault(each, world.now + round(span_s * S))
        until = min(ends.values())
        for client in run_s:
            busy[client] += len(running(world, client)) * (until - world.now)
        world.now = until
        for each in [action for action, at in ends.items() if at <= until]:
            del ends[each]
            world.finish(each)
            call(world, client_of(each), run_s[client_of(each)])
    assert busy[BATCH] / busy[AGENTS] == pytest.approx(1, rel=.2)


@pytest.mark.parametrize("calls,rate,run_s", [(64, 2, 5), (256, 10, 2)])
@pytest.mark.parametrize("placer", ["elastic", "fcfs:1"])
def test_unequal_shares_are_kept_where_the_rate_is_used_up(placer: str, calls: int, rate: int,
                                                           run_s: int) -> None:
    """Few calls run at once then, so a tenant is owed more than those would use in a while."""
    world = two_tenants(placer, rate, calls, shares=3)
    begun, ends, until = {BATCH: 0, AGENTS: 0}, dict[int, int](), 400 * S // rate
    for client in begun:
        for _ in range(20):
            call(world, client, run_s)
    while world.now < until:
        world.plan()
        for client in begun:
            for each in running(world, client):
                if each not in ends:
                    ends[each] = world.now + run_s * S
                    begun[client] += 1
                    call(world, client, run_s)
        world.now = min([*ends.values(), world.scheduler.next_deadline() or until])
        for each in [action for action, at in ends.items() if at <= world.now]:
            del ends[each]
            world.finish(each)
    assert begun[AGENTS] / sum(begun.values()) == pytest.approx(.75, abs=.03)


@pytest.mark.parametrize("run_s,rate,used_s", [(0.5, 0, 0.5), (0.5, 4, 2.0), (7.0, 4, 7.0)])
def test_a_call_costs_at_least_what_the_rate_leaves_for_it(run_s: float, rate: int, used_s: float
                                                           ) -> None:
    """Of 8 calls at once and 4 a second, each can take two seconds."""
    world = two_tenants(rate=rate)
    one = call(world, AGENTS, run_s)
    world.plan()
    world.now += round(run_s * S)
    world.finish(one)
    used = world.ledger.tenants.use("endpoint:e").tenants["agents"].used
    assert used == pytest.approx(used_s * S, abs=10)


@pytest.mark.parametrize("kind", [Kind.CALL, Kind.GRANT])
def test_a_tenant_with_pauses_finds_the_calls_that_it_made_before(kind: Kind) -> None:
    world = two_tenants()
    turn_of_agents(world, 2, kind)
    assert len(running(world, BATCH)) == CALLS - 2
    again = [call(world, AGENTS, 0.5, kind) for _ in range(2)]
    world.plan()
    assert running(world, AGENTS) == again


def test_the_longer_a_call_runs_the_longer_others_keep_theirs_from_it() -> None:
    world = two_tenants()
    turn_of_agents(world)
    now = world.now
    for run_s, starts in ((.2, True), (1.0, False)):
        world.happen(ev.ClientJoined(world.now, 3, "uid-3", "third", 0, 1, "socket"))
        world.happen(ev.TenantNamed(world.now, 3, "batch"))
        one = call(world, 3, run_s)
        world.plan()
        assert bool(running(world, 3)) == starts, run_s
        if starts:
            world.finish(one)
    world.now = now + 2 * PERIODS_NS[-1] // 4
    world.plan()
    assert running(world, 3), "the agents have been away for far longer than it will run"
    assert len(running(world, BATCH)) == CALLS - 2, "but not for as long as these will"


def test_nothing_is_kept_for_ever() -> None:
    world = two_tenants()
    turn_of_agents(world)
    began = world.now
    world.plan_until(lambda: len(running(world, BATCH)) == CALLS,
                     began + 2 * PERIODS_NS[-1] + BALANCE_NS)
    assert world.now >= began + PERIODS_NS[-1]


def test_a_call_that_ended_while_nothing_waited_counts_no_longer() -> None:
    world = two_tenants()
    turn_of_agents(world, 1)
    for action in running(world, BATCH):
        world.finish(action)
    world.drain()
    mine = call(world, AGENTS, .5)
    world.plan()
    world.finish(mine)
    world.plan()
    world.now += 3 * PERIODS_NS[-1]
    for _ in range(CALLS):
        call(world, BATCH, 100.0)
    world.plan()
    assert len(running(world, BATCH)) == CALLS


def test_what_a_tenant_held_long_ago_is_not_kept_when_it_returns_with_less() -> None:
    """When it begins to wait it is made level with the other one, but it held nothing meanwhile."""
    world = two_tenants()
    mine = [call(world, AGENTS, 1) for _ in range(4)]
    other = call(world, BATCH, 20)
    world.plan()
    for action, run_s in ((mine[0], 1), (mine[1], 0), (mine[2], 0), (mine[3], 0), (other, 19)):
        world.now += run_s * S
        world.finish(action)
    world.now += 600 * S
    mine = [call(world, AGENTS, 1)]
    world.plan()
    world.finish(mine[0])
    for _ in range(2 * CALLS):
        call(world, BATCH, 100.0)
    world.plan()
    assert len(running(world, BATCH)) == CALLS - 1


def test_a_tenant_whose_part_is_less_than_one_call_waits_no_longer_than_it_will_run() -> None:
    world = two_tenants(calls=4, shares=9)
    mine = [call(world, AGENTS, .5) for _ in range(4)]
    world.plan()
    for each in mine:
        world.finish(each)
    theirs = [call(world, BATCH, 10.0) for _ in range(4)]
    world.plan()
    assert running(world, BATCH) == theirs[:1], "three are kept for the agents"
    world.now += 10 * S
    world.plan()
    assert running(world, BATCH) == theirs


def test_parts_are_those_of_the_calls_that_a_throttled_endpoint_takes() -> None:
    world = two_tenants()
    mine = [call(world, AGENTS, .5) for _ in range(CALLS)]
    world.plan()
    for each in mine:
        world.finish(each)
    world.happen(ev.EndpointThrottled(world.now, "e", world.now, world.now, THROTTLED))
    assert world.ledger.endpoints["e"].concurrency == CALLS // 2
    for _ in range(CALLS):
        call(world, BATCH, 100.0)
    world.now += S
    world.plan()
    assert len(running(world, BATCH)) == CALLS // 4


def test_a_clock_that_was_set_back_takes_nothing_from_anybody() -> None:
    world = two_tenants(calls=1)
    for _ in range(4):
        for client in (BATCH, AGENTS):
            call(world, client, 10.0)
    begun = []
    for at in (3600 * S, 10 * S):
        if begun:
            world.happen(ev.BrokerStarted(at, "job", "elastic", "none"))
        world.now = at
        for _ in range(4):
            world.plan()
            (one,) = world.ledger.leases.values()
            begun.append(client_of(one.action))
            world.now += 10 * S
            world.finish(one.action)
            call(world, begun[-1], 10.0)
    assert begun[4:].count(BATCH) == begun[4:].count(AGENTS) == 2


def test_after_the_clock_was_set_back_calls_are_kept_no_longer_than_before() -> None:
    world = two_tenants()
    world.now, began = 7200 * S, 3600 * S
    mine = [call(world, AGENTS, .5) for _ in range(2)]
    world.plan()
    world.now, world.scheduler.state.placer = began, make_placer("elastic")
    world.happen(ev.BrokerStarted(world.now, "job", "elastic", "none"))
    for _ in range(2 * CALLS):
        call(world, BATCH, 100.0)
    world.plan()
    for each in mine:
        world.finish(each)
    world.plan()
    assert len(running(world, BATCH)) == CALLS - 2
    world.plan_until(lambda: len(running(world, BATCH)) == CALLS,
                     began + S + 2 * PERIODS_NS[-1] + BALANCE_NS)


def test_a_tenant_has_its_part_at_once_where_another_one_keeps_more() -> None:
    """Nobody is held back in its own part."""
    world = two_tenants()
    turn_of_agents(world, CALLS)
    assert len(running(world, BATCH)) == CALLS // 2


@pytest.mark.parametrize("priority", [0, 1])
def test_a_higher_priority_is_not_held_back(priority: int) -> None:
    world = tenants(batch=TenantSpec("batch", priority=priority), agents=TenantSpec("agents"))
    world.happen(ev.EndpointDeclared(0, EndpointSpec("e", CALLS, 0, MICRO)))
    turn_of_agents(world)
    assert len(running(world, BATCH)) == (CALLS if priority else CALLS - 2)


def test_a_light_tenant_is_not_held_to_be_ahead_of_one_with_long_calls() -> None:
    """Its virtual time follows that of the tenants which wait, so for a moment it may be ahead."""
    world = two_tenants()
    world.happen(ev.ClientJoined(world.now, 3, "uid-3", "late", 0, 1, "socket"))
    world.happen(ev.TenantDeclared(world.now, TenantSpec("late")))
    world.happen(ev.TenantNamed(world.now, 3, "late"))
    turn_of_agents(world)
    for _ in range(CALLS):
        call(world, 3, 100.0)
    mine = call(world, AGENTS, .5)  # it begins where `late` is
    world.plan()
    world.now += S // 2
    world.finish(mine)
    for first in running(world, BATCH)[:3]:
        world.finish(first)
        world.plan()
    assert len(running(world, BATCH)) + len(running(world, 3)) <= CALLS - 2


def test_a_look_at_the_endpoint_does_not_put_off_one_at_the_cpus() -> None:
    world = two_tenants()
    for client in (BATCH, AGENTS):  # they share the CPUs, which are compared again and again
        world.client = client
        for _ in range(20):
            world.submit((1, 2, 4), profile=Profile(1000 * S, 0))
    world.plan()
    cpus_at = world.scheduler.next_deadline()
    world.now = cpus_at - S // 100
    turn = [call(world, AGENTS, .5) for _ in range(2)]
    world.plan()
    for each in turn:
        world.finish(each)
    for _ in range(2 * CALLS):
        call(world, BATCH, 100.0)
    world.plan()
    assert world.scheduler.next_deadline() <= cpus_at


def test_with_one_tenant_nothing_is_kept() -> None:
    world = World("elastic", now=S)
    world.node(4)
    world.happen(ev.EndpointDeclared(0, EndpointSpec("e", CALLS, 0, MICRO)))
    for _ in range(CALLS):
        call(world, 1, 1.0)
    world.plan()
    for each in running(world, 1):
        world.finish(each)
    for _ in range(2 * CALLS):
        call(world, 1, 100.0)
    world.plan()
    assert len(running(world, 1)) == CALLS
