"""Tenants find the memory again that their sessions held lately."""

from __future__ import annotations

import pytest
from helpers.builders import World
from test_tenants import tenants

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.ids import client_of
from tangram_hpc.domain.tenant import TenantSpec
from tangram_hpc.scheduler.placement.placers.recent_use import PERIODS_NS
from tangram_hpc.scheduler.placement.placers.session_openings import BLOCKED_MOST
from tangram_hpc.scheduler.placement.placers.tenant_parts import BALANCE_NS

S = 10**9
ROOM = 8  # sessions of 100 MiB for which there is memory
LONG, SHORT = 1, 2  # clients, each of a tenant of its own


def two_tenants(placer: str = "elastic", nodes: int = 1, **specs: TenantSpec) -> World:
    """Client LONG is of the tenant `long`, client SHORT of `short`."""
    world = tenants(placer, mem=100 * ROOM // nodes, **{
        "long": TenantSpec("long"), "short": TenantSpec("short"), **specs})
    for _ in range(nodes - 1):
        world.node(8, mem=100 * ROOM // nodes)
    world.now = S
    return world


def request(world: World, client: int, mem: int = 100) -> int:
    """Requests a session."""
    world.client, world.now = client, world.now + 1
    return world.session(mem=mem)


def open_of(world: World, client: int) -> list[int]:
    """The sessions of a client that have a node."""
    return [number for number, each in world.ledger.sessions.items()
            if each.node and client_of(number) == client]


def close(world: World, session: int) -> None:
    """Lets a session become ready if it is not, and closes it."""
    if not world.ledger.sessions[session].ready:
        world.happen(ev.SessionReady(world.now, session))
    world.happen(ev.SessionClosing(world.now, session, "done"))
    world.happen(ev.SessionClosed(world.now, session, ""))


def episode_of_short(world: World, sessions: int = 2) -> None:
    """Lets `short` open and close some sessions, while many of `long` wait."""
    mine = [request(world, SHORT) for _ in range(sessions)]
    world.plan()
    assert open_of(world, SHORT) == mine, "they open at once"
    for _ in range(2 * ROOM):
        request(world, LONG)
    world.plan()
    world.now += S
    for each in mine:
        close(world, each)
    world.plan()


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_tenant_finds_the_memory_that_its_sessions_held(nodes: int) -> None:
    world = two_tenants(nodes=nodes)
    episode_of_short(world)
    assert len(open_of(world, LONG)) == ROOM - 2
    again = [request(world, SHORT) for _ in range(2)]
    world.plan()
    assert open_of(world, SHORT) == again


@pytest.mark.parametrize("placer", ["fcfs:4", "paper"])
def test_other_placers_keep_no_memory(placer: str) -> None:
    world = two_tenants(placer)
    episode_of_short(world)
    assert len(open_of(world, LONG)) == ROOM


def test_no_memory_is_kept_for_ever() -> None:
    world = two_tenants()
    episode_of_short(world)
    began = world.now
    world.plan_until(lambda: len(open_of(world, LONG)) == ROOM,
                     began + 2 * PERIODS_NS[-1] + BALANCE_NS)
    assert world.now >= began + PERIODS_NS[-1]


def test_a_tenant_has_its_part_of_the_memory_at_once() -> None:
    world = two_tenants()
    episode_of_short(world, ROOM)
    assert len(open_of(world, LONG)) == ROOM // 2


def test_a_session_that_is_larger_than_its_tenants_part_opens_in_the_end() -> None:
    world = two_tenants()
    mine = [request(world, SHORT) for _ in range(2)]
    world.plan()
    for each in mine:
        close(world, each)
    large = request(world, LONG, mem=100 * (ROOM - 1))
    began = world.now
    world.plan()
    world.plan_until(lambda: world.ledger.sessions[large].node,
                     began + 2 * PERIODS_NS[-1] + BALANCE_NS)
    assert world.now - began >= PERIODS_NS[-1], "that is how long it is expected to stay open"


def test_memory_gathers_for_a_large_session_of_a_tenant_within_its_part() -> None:
    world = two_tenants()
    episode_of_short(world)
    large = request(world, SHORT, mem=100 * ROOM // 2)
    world.plan()
    assert not open_of(world, SHORT)
    for session in open_of(world, LONG)[:2]:
        close(world, session)
        world.plan()
    assert open_of(world, SHORT) == [large]


def test_sessions_that_are_held_back_do_not_hide_those_of_other_tenants() -> None:
    """So many of the first tenant wait that the walk leaves it out."""
    world = two_tenants(late=TenantSpec("late"))
    world.client = LONG
    episode_of_short(world)
    for _ in range(2 * BLOCKED_MOST):
        request(world, LONG)
    world.plan()
    close(world, open_of(world, LONG)[0])
    late = request(world, 3)
    world.plan()
    assert open_of(world, 3) == [late]
    assert len(open_of(world, LONG)) < ROOM - 2


def test_with_one_tenant_no_memory_is_kept() -> None:
    world = World("elastic", now=S)
    world.node(8, mem=100 * ROOM)
    mine = [request(world, 1) for _ in range(4)]
    world.plan()
    for each in mine:
        close(world, each)
    for _ in range(2 * ROOM):
        request(world, 1)
    world.plan()
    assert len(open_of(world, 1)) == ROOM
