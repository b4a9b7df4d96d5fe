"""Units of a tenant's part that it used lately are kept from actions that cannot give them back."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, started
from hypothesis import example, given
from hypothesis import strategies as st

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Profile
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.domain.tenant import TenantSpec
from tangram_hpc.scheduler.placement.placers.cpus.rigid_sizes import NodeLoad, sizes_to_start
from tangram_hpc.scheduler.placement.placers.recent_use import (
    AWAY,
    PERIODS_NS,
    RecentUse,
    period_for,
)
from tangram_hpc.scheduler.placement.placers.tenant_parts import BALANCE_NS, Held, TenantParts
from tangram_hpc.scheduler.state.tenant_use import HORIZON_NS, Tenants

SECOND = 10**9
CPUS = 8
LONGEST = PERIODS_NS[-1]


def submit(world: World, client: int, cpus: int, run_s: float) -> int:
    """Submits an action that keeps its size and is told to run for so long."""
    world.client = client
    return world.submit(cpus, resizable=False, profile=Profile(round(run_s * cpus * SECOND), 0))


def two_tenants(shares: int = 1, priority: int = 0) -> World:
    """A node of 8 CPUs; client 1 is of the tenant `batch`, client 2 of `agents`, which has shares
    and a priority."""
    world = World("elastic", now=SECOND)
    world.happen(ev.ClientJoined(world.now, 2, "uid-2", "test", 0, 1, "socket"))
    for client, spec in ((1, TenantSpec("batch")),
                         (2, TenantSpec("agents", shares=shares, priority=priority))):
        world.happen(ev.TenantDeclared(world.now, spec))
        world.happen(ev.TenantNamed(world.now, client, spec.name))
    world.node(CPUS)
    return world


def turn_of_agents(world: World, actions: int = 2, run_s: float = 0.5,
                   behind: int = 2 * CPUS) -> None:
    """Lets `agents` run some short actions, beside `behind` long ones of `batch`."""
    mine = [submit(world, 2, 1, run_s) for _ in range(actions)]
    assert started(world.plan()) == mine, "they start at once"
    for _ in range(behind):
        submit(world, 1, 1, 100.0)
    world.plan()
    world.now += round(run_s * SECOND)
    for action in mine:
        world.finish(action)
    world.plan()


def held(world: World, tenant: str) -> int:
    return world.ledger.tenants.use("cpu").tenants[tenant].held


def test_a_tenant_with_pauses_finds_the_units_that_it_used_before() -> None:
    world = two_tenants()
    turn_of_agents(world)
    assert held(world, "batch") == CPUS - 2, "two units are kept for the tenant that paused"
    for _ in range(5):  # it thinks for two seconds between its turns
        world.now += 2 * SECOND
        world.plan()
        mine = [submit(world, 2, 1, 0.5) for _ in range(2)]
        assert started(world.plan()) == mine
        world.now += SECOND // 2
        for action in mine:
            world.finish(action)
        world.plan()


def test_short_actions_may_have_the_units_that_are_kept() -> None:
    world = two_tenants()
    turn_of_agents(world)
    short = [submit(world, 1, 1, HORIZON_NS / SECOND) for _ in range(3)]
    assert started(world.plan()) == short[:2], "two units are kept, and long ones wait"


def test_resizable_actions_grow_into_the_units_that_are_kept_and_give_them_back() -> None:
    world = two_tenants()
    turn_of_agents(world)
    world.client = 1
    world.finish(next(iter(world.ledger.leases.values())).action)
    for action in [a for a, entry in world.ledger.actions.items() if not entry.lease]:
        world.happen(ev.ActionCancelled(world.now, action, "not wanted"))
    grows = world.submit((1, 2, 4, 8), profile=Profile(100 * SECOND, 0))
    assert started(world.plan()) == [grows]
    world.now += SECOND
    world.plan()
    assert held(world, "batch") == CPUS, "no unit is idle"
    mine = [submit(world, 2, 1, 0.5) for _ in range(2)]
    world.now += SECOND
    assert started(world.plan()) == mine


def test_a_tenant_that_was_silent_for_long_has_nothing_kept() -> None:
    """The node is looked at again although nothing happens on it."""
    world = two_tenants()
    began = world.now
    turn_of_agents(world)
    world.plan_until(lambda: held(world, "batch") == CPUS, began + 2 * LONGEST + BALANCE_NS)
    assert world.now >= began + 2 * LONGEST


def test_a_tenant_with_room_in_its_part_is_not_held_back() -> None:
    world = two_tenants(shares=3)  # `batch` has 2 of 8 units
    turn_of_agents(world, 6, run_s=1.0)
    assert held(world, "batch") == 2
    for lease in list(world.ledger.leases.values()):  # both end; nothing else runs
        world.finish(lease.action)
    assert len(started(world.plan())) == 2


def test_a_higher_priority_is_not_held_back() -> None:
    world = two_tenants()
    turn_of_agents(world)
    world.happen(ev.TenantDeclared(world.now, TenantSpec("batch", priority=1)))
    world.now += SECOND
    world.plan()
    assert held(world, "batch") == CPUS


def test_no_more_is_kept_for_a_tenant_than_its_limit_allows() -> None:
    world = two_tenants()
    turn_of_agents(world)
    world.happen(ev.TenantDeclared(world.now, TenantSpec("agents", grp_tres=(("cpu", 1),))))
    world.now += SECOND
    world.plan()
    assert held(world, "batch") == CPUS - 1


def test_an_action_wider_than_its_tenants_part_waits_no_longer_than_it_will_run() -> None:
    world = two_tenants(priority=1)  # `agents` come first, whatever they have used
    turn_of_agents(world, run_s=0.1, behind=0)
    wide = submit(world, 1, 7, 5.0)
    assert started(world.plan()) == []
    began = world.now
    while not world.ledger.actions[wide].lease:
        assert world.now < began + 5.3 * SECOND, "it waits for ever"
        short = submit(world, 2, 1, 0.1)  # `agents` do not fall silent
        world.plan()
        if world.ledger.actions[short].lease:
            world.finish(short)
        world.plan()
        world.now = min(world.now + SECOND, world.scheduler.next_deadline() or world.now + SECOND)


def test_what_is_held_back_keeps_no_unit_from_the_tenant_for_which_it_waits() -> None:
    world = two_tenants()
    turn_of_agents(world, 4, behind=0)
    wide = submit(world, 1, CPUS, 5.0)
    assert started(world.plan()) == []
    mine = [submit(world, 2, 1, 0.5) for _ in range(4)]
    assert started(world.plan()) == mine and not world.ledger.actions[wide].lease


def test_short_actions_pass_long_ones_that_have_waited_for_long() -> None:
    world = two_tenants()
    turn_of_agents(world, 4, behind=4)
    for _ in range(4):
        submit(world, 1, 1, 10.0)
    assert started(world.plan()) == []
    world.now += 25 * SECOND
    assert started(world.plan()) == [], "they come first now, and are held back"
    short = [submit(world, 1, 1, 0.1) for _ in range(2)]
    assert started(world.plan()) == short


def test_units_of_its_tenants_part_gather_for_a_wide_action() -> None:
    """Otherwise the narrow ones of its tenant would take each unit, and never the kept ones."""
    world = two_tenants()
    turn_of_agents(world, 4, behind=0)
    for _ in range(4):  # `batch` fills its part
        submit(world, 1, 1, 100.0)
    world.plan()
    wide = submit(world, 1, 4, 1.0)
    world.now += 10 * SECOND  # more than eight times its run
    narrow = [submit(world, 1, 1, 100.0) for _ in range(4)]
    assert started(world.plan()) == []
    running = [lease.action for lease in world.ledger.leases.values()]
    for action in running:
        assert not world.ledger.actions[wide].lease
        world.finish(action)
        world.plan()
    assert world.ledger.actions[wide].lease
    assert not any(world.ledger.actions[action].lease for action in narrow)


def test_a_tenants_resizable_actions_give_its_rigid_ones_room() -> None:
    world = two_tenants()
    turn_of_agents(world, 4, behind=0)
    world.client = 1
    grown = world.submit((1, 2, 4, 8), profile=Profile(1000 * SECOND, 0))
    world.plan()
    world.now += SECOND
    world.plan()
    assert world.ledger.leases[world.lease_of(grown)].units == CPUS
    world.now += SECOND
    rigid = [submit(world, 1, 1, 50.0) for _ in range(5)]
    assert started(world.plan()) == rigid[:3], "its part is four units, and one is the other's"
    world.now += SECOND
    mine = [submit(world, 2, 1, 0.5) for _ in range(4)]
    assert started(world.plan()) == mine


def test_a_tenants_resizable_actions_give_room_where_no_kept_unit_is_free() -> None:
    world = two_tenants()
    world.happen(ev.ClientJoined(world.now, 3, "uid-3", "test", 0, 1, "socket"))
    world.happen(ev.TenantNamed(world.now, 3, "other"))
    world.node(12)
    world.happen(ev.NodeLost(world.now, 1, "gone"))
    for _ in range(8):
        submit(world, 3, 1, 100.0)
    world.plan()
    turn_of_agents(world, 4, behind=0)
    world.client = 1
    grown = world.submit((1, 2, 4), profile=Profile(1000 * SECOND, 0))
    world.plan()
    assert world.ledger.leases[world.lease_of(grown)].units == 4, "its part"
    world.now += SECOND
    rigid = submit(world, 1, 1, 50.0)
    assert started(world.plan()) == [rigid]


def test_a_lease_whose_action_is_forgotten_counts_until_its_cpus_are_free() -> None:
    world = two_tenants()
    mine = submit(world, 2, 2, 100.0)
    world.plan()
    lease = world.lease_of(mine)
    world.happen(ev.ActionCancelled(world.now, mine, "not wanted"))
    world.happen(ev.LeaseFinished(world.now, lease, Outcome(ActionState.CANCELLED), False))
    world.happen(ev.ActionAcknowledged(world.now, (mine,)))
    assert mine not in world.ledger.actions and lease in world.ledger.leases
    for _ in range(CPUS):
        submit(world, 1, 1, 100.0)
    world.plan()
    assert held(world, "batch") == CPUS - 2


def test_rigid_actions_do_not_grow_into_kept_units() -> None:
    world = two_tenants()
    turn_of_agents(world, 3, behind=0)
    assert len([submit(world, 1, 1, 100.0) for _ in range(3)]) == len(started(world.plan())) == 3
    world.client = 1
    for _ in range(2):
        world.submit((1, 2, 4), resizable=False, profile=Profile(100 * SECOND, 0))
    assert started(world.plan())
    assert held(world, "batch") == CPUS - 3


def test_a_rigid_action_is_wide_where_its_tenants_part_is_free() -> None:
    world = two_tenants()
    turn_of_agents(world, 4)  # `batch` has more long actions than fit
    world.client = 2
    action = world.submit((1, 2, 4), resizable=False, profile=Profile(100 * SECOND, 100_000))
    assert started(world.plan()) == [action]
    assert world.ledger.leases[world.lease_of(action)].units == 4


def test_a_rigid_action_does_not_wait_for_units_that_others_keep_until_they_end() -> None:
    world = two_tenants()
    for _ in range(2 * CPUS):
        submit(world, 1, 1, 100.0)
    world.plan()
    world.finish(next(iter(world.ledger.leases.values())).action)
    world.client = 2
    action = world.submit((1, 2, 4), resizable=False, profile=Profile(100 * SECOND, 300_000))
    assert started(world.plan()) == [action]


def test_what_a_tenant_holds_is_not_kept_once_more() -> None:
    world = two_tenants(shares=3)  # `batch` has 2 of 8 units
    turn_of_agents(world, 4, behind=0)
    wide = submit(world, 2, 2, 1000.0)
    assert started(world.plan()) == [wide]
    for _ in range(CPUS):
        submit(world, 1, 1, 100.0)
    world.plan()
    assert held(world, "batch") == CPUS - 4


def test_what_was_held_until_now_counts_however_long_ago_it_began() -> None:
    world = two_tenants()
    wide = submit(world, 2, 3, 1000.0)
    world.plan()
    for _ in range(10):
        world.now += LONGEST // 3
        small = submit(world, 1, 1, 1.0)
        world.plan()
        world.finish(small)
    world.finish(wide)
    for _ in range(2 * CPUS):
        submit(world, 1, 1, 100.0)
    world.plan()
    assert held(world, "batch") == CPUS - 3


def test_what_runs_between_two_looks_counts_as_well() -> None:
    world = two_tenants()
    for _ in range(3):  # one after the other, each of two CPUs
        action = submit(world, 2, 2, 0.1)
        assert started(world.plan()) == [action]
        world.now += SECOND // 10
        world.finish(action)
    full = submit(world, 1, CPUS - 2, 1.0)
    world.plan()
    world.client = 2
    grown = world.submit((1, 2, 4), profile=Profile(10 * SECOND, 0))
    world.plan()
    world.now += SECOND
    world.finish(full)
    world.plan()
    assert world.ledger.leases[world.lease_of(grown)].units == 4
    world.finish(grown)
    for _ in range(2 * CPUS):
        submit(world, 1, 1, 100.0)
    world.plan()
    assert held(world, "batch") == CPUS - 4, "the resizable action held four"


@pytest.mark.parametrize("session", [False, True])
def test_on_several_nodes_only_actions_of_sessions_count(session: bool) -> None:
    world = two_tenants()
    world.node(CPUS)
    world.client = 2
    number = world.session() if session else 0
    action = world.submit(2, session=number, resizable=False, profile=Profile(SECOND // 10, 0))
    world.plan()
    if session:
        world.happen(ev.SessionReady(world.now, number))
        world.plan()
    assert world.ledger.actions[action].lease
    world.finish(action)
    for _ in range(4 * CPUS):
        submit(world, 1, 1, 100.0)
    world.plan()
    assert held(world, "batch") == 2 * CPUS - (2 if session else 0)


def test_a_rigid_action_has_the_size_that_suits_its_tenants_part() -> None:
    crowd = NodeLoad(16, 8, 60, 52)
    alone = NodeLoad(8, 8, 1, 1)
    narrow, _ = sizes_to_start((1, 2, 4, 8), 100, 10 * SECOND, crowd, 0)
    wide, _ = sizes_to_start((1, 2, 4, 8), 100, 10 * SECOND, crowd, 0, alone)
    own, _ = sizes_to_start((1, 2, 4, 8), 100, 10 * SECOND, alone, 0)
    assert narrow[-1] < wide[-1] == own[-1]
    used_up = alone._replace(free=0)
    assert sizes_to_start((1, 2, 4, 8), 100, 10 * SECOND, crowd, 0, used_up)[0] == narrow


def test_units_that_were_given_back_while_nothing_waited_are_kept_no_longer() -> None:
    world = two_tenants()
    mine = [submit(world, 2, 1, 0.5) for _ in range(2)]
    world.plan()
    for action in mine:
        world.finish(action)
    world.plan()
    world.now += 3 * LONGEST
    for _ in range(CPUS):
        submit(world, 1, 1, 100.0)
    world.plan()
    assert held(world, "batch") == CPUS


# ---- what a tenant held lately ----


PAUSES = st.sampled_from([0, 1, *(near for period in PERIODS_NS for near in (
    period // 2, period - 1, period, 2 * period - 1, 2 * period, 3 * period))])


@example([(0, 5), (1, 0)], 3 * LONGEST)
@example([(0, 1), (0, 0), (LONGEST // 2, 0), (LONGEST - 1, 0)], LONGEST - 1)
@given(st.lists(st.tuples(PAUSES, st.integers(0, 5)), max_size=30), PAUSES)
def test_what_was_held_counts_for_its_time_and_at_most_for_twice_as_long(
        steps: list[tuple[int, int]], later: int) -> None:
    recent, now, spans = RecentUse(), 0, list[tuple[int, int, int]]()  # (from, until, held)
    for pause, units in steps:
        if spans:
            spans[-1] = spans[-1][0], now + pause, spans[-1][2]
        now += pause
        recent.note({"t": units} if units else {}, now)
        spans.append((now, now, units))
    now += later
    if spans:
        spans[-1] = spans[-1][0], now, spans[-1][2]
        recent.note({"t": spans[-1][2]} if spans[-1][2] else {}, now)
    for period, span_ns in enumerate(PERIODS_NS):
        most = recent.most("t", period)
        assert most >= max((units for _, until, units in spans if until > now - span_ns),
                           default=0)
        assert most <= max((units for _, until, units in spans if until >= now - 2 * span_ns),
                           default=0)


@given(PAUSES, PAUSES, PAUSES)
def test_what_was_given_back_between_two_looks_counts_up_to_then(
        held_ns: int, away_ns: int, more_ns: int) -> None:
    recent = RecentUse()
    recent.note({"t": 5}, 0)
    recent.note({"t": 1}, held_ns + away_ns, lambda tenant: held_ns)
    recent.note({"t": 1}, held_ns + away_ns + more_ns, lambda tenant: held_ns)
    for period, span_ns in enumerate(PERIODS_NS):
        most = recent.most("t", period)
        assert most in (1, 5)
        assert most == 5 or away_ns + more_ns >= span_ns
        assert most == 1 or away_ns + more_ns <= 2 * span_ns


def test_the_longer_an_action_runs_the_further_back_counts() -> None:
    assert period_for(0) == period_for(PERIODS_NS[0] // AWAY) == 0
    for k in range(1, len(PERIODS_NS)):
        assert period_for(PERIODS_NS[k - 1] // AWAY + 1) == period_for(PERIODS_NS[k] // AWAY) == k
    assert period_for(PERIODS_NS[-1]) == len(PERIODS_NS) - 1


# ---- one pass ----


def test_what_a_tenant_is_given_is_kept_no_more() -> None:
    tenants, recent = Tenants(), RecentUse()
    for name in ("a", "b"):
        tenants.declare(TenantSpec(name))
    tenants.use("cpu").take("a", 4)
    tenants.now = SECOND
    turns = tenants.turns("cpu", SECOND)
    assert turns is not None
    recent.note({"b": 2}, 0)
    parts = TenantParts(8, turns, {"a": Held(4, 4)}, ["a", "b"], recent)
    assert parts.most("a", 1, SECOND, 4, 0) == 2
    parts.choose("b", 1, 1)
    assert parts.most("a", 1, SECOND, 3, 0) == 2


@pytest.mark.parametrize("seed", range(200))
def test_what_is_kept_stays_free_and_nobody_is_held_back_in_its_part(seed: int) -> None:
    rng = random.Random(seed)
    tenants, recent = Tenants(), RecentUse()
    names = ["a", "b", "c"][:rng.randint(2, 3)]
    for name in names:
        tenants.declare(TenantSpec(name, shares=rng.randint(1, 3)))
    cpus = rng.choice([4, 8, 15])
    most = {name: rng.randint(0, cpus) for name in names}
    recent.note(most, 0)
    held = {name: Held() for name in names}
    for _ in range(rng.randint(0, cpus)):
        of = held[rng.choice(names)]
        of.units, of.solid = of.units + 1, of.solid + rng.randint(0, 1)
    for name in names:
        tenants.use("cpu").take(name, held[name].units)
    tenants.now = SECOND
    turns = tenants.turns("cpu", SECOND)
    assert turns is not None
    parts = TenantParts(cpus, turns, held, names, recent)
    total = sum(turns.shares(name) for name in names)
    part = {name: cpus * turns.shares(name) // total for name in names}
    kept = {name: max(0, min(part[name], most[name]) - held[name].units) for name in names}
    before = {name: turns.rank(name) for name in names}
    spare, got = cpus - sum(of.solid for of in held.values()), dict.fromkeys(names, 0)
    for _ in range(rng.randint(1, 10)):
        name, least = rng.choice(names), rng.choice([1, 1, 2])
        wants = least * rng.choice([1, 1, 2])
        room = part[name] - held[name].solid - got[name]
        may = parts.most(name, least, 100 * SECOND, spare, 0)
        if least <= min(room, spare):
            assert may >= least, "it is held back in its own part"
        if may < least:
            continue
        takes = min(wants, may) if may < spare else least
        parts.choose(name, least, takes)
        turns.charge(name, least)
        spare, got[name] = spare - least, got[name] + takes
        if held[name].solid + got[name] > part[name]:  # it has more than its part
            behind = sum(kept[other] for other in names
                         if other != name and not got[other] and before[other] <= before[name])
            left = cpus - sum(held[each].solid + got[each] for each in names)
            assert left + sum(got[each] for each in names if each != name) >= behind
