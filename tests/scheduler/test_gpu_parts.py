"""Copies of a tenant that holds no more than its part of the GPUs are kept for it, and a tenant
that holds less may take those of tenants that hold more."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from helpers.builders import World, started
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind, Profile
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.tenant import TenantSpec
from tangram_hpc.scheduler.placement.minimum_residency import OVERDUE_NS
from tangram_hpc.scheduler.placement.placers.elastic_gpus import KEPT_LIMITS
from tangram_hpc.scheduler.state.demand import horizon_ns

SECOND = 10**9
RESTORE_NS = SECOND
FEW, MANY, LATE = 1, 2, 3  # clients; each is of a tenant of its own
RUN_NS = 2 * SECOND


def two_tenants(gpus: int = 2, batch: int = 1, restore_ns: int = RESTORE_NS, **few: Any) -> World:
    """A node with GPUs; client FEW is of the tenant `few`, which is granted what is named, client
    MANY of `many`, and client LATE of `late`. The services are `a` to `f`."""
    world = World("elastic", now=SECOND)
    for client in (MANY, LATE):
        world.happen(ev.ClientJoined(world.now, client, f"uid-{client}", "test", 0, 1, "socket"))
    for client, spec in ((FEW, TenantSpec("few", **few)), (MANY, TenantSpec("many")),
                         (LATE, TenantSpec("late"))):
        world.happen(ev.TenantDeclared(world.now, spec))
        world.happen(ev.TenantNamed(world.now, client, spec.name))
    world.happen(ev.NodeJoined(world.now, 1, NodeSpec("n", "h", (0,), 100, tuple(range(gpus)),
                                                      ahead=4 * batch if batch > 1 else 0)))
    world.happen(ev.NodesComplete(world.now, 1))
    for name in "abcdef":
        world.happen(ev.ServiceDeclared(world.now, ServiceSpec(name, restore_ns, backend="fake",
                                                               batch=batch)))
    return world


def call(world: World, client: int, service: str, degrees: tuple[int, ...] = (1,),
         run_ns: int = RUN_NS) -> int:
    """Submits a call that is told to run for so long."""
    world.client = client
    action = Action(world.id(), service, Kind.CALL, degrees, f"service:{service}",
                    profile=Profile(run_ns, 0))
    world.now += 1
    world.happen(ev.ActionSubmitted(world.now, action))
    return action.id


def run(world: World, client: int, service: str, degrees: tuple[int, ...] = (1,)) -> None:
    """Lets a call run to its end on idle GPUs."""
    action = call(world, client, service, degrees)
    assert started(world.plan()) == [action]
    end(world, [action])


def crowd(world: World, client: int, service: str, calls: int, at_once: int) -> list[int]:
    """Lets a client send so many calls, of which the first start at once."""
    sent = [call(world, client, service) for _ in range(calls)]
    assert started(world.plan())[:at_once] == sent[:at_once]
    return sent


def end(world: World, actions: list[int]) -> None:
    """Lets calls end after their run time."""
    world.now += RUN_NS
    for action in actions:
        world.finish(action)


def standing(world: World, service: str) -> int:
    """How many GPUs the copies of a service are on."""
    return sum(there.service == service for there in world.ledger.nodes[1].gpus.resident.values())


def test_an_idle_copy_is_kept_for_its_tenant_until_it_expects_no_call() -> None:
    world = two_tenants()
    run(world, FEW, "a")
    left = world.now
    first, second = call(world, MANY, "b"), call(world, MANY, "c")
    assert started(world.plan()) == [first], "the other GPU is free"
    assert standing(world, "a") == 1
    until = left + horizon_ns(RESTORE_NS)
    assert world.scheduler.next_deadline() == until
    world.now = until
    assert started(world.plan()) == [second] and standing(world, "a") == 0


def test_the_tenant_finds_its_copy_where_it_left_it() -> None:
    world = two_tenants()
    run(world, FEW, "a")
    for service in "bcbc":
        call(world, MANY, service)
    assert len(started(world.plan())) == 1
    again = call(world, FEW, "a")
    assert started(world.plan()) == [again]
    assert world.ledger.leases[world.lease_of(again)].restore_ns == 0


def test_a_tenant_that_holds_more_than_its_part_keeps_only_its_part() -> None:
    world = two_tenants(gpus=3)
    mine = crowd(world, FEW, "a", 3, 3)
    end(world, mine)
    theirs = [call(world, MANY, service) for service in "bcd"]
    assert started(world.plan()) == theirs[:2], "one as its part, and one that nobody is to have"
    assert standing(world, "a") == 1


@pytest.mark.parametrize("shares", [1, 3])
def test_the_part_follows_the_shares(shares: int) -> None:
    world = two_tenants(gpus=4, shares=shares)
    mine = [call(world, FEW, "a") for _ in range(4)]
    assert started(world.plan()) == mine
    end(world, mine)
    for service in "bcb":
        call(world, MANY, service, run_ns=60 * SECOND)
    world.plan()
    assert standing(world, "a") == 4 * shares // (1 + shares)


def test_a_tenant_of_a_higher_priority_may_park_a_kept_copy() -> None:
    for priority, parked in ((0, False), (-1, True), (1, False)):
        world = two_tenants(priority=priority)
        run(world, FEW, "a")
        call(world, MANY, "b"), call(world, MANY, "c")
        world.plan()
        assert (standing(world, "a") == 0) == parked, priority


def test_a_tenant_that_comes_later_takes_what_is_its_part_as_it_comes_free() -> None:
    world = two_tenants(gpus=4)
    theirs = crowd(world, MANY, "b", 40, 4)
    world.now += RESTORE_NS
    mine = [call(world, FEW, "a", run_ns=60 * SECOND) for _ in range(3)]
    assert started(world.plan()) == []
    got = []
    for action in theirs[:4]:
        world.now += RUN_NS // 4
        world.finish(action)
        got += [one for one in started(world.plan()) if one in mine]
    assert got == mine[:2] and standing(world, "b") == 2, "its part is two GPUs of four"


def test_a_tenant_within_its_part_takes_only_what_comes_free() -> None:
    world = two_tenants(gpus=3)
    theirs = crowd(world, MANY, "b", 30, 3)
    mine = [call(world, FEW, "a", run_ns=60 * SECOND) for _ in range(2)]
    for action in theirs[:6]:
        world.now += RUN_NS // 4
        world.finish(action)
        world.plan()
    assert standing(world, "b") == 2, "it holds one GPU, which is its part"
    assert world.ledger.actions[mine[1]].lease == 0


def test_a_claim_is_to_the_copies_of_tenants_that_hold_more_than_their_part() -> None:
    world = two_tenants(gpus=3)
    mine = crowd(world, FEW, "a", 1, 1)
    theirs = crowd(world, MANY, "b", 20, 2)
    mine += [call(world, FEW, "a") for _ in range(3)]
    late = call(world, LATE, "c")
    world.plan()
    world.now += RUN_NS
    world.finish(mine[0])
    assert started(world.plan()) == [mine[1]], "its copy comes free first, but is its part"
    world.finish(theirs[0])
    assert started(world.plan()) == [late]


def test_there_is_no_claim_to_copies_on_which_the_call_can_run() -> None:
    for degrees, claims in (((1, 2), False), ((2,), True)):
        world = two_tenants(gpus=4)
        crowd(world, MANY, "b", 40, 4)
        for _ in range(6):
            call(world, FEW, "b", degrees)
        world.plan()
        assert bool(world.scheduler.state.drained) == claims, degrees


def test_nobody_has_a_claim_to_the_copies_of_a_tenant_with_a_higher_priority() -> None:
    for priority, claims in ((-1, False), (0, True)):
        world = two_tenants(priority=priority)
        crowd(world, MANY, "b", 2, 2)
        call(world, FEW, "a")
        world.plan()
        assert bool(world.scheduler.state.drained) == claims, priority


def test_what_the_others_lose_by_a_claim_does_not_count() -> None:
    world = two_tenants(gpus=4, restore_ns=10 * SECOND)
    run(world, FEW, "a")
    for service in "bcd":
        run(world, MANY, service)
    mine = [call(world, FEW, "a") for _ in range(4)]
    assert started(world.plan()) == mine[:2]
    assert standing(world, "a") == 2, "`many` expects calls on each of its copies"


@pytest.mark.parametrize("limit", [1, 2])
def test_a_tenant_at_its_limit_has_no_claim(limit: int) -> None:
    world = two_tenants(gpus=4, grp_tres=(("gpu", limit),))
    crowd(world, FEW, "a", 1, 1)
    crowd(world, MANY, "b", 20, 3)
    for _ in range(5):
        call(world, FEW, "a")
    world.plan()
    assert bool(world.scheduler.state.drained) == (limit == 2)


def test_a_copy_that_is_to_come_free_gets_no_prefetched_calls() -> None:
    world = two_tenants(gpus=2, batch=2)
    theirs = crowd(world, MANY, "b", 20, 2)
    behind = len(world.ledger.leases) - 2
    assert behind > 0, "calls follow on both copies"
    mine = call(world, FEW, "a")
    world.plan()
    done, seen = 0, False
    for action in theirs:
        if mine in {lease.action for lease in world.ledger.leases.values()}:
            seen = True
            break
        if action not in {lease.action for lease in world.ledger.leases.values()}:
            continue
        world.now += RUN_NS // 4
        world.finish(action)
        world.plan()
        done += 1
    assert seen and done <= 2 + behind, "the calls that were granted already, and no others"


def test_a_starved_call_takes_a_copy_of_its_own_tenant_first() -> None:
    world = two_tenants()
    run(world, FEW, "a")
    theirs = crowd(world, MANY, "b", 200, 1)
    starved, at = call(world, MANY, "c"), world.now
    while world.ledger.actions[starved].lease == 0:
        assert world.now - at < KEPT_LIMITS * OVERDUE_NS
        world.now += SECOND
        world.finish(theirs.pop(0))
        mine = call(world, FEW, "a")
        assert mine in started(world.plan())
        assert world.ledger.leases[world.lease_of(mine)].restore_ns == 0
        world.now += SECOND // 2
        world.finish(mine)
        world.plan()
    assert world.now - at >= OVERDUE_NS and standing(world, "b") == 0


def test_a_copy_is_not_kept_for_ever_from_a_starved_call() -> None:
    restore_ns = 30 * SECOND
    world = two_tenants(gpus=8, restore_ns=restore_ns)
    mine = crowd(world, FEW, "a", 4, 4)
    end(world, mine)
    left = world.now
    for service in "bcde":
        call(world, MANY, service, run_ns=1000 * SECOND)
    assert len(started(world.plan())) == 4
    starved, at = call(world, MANY, "f"), world.now
    while starved not in started(world.plan()):
        due = world.scheduler.next_deadline()
        assert due > world.now, "nobody looks again"
        world.now = due
    assert at + OVERDUE_NS < world.now < left + horizon_ns(restore_ns) // 2 + SECOND


def test_a_tenant_within_its_part_may_park_kept_copies_of_others() -> None:
    world = two_tenants(gpus=4)
    end(world, [crowd(world, client, service, 1, 1)[0]
                for client, service in ((FEW, "a"), (LATE, "b"), (FEW, "a"))])
    assert [there.service for there in world.ledger.nodes[1].gpus.resident.values()] == list("aba")
    world.happen(ev.ClientLeft(world.now, LATE, True, world.now))
    wide = call(world, MANY, "c", degrees=(2,))
    assert started(world.plan()) == [wide], "its part is two GPUs, and no two are free"


def test_a_call_that_is_wider_than_its_tenants_part_parks_kept_copies() -> None:
    world = two_tenants()
    run(world, FEW, "a")
    wide = call(world, MANY, "b", degrees=(2,))
    assert started(world.plan()) == [wide]


def test_a_copy_that_is_wider_than_its_tenants_part_is_not_kept_and_not_claimed_at_once() -> None:
    world = two_tenants()
    wide = [call(world, FEW, "a", degrees=(2,)) for _ in range(3)]
    assert started(world.plan()) == wide[:1]
    narrow = call(world, MANY, "b")
    for before, after in pairwise(wide):
        end(world, [before])
        assert started(world.plan()) == [after], "without the copy it would hold less than its part"
    end(world, wide[-1:])
    assert started(world.plan()) == [narrow]


def test_a_copy_that_is_wider_than_its_tenants_part_may_be_parked_by_any_tenant() -> None:
    world = two_tenants(gpus=4)
    run(world, FEW, "a", degrees=(2,))
    crowd(world, MANY, "b", 1, 1)
    crowd(world, LATE, "c", 1, 1)
    more = call(world, MANY, "d")
    assert started(world.plan()) == [more] and standing(world, "a") == 0


def test_tenants_that_share_a_service_claim_nothing_for_its_calls() -> None:
    world = two_tenants()
    run(world, FEW, "b")
    theirs = [*crowd(world, MANY, "c", 20, 1), call(world, MANY, "b")]
    assert started(world.plan()) == theirs[-1:], "a copy that both use"
    mine = [call(world, FEW, "b") for _ in range(4)]
    end(world, theirs[:1])
    assert started(world.plan()) == theirs[1:2] and standing(world, "c") == 1
    end(world, theirs[-1:])
    assert started(world.plan()) == mine[:1]


def test_a_tenant_with_a_claim_does_not_come_before_one_of_a_higher_priority() -> None:
    world = two_tenants(gpus=3, priority=1)
    mine = crowd(world, FEW, "a", 1, 1)
    theirs = crowd(world, MANY, "b", 20, 2)
    mine += [call(world, FEW, "c")]
    end(world, theirs[:1])
    late = call(world, LATE, "d")
    begun = started(world.plan())
    assert late not in begun and mine[-1] not in begun and begun == theirs[2:3]
    while mine[-1] not in begun:
        end(world, [next(lease.action for lease in world.ledger.leases.values()
                         if lease.action != mine[0])])
        begun = started(world.plan())
        assert late not in begun


def test_the_oldest_call_has_the_copy_that_is_there() -> None:
    world = two_tenants(gpus=4)
    run(world, FEW, "a")
    crowd(world, MANY, "b", 1, 1)
    mine = [call(world, FEW, "a") for _ in range(3)]
    assert mine[0] in started(world.plan())
    restores = [world.ledger.leases[world.lease_of(one)].restore_ns for one in mine[:2]]
    assert restores == [0, RESTORE_NS]


def test_nothing_is_kept_beyond_a_limit_or_for_a_tenant_without_clients() -> None:
    for leaves, started_at_once in ((False, 3), (True, 4)):
        world = two_tenants(gpus=4, grp_tres=(("gpu", 1),))
        for service in "ab":
            run(world, FEW, service)
        if leaves:
            world.happen(ev.ClientLeft(world.now, FEW, True, world.now))
        for service in "cdefcdef":
            call(world, MANY, service)
        assert len(started(world.plan())) == started_at_once


def test_a_block_that_is_booked_for_a_starved_call_gets_no_prefetched_calls() -> None:
    """Batches on both copies would follow without end; the call is of the same tenant."""
    world = two_tenants(batch=2)
    crowd(world, MANY, "b", 400, 2)
    wide, at = call(world, MANY, "b", degrees=(2,)), world.now
    while wide not in started(world.plan()):
        assert world.now - at < 4 * OVERDUE_NS
        world.now += SECOND
        running = {lease.gpus: lease.action for lease in world.ledger.leases.values()
                   if lease.begun and lease.units}
        for action in running.values():
            world.finish(action)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([FEW, MANY]), st.sampled_from("abc"),
                          st.sampled_from([(1,), (1, 2), (2,), (1, 2, 4)]),
                          st.integers(0, 8)), min_size=1, max_size=30),
       st.integers(1, 3), st.sampled_from([1, 4]))
def test_every_call_ends(calls: list[tuple[int, str, tuple[int, ...], int]], shares: int,
                         batch: int) -> None:
    """Whatever tenants call, nothing waits for ever although no event comes but ends of calls."""
    world = two_tenants(gpus=4, shares=shares, batch=batch)
    left = set()
    for client, service, degrees, pause_s in calls:
        left.add(call(world, client, service, degrees))
        world.plan()
        world.now += pause_s * SECOND
    for _ in range(10 * len(calls)):
        world.plan()
        running = [lease.action for lease in world.ledger.leases.values() if lease.begun]
        if running:
            world.now += RUN_NS
            left.discard(running[0])
            world.finish(running[0])
        elif left:
            due = world.scheduler.next_deadline()
            assert due > world.now, "something waits, and nobody looks again"
            world.now = due
    assert not left
