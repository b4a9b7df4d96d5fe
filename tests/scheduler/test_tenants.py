"""Tenants: training runs or teams that share one broker by shares, priorities and limits."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from helpers.builders import World, started

from tangram_hpc.config.tenants import Tenant
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Kind, Profile
from tangram_hpc.domain.ids import client_of
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import MICRO, EndpointSpec, ServiceSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.domain.tenant import TenantSpec
from tangram_hpc.scheduler.autoscale.alloc_demand import loads
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.policy.admission import reason, refusal, refusal_of_session
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.scheduler.state.ledger import LeaseEntry
from tangram_hpc.scheduler.state.queue import CPU, GPU
from tangram_hpc.scheduler.state.tenant_use import Tenants
from tangram_hpc.simulator.tenant_usage import (
    TenantUsage,
    busy_trajectories,
    simulated_usage,
)
from tangram_hpc.simulator.workload import (
    Cluster,
    ClusterNode,
    WorkloadTrajectory,
)

S = 10**9


def usage_of(placer: str, cpus: int, nodes: int, tenants: dict[str, Tenant],
             work: list[WorkloadTrajectory], seconds: int) -> TenantUsage:
    """Simulates some seconds; returns what each tenant held."""
    cluster = Cluster(nodes=(ClusterNode(name="n", count=nodes, cpus=cpus, mem_mib=1000),),
                      tenants=tenants)
    return simulated_usage(placer, cluster, work, seconds)


def tenants(placer: str = "elastic", cpus: int = 8, mem: int = 1000, gpus: int = 0,
            ahead: int = 0, **specs: TenantSpec) -> World:
    """A world in which client N + 1 is of the Nth tenant given."""
    w = World(placer)
    for number, (name, spec) in enumerate(specs.items(), 1):
        w.happen(ev.TenantDeclared(0, spec))
        if number > 1:
            w.happen(ev.ClientJoined(0, number, f"uid-{number}", name, 0, 1, "socket"))
        w.happen(ev.TenantNamed(0, number, name))
    w.node(cpus, mem, gpus, ahead=ahead)
    return w


def held(w: World, resource: str = "cpu") -> Counter[str]:
    return Counter({name: use.held for name, use in
                    w.ledger.tenants.use(resource).tenants.items()})


# ---- shares ----------------------------------------------------------------------------------


@pytest.mark.parametrize("placer,cpus,nodes,degrees", [
    ("elastic", 16, 1, (1, 2, 4, 8)), ("elastic", 16, 1, (4,)), ("elastic", 8, 2, (1, 2)),
    ("fcfs:4", 16, 1, (1, 2, 4)), ("paper", 16, 1, (1, 2, 4)), ("first-fit", 16, 1, (1,)),
    pytest.param("elastic", 64, 1, (1, 2, 4, 8), marks=pytest.mark.long),
    pytest.param("elastic", 64, 1, (1,), marks=pytest.mark.long),
    pytest.param("elastic", 16, 8, (1, 2, 4), marks=pytest.mark.long)])
def test_shares_of_three_to_one_hold_over_any_ten_seconds(placer: str, cpus: int, nodes: int,
                                                          degrees: tuple[int, ...]) -> None:
    count = 2 * cpus * nodes
    usage = usage_of(placer, cpus, nodes, {"big": Tenant(shares=3), "small": Tenant()},
                     [*busy_trajectories("big", count, .5, degrees, 1),
                      *busy_trajectories("small", count, .5, degrees, 2)], 15)
    for first in range(1, 5):
        got = usage.between(first, first + 10)
        assert got["big"] / sum(got.values()) == pytest.approx(.75, abs=.0125), f"from {first}"
        assert sum(got.values()) > .95 * 10 * S * cpus * nodes


def test_a_tenant_with_many_clients_and_long_actions_gets_no_more() -> None:
    """Turns between clients count actions; shares count the cores that actions hold."""
    usage = usage_of("elastic", 16, 1, {"long": Tenant(), "short": Tenant()},
                     [*busy_trajectories("long", 32, 4., (1,), 1),
                      *busy_trajectories("short", 32, .2, (1,), 2, 150)], 22)
    got = usage.between(8, 22)
    assert got["short"] / sum(got.values()) == pytest.approx(.5, abs=.02)


def test_units_that_a_tenant_leaves_go_to_others_and_come_back() -> None:
    w = tenants(cpus=16, a=TenantSpec("a"), b=TenantSpec("b"))
    for _ in range(4):
        w.submit((1, 2, 4, 8, 16), profile=Profile(1000 * S))
    w.plan()
    assert held(w) == {"a": 16}  # `b` wants none
    w.client, w.now = 2, w.now + S
    for _ in range(4):
        w.submit((1, 2, 4, 8, 16), profile=Profile(1000 * S))
    w.plan()  # one resize later
    assert held(w) == {"a": 8, "b": 8}


def test_nobody_saves_up_service_while_others_work() -> None:
    w = tenants(cpus=4, a=TenantSpec("a"), b=TenantSpec("b"))
    for _ in range(150):
        w.submit(1, profile=Profile(S))
    w.plan()
    for _ in range(60):  # `a` works alone for a minute
        w.now += S
        w.finish(min(w.ledger.leases.values(), key=lambda x: x.lease).action)
        w.plan()
    w.client = 2
    mine = [w.submit(1, profile=Profile(S)) for _ in range(100)]
    order = []
    for _ in range(40):
        w.now += S // 4
        w.finish(min(w.ledger.leases.values(), key=lambda x: x.lease).action)
        order += started(w.plan())
    assert 18 <= sum(a in mine for a in order) <= 23


def test_a_tenant_that_was_blocked_is_owed_half_a_minute_at_most() -> None:
    """A tenant that waits for a GPU must not take all cores for hours once it has it."""
    w = tenants("first-fit", cpus=2, gpus=1, a=TenantSpec("a"), b=TenantSpec("b"))
    w.submit(1, gpus=1)
    w.plan()
    blocked = [w.submit(1, gpus=1) for _ in range(3)]
    w.client = 2
    for _ in range(150):
        w.submit(1)
    for _ in range(100):
        w.plan()
        w.now += S
        w.finish(next(x.action for x in w.ledger.leases.values() if client_of(x.action) == 2))
    use = w.ledger.tenants.use("cpu").tenants
    assert use["b"].used_at(w.now) > 90 * S
    w.client = 1
    w.finish(next(x.action for x in w.ledger.leases.values() if client_of(x.action) == 1))
    w.plan()
    assert blocked[0] in {x.action for x in w.ledger.leases.values()}
    assert use["b"].used_at(w.now) - use["a"].used_at(w.now) <= 31 * S


@pytest.mark.long
def test_fifty_tenants_get_their_shares() -> None:
    shares = {f"t{k}": Tenant(shares=1 + k % 4) for k in range(50)}
    work = [lane for k in range(50) for lane in busy_trajectories(f"t{k}", 8, 1., (1, 2, 4), k)]
    usage = usage_of("elastic", 32, 4, shares, work, 12)
    got, total = usage.between(1, 11), sum(t.shares for t in shares.values())
    assert len(got) == 50
    for name, tenant in shares.items():
        assert got[name] / sum(got.values()) * total == pytest.approx(tenant.shares, rel=.1), name


def test_a_priority_comes_first_and_leaves_the_rest() -> None:
    w = tenants(cpus=8, low=TenantSpec("low", shares=100), high=TenantSpec("high", priority=1))
    for _ in range(2):
        w.submit((1, 2, 4, 8), profile=Profile(100 * S))
    w.plan()
    w.client, w.now = 2, S
    w.submit((1, 2, 4), profile=Profile(100 * S))
    w.plan()
    assert held(w) == {"low": 4, "high": 4}
    w.now += S
    w.submit((1, 2, 4), profile=Profile(100 * S))
    w.plan()
    assert held(w) == {"low": 2, "high": 6}  # no running action falls below one core


def test_tenants_share_cpus_after_the_clock_of_a_new_broker_was_set_back() -> None:
    w = tenants(cpus=1, a=TenantSpec("a"), b=TenantSpec("b"), c=TenantSpec("c"))
    for w.client in (1, 2, 3):
        w.submit(1, resizable=False, profile=Profile(10 * S))
    for start in (3600 * S, 10 * S):
        w.now, got = start, Counter[int]()
        if start == 10 * S:
            w.happen(ev.BrokerStarted(w.now, "job", "elastic", "none"))
        for _ in range(9):
            w.plan()
            (lease,) = w.ledger.leases.values()
            got[client_of(lease.action)] += 1
            w.now += 10 * S
            w.finish(lease.action)
            w.client = client_of(lease.action)
            w.submit(1, resizable=False, profile=Profile(10 * S))
        assert got == {1: 3, 2: 3, 3: 3}


def test_endpoint_calls_follow_the_shares() -> None:
    w = tenants(a=TenantSpec("a", 3), b=TenantSpec("b"))
    w.happen(ev.EndpointDeclared(0, EndpointSpec("e", 4, 0, MICRO)))
    for w.client in (1, 2):
        for _ in range(60):
            w.submit(1, key="endpoint:e")
    begun = started(w.plan())
    while len(begun) < 60:
        w.finish(min(w.ledger.leases.values(), key=lambda x: x.lease).action)
        begun += started(w.plan())
    assert Counter(client_of(a) for a in begun[:60]) == {1: 45, 2: 15}


@pytest.mark.parametrize("placer", ["elastic", "fcfs:1", "paper"])
def test_calls_of_a_service_are_shared_by_gpu_time(placer: str) -> None:
    w = tenants(placer, gpus=4, a=TenantSpec("a", 3), b=TenantSpec("b"))
    w.happen(ev.ServiceDeclared(0, ServiceSpec("judge", 1000)))
    for w.client in (1, 2):
        for _ in range(80):
            w.submit(1, key="service:judge", profile=Profile(S))
    got: Counter[str] = Counter()
    w.plan()
    for _ in range(60):
        w.now += S // 4
        w.finish(min(w.ledger.leases.values(), key=lambda x: x.lease).action)
        w.plan()
        got += held(w, "gpu")
    assert got["a"] / sum(got.values()) == pytest.approx(.75, abs=.03)


def test_sessions_open_by_the_memory_that_tenants_hold() -> None:
    w = tenants(mem=800, a=TenantSpec("a", 3), b=TenantSpec("b"))
    for w.client in (2, 1):
        for _ in range(30):
            w.session(mem=10 if w.client == 1 else 50)
    w.plan()
    assert held(w, "mem") == {"a": 300, "b": 500}  # `a` wants no more
    w = tenants(mem=800, a=TenantSpec("a", 3), b=TenantSpec("b"))
    for w.client in (2, 1):
        for _ in range(90):
            w.session(mem=20)
    w.plan()
    assert held(w, "mem") == {"a": 600, "b": 200}


# ---- limits ----------------------------------------------------------------------------------


def test_what_is_beyond_a_limit_alone_is_refused_with_the_field() -> None:
    limits = (("cpu", 4), ("gpu", 1), ("mem", 100), ("endpoint:e", 2))
    w = tenants(gpus=4, a=TenantSpec("a", grp_tres=limits))
    placer = w.scheduler.state.placer
    for field, fields in (("cpus: 6", {"cpus": (6, 8)}), ("mem: 200", {"mem_mib": 200}),
                          ("gpus: 2", {"gpus": 2, "trusted": True})):
        cpus = fields.pop("cpus", 1)
        action = w.ledger.actions[w.submit(cpus, **fields)].action
        told = refusal(w.ledger, placer, action)
        assert told.startswith(f"{field} asked for, but tenant 'a' may hold "), told
        assert "grp_tres" in told
    session = w.ledger.sessions[w.session(mem=101)].spec
    assert refusal_of_session(w.ledger, placer, session).startswith("mem: 101 asked for, but tena")


def test_what_is_beyond_a_limit_together_waits_for_a_reason_in_slurms_words() -> None:
    limits = (("cpu", 4), ("mem", 100))
    w = tenants(cpus=8, a=TenantSpec("a", grp_tres=limits), b=TenantSpec("b"))
    for _ in range(3):
        w.submit(2, profile=Profile(9 * S))
    w.plan()
    assert held(w) == {"a": 4}
    waits = next(e for e in w.ledger.actions.values() if e.state is ActionState.PENDING)
    assert reason(w.ledger, waits, 0, w.now) == "AssocGrpCpuLimit"
    w.client = 2
    w.submit(4)
    assert len(started(w.plan())) == 1  # what one tenant may not take is free for another
    w.client = 1
    w.finish(next(x.action for x in w.ledger.leases.values() if client_of(x.action) == 1))
    assert started(w.plan()) == [waits.action.id]


@pytest.mark.parametrize("placer", ["elastic", "fcfs:4", "paper"])
@pytest.mark.parametrize("limit,fields,most", [
    (("mem", 100), {"mem_mib": 50}, 2), (("gpu", 1), {"gpus": 1}, 1)])
def test_limits_of_memory_and_gpus_hold_within_one_pass(
        placer: str, limit: tuple[str, int], fields: dict[str, int], most: int) -> None:
    w = tenants(placer, gpus=4, a=TenantSpec("a", grp_tres=(limit,)), b=TenantSpec("b"))
    for _ in range(4):
        w.submit(1, profile=Profile(S), **fields)
    assert len(started(w.plan())) == most


def test_a_limit_of_cpus_holds_beside_actions_that_grow() -> None:
    w = tenants(cpus=16, a=TenantSpec("a", grp_tres=(("cpu", 4),)), b=TenantSpec("b"))
    for cpus in ((1, 2, 4), (1, 2, 4), 2, (1, 2)):
        w.submit(cpus, profile=Profile(9 * S))
    w.plan()
    assert held(w)["a"] == 4
    w.now += S
    w.plan()
    assert held(w)["a"] == 4


@pytest.mark.parametrize("placer,most_s", [("elastic", 25), ("elastic:2", 25), ("fcfs:4", 2),
                                           ("paper", 2)])
def test_smaller_actions_do_not_keep_a_wide_one_out_of_its_tenants_limit_for_ever(
        placer: str, most_s: int) -> None:
    w = tenants(placer, cpus=16, a=TenantSpec("a", grp_tres=(("cpu", 4),)), b=TenantSpec("b"))
    running = [w.submit(1, profile=Profile(S)) for _ in range(4)]
    w.plan()
    wide = w.submit(4, profile=Profile(S))
    while w.now < most_s * S and not w.ledger.actions[wide].lease:
        w.now += S // 4
        if running:
            w.finish(running.pop(0))
        w.submit(1, profile=Profile(S))
        running += started(w.plan())
    assert w.ledger.actions[wide].lease


def test_an_older_action_starts_before_one_that_waits_for_its_tenants_limit() -> None:
    w = tenants("paper", cpus=16, a=TenantSpec("a", grp_tres=(("cpu", 4),)), b=TenantSpec("b"))
    w.submit(1, profile=Profile(100 * S))
    w.plan()
    narrow, _, late = w.submit(2), w.submit(4), w.submit(1)
    assert started(w.plan()) == [narrow]
    assert not w.ledger.actions[late].lease


@pytest.mark.parametrize("placer", ["elastic", "fcfs:4", "paper"])
def test_a_session_goes_on_while_an_action_waits_for_the_memory_that_it_holds(placer: str) -> None:
    w = tenants(placer, a=TenantSpec("a", grp_tres=(("mem", 100), ("cpu", 4))), b=TenantSpec("b"))
    session = w.session(mem=60)
    w.plan()
    w.happen(ev.SessionReady(w.now, session))
    waits = w.submit(4, mem_mib=60)
    w.plan()
    assert reason(w.ledger, w.ledger.actions[waits], 0, w.now) == "AssocGrpMemLimit"
    for _ in range(30):
        w.now += S
        inside = [w.submit(1, session=session) for _ in range(2)]
        while inside:
            assert started(w.plan()) == [inside[0]]
            w.finish(inside.pop(0))


def test_an_action_for_which_no_node_has_memory_holds_back_no_others_of_its_tenant() -> None:
    w = tenants(mem=100, a=TenantSpec("a", grp_tres=(("cpu", 4),)), b=TenantSpec("b"))
    w.session(mem=60)
    w.submit(1, profile=Profile(100 * S))
    w.plan()
    w.submit(4, mem_mib=60)
    w.now += 30 * S
    small = w.submit(1)
    assert started(w.plan()) == [small]


@pytest.mark.parametrize("restore_ns,work_ns", [(0, 10**8), (10**7, 10**8), (2 * S, S)])
def test_a_limit_of_gpus_keeps_no_call_from_a_copy_that_it_may_use(restore_ns: int,
                                                                   work_ns: int) -> None:
    w = tenants(gpus=4, a=TenantSpec("a", grp_tres=(("gpu", 1),)), b=TenantSpec("b"))
    w.happen(ev.ServiceDeclared(0, ServiceSpec("judge", restore_ns)))
    for client, calls in ((1, 3), (2, 3)):
        w.client = client
        for _ in range(calls):
            w.submit((1, 2, 4), key="service:judge", profile=Profile(work_ns))
    waits = 0
    for _ in range(12):
        w.now += 5 * S
        w.plan()
        assert held(w, "gpu")["a"] <= 1
        mine = [x for x in w.ledger.leases.values() if client_of(x.action) == 1]
        waits += not mine and any(client_of(a) == 1 for a, e in w.ledger.actions.items()
                                  if e.state is ActionState.PENDING)
        for lease in list(w.ledger.leases.values()):
            w.finish(lease.action)
    assert not w.ledger.leases and not len(w.ledger.ready) and waits <= 1


def test_a_session_without_a_node_takes_no_room_of_its_tenant() -> None:
    w = tenants(mem=1000, a=TenantSpec("a", grp_tres=(("mem", 200),)), b=TenantSpec("b"))
    w.happen(ev.NodeJoined(0, 2, NodeSpec("x", "host", (0,), 100, (), "x", backends=("model",),
                                          untrusted=("model",))))
    for _ in range(3):
        w.session(mem=150, component="x")
    small = [w.session(mem=60) for _ in range(2)]
    action = w.submit(1, mem_mib=60)
    assert started(w.plan()) == [action]
    assert [w.ledger.sessions[s].node for s in small] == [1, 1]
    assert held(w, "mem") == {"a": 180}


def test_no_limited_tenant_is_queued_behind_another_ones_lease() -> None:
    w = World("elastic")
    w.happen(ev.TenantDeclared(0, TenantSpec("a", grp_tres=(("cpu", 2),))))
    w.happen(ev.TenantNamed(0, 1, "a"))
    w.happen(ev.ClientJoined(0, 2, "uid-2", "b", 0, 1, "socket"))
    w.happen(ev.NodeJoined(0, 1, NodeSpec("n", "host", tuple(range(8)), 100, ahead=8,
                                          backends=("model",), untrusted=("model",))))
    w.happen(ev.NodesComplete(0, 1))
    for w.client, count in ((2, 8), (1, 60), (2, 60)):
        for _ in range(count):
            w.submit(1, profile=Profile(10**5), trusted=True)
        w.plan()
    for _ in range(100):
        w.now += 10**5
        w.finish(next(x.action for x in w.ledger.leases.values() if x.begun))
        w.plan()
        assert held(w)["a"] <= 2


@pytest.mark.parametrize(("shares", "limit", "due"), [
    ((3, 1), (), .75), ((3, 1), (("cpu", 3),), .75), ((1, 1), (("cpu", 2),), .5),
    ((1, 3), (("cpu", 3),), .25)], ids=["", "not reached", "reached", "most of the units"])
def test_short_actions_are_shared_where_leases_are_queued_behind_others(
        shares: tuple[int, int], limit: tuple[tuple[str, int], ...], due: float) -> None:
    """An action whose tenant may not be queued behind another one's lease is not overtaken."""
    w = tenants(cpus=4, ahead=8, a=TenantSpec("a", shares[0]),
                b=TenantSpec("b", shares[1], grp_tres=limit))
    for w.client in (1, 2):
        for _ in range(800):
            w.submit(1, profile=Profile(S // 250), trusted=True)
    got: Counter[str] = Counter()
    w.plan()
    for step in range(800):
        w.now += S // 200  # they take longer than was told, as on a busy machine
        w.finish(min((x for x in w.ledger.leases.values() if x.begun),
                     key=lambda x: (x.granted_at, x.lease)).action)
        w.plan()
        got += held(w) if step >= 200 else Counter()
    assert got["a"] / sum(got.values()) == pytest.approx(due, abs=.03)
    assert any(not x.begun for x in w.ledger.leases.values()), "leases are queued"


@pytest.mark.parametrize(("gpus", "limit"), [
    (1, ()), (1, (("gpu", 2),)), (2, (("gpu", 1),)), (4, (("gpu", 2),))])
def test_calls_are_shared_where_they_are_queued_behind_a_copys_batch(
        gpus: int, limit: tuple[tuple[str, int], ...]) -> None:
    """A copy takes 8 calls at a time: a tenant with a limit gets one in its turn."""
    w = tenants(gpus=gpus, ahead=8, a=TenantSpec("a"), b=TenantSpec("b", grp_tres=limit))
    w.happen(ev.ServiceDeclared(0, ServiceSpec("judge", backend="fake", batch=8)))
    for w.client in (1, 2):
        for _ in range(200):
            w.submit(1, key="service:judge", profile=Profile(S), kind=Kind.CALL)
    got: Counter[str] = Counter()
    w.plan()
    for _ in range(200):
        w.now += S // 4
        w.finish(min((x for x in w.ledger.leases.values() if x.begun),
                     key=lambda x: x.lease).action)
        w.plan()
        got += held(w, "gpu")
    assert got["a"] / sum(got.values()) == pytest.approx(.5, abs=.05)


def test_a_shape_beyond_a_limit_holds_back_no_other_of_its_tenant() -> None:
    w = tenants(cpus=8, a=TenantSpec("a", grp_tres=(("mem", 100), ("cpu", 4))))
    w.submit(1, mem_mib=80)
    w.plan()
    blocked = [w.submit(1, mem_mib=80), w.submit(4)]
    small = [w.submit(1) for _ in range(3)]
    assert sorted(started(w.plan())) == small
    assert all(w.ledger.actions[a].state is ActionState.PENDING for a in blocked)


def test_sessions_reserve_cores_within_the_limit() -> None:
    w = tenants("static:2", cpus=8, a=TenantSpec("a", grp_tres=(("cpu", 5),)), b=TenantSpec("b"))
    for w.client in (1, 2):
        for _ in range(3):
            w.session()
    w.plan()
    assert held(w) == {"a": 4, "b": 4}


def test_a_limit_asks_slurm_for_no_further_nodes() -> None:
    w = tenants(cpus=2, a=TenantSpec("a", grp_tres=(("cpu", 3),)), b=TenantSpec("b"))
    for _ in range(9):
        w.submit(1, profile=Profile(S))
    w.plan()
    load = loads(w.ledger, w.now)["cpu", ""]
    assert (load.waiting, load.bound) == (1, 6)


def test_a_raised_limit_lets_waiting_actions_start() -> None:
    w = tenants(cpus=8, a=TenantSpec("a", grp_tres=(("cpu", 1),)))
    for _ in range(4):
        w.submit(1)
    w.plan()
    assert held(w) == {"a": 1}
    w.happen(ev.TenantDeclared(w.now, TenantSpec("a", grp_tres=(("cpu", 3),))))
    w.plan()
    assert held(w) == {"a": 3}


@pytest.mark.parametrize("placer", ["elastic", "fcfs:4", "first-fit", "paper", "static:2"])
@pytest.mark.parametrize("seed", range(3))
def test_no_limit_is_ever_exceeded_and_a_replay_agrees(placer: str, seed: int) -> None:
    """Random work of three tenants; `World` checks the whole ledger after each event."""
    rng = random.Random(seed)
    limits = {"cpu": 5, "gpu": 3, "mem": 300, "endpoint:e": 2}
    w = tenants(placer, cpus=6, mem=800, gpus=4, a=TenantSpec("a", 2, 0, tuple(limits.items())),
                b=TenantSpec("b", priority=seed % 2), c=TenantSpec("c"))
    w.happen(ev.NodeJoined(0, 2, NodeSpec("n2", "host", tuple(range(4)), 800, tuple(range(4)),
                                          backends=("model",), untrusted=("model",), ahead=8)))
    w.happen(ev.ServiceDeclared(0, ServiceSpec("judge", 1000)))
    w.happen(ev.EndpointDeclared(0, EndpointSpec("e", 4, 0, MICRO)))
    open_sessions: list[int] = []
    for _ in range(150):
        w.client, w.now = rng.randint(1, 3), w.now + rng.randint(1, S)
        match rng.randint(0, 9):
            case 0 | 1 | 2:
                for _ in range(rng.choice([1, 1, 8])):
                    w.submit(rng.choice([1, 2, (1, 2, 4), 4]), gpus=rng.choice([0, 0, 0, 1]),
                             profile=Profile(rng.choice([10**5, rng.randint(1, 9 * S)])),
                             mem_mib=rng.choice([0, 0, 100]))
            case 3:
                degrees = (1,) if placer.startswith("static") else rng.choice([(1,), (1, 2), (2,)])
                w.submit(degrees, key="service:judge", profile=Profile(S))
            case 4:
                w.submit(1, key="endpoint:e")
            case 5:
                open_sessions.append(w.session(mem=rng.choice([50, 120])))
            case 6 if open_sessions:
                w.client = client_of(session := rng.choice(open_sessions))
                w.submit(rng.choice([1, (1, 2)]), session=session, profile=Profile(S))
            case _ if w.ledger.leases:
                lease = rng.choice(list(w.ledger.leases))
                w.happen(ev.LeaseFinished(w.now, lease, Outcome(ActionState.COMPLETED), True))
        w.plan()
        for session, entry in list(w.ledger.sessions.items()):
            if entry.node and not entry.ready:
                w.happen(ev.SessionReady(w.now, session))
        w.plan()
        for resource, most in limits.items():
            assert held(w, resource)["a"] <= most, (resource, w.events[-1])
    again = Scheduler(make_placer(placer))
    for event in w.events:
        again.handle(event)
    assert again.ledger.tenants.resources.keys() == w.ledger.tenants.resources.keys()
    for name, of in w.ledger.tenants.resources.items():
        assert again.ledger.tenants.resources[name].tenants == of.tenants


def test_a_tenant_that_was_alone_is_compared_with_the_second_from_its_first_wait_on() -> None:
    tenants = Tenants()
    cpu = tenants.use("cpu")
    cpu.wait(cpu.of("a"))
    cpu.take("a", 4)
    tenants.now = 10 * S
    cpu.take("a", -1)
    cpu.wait(cpu.of("b"))  # while the first one waits, too: no service is saved up
    assert cpu.tenants["b"].used == 40 * S
    cpu.leave(cpu.of("a"))
    tenants.now = 20 * S
    cpu.leave(cpu.of("b"))
    cpu.wait(cpu.of("b"))  # the first one waits no more: what it held was taken from nobody
    assert (cpu.tenants["a"].held, cpu.tenants["a"].waiting) == (3, 0)
    assert cpu.tenants["b"].used == cpu.tenants["a"].used_at(tenants.now) == 70 * S


def test_a_lease_is_said_to_hold_like_another_only_if_it_holds_the_same() -> None:
    """A sole tenant's units are not counted again where one lease follows another like it."""
    leases = [LeaseEntry(1, 2, 3, (0,) * units, gpus, mem_mib, 0, reserved, 0, {}, pool=pool,
                         grants=[(0, 1), (5, units)])
              for units in (1, 2) for gpus in ((), (0,), (1, 2)) for mem_mib in (0, 64)
              for reserved in (False, True) for pool in (CPU, GPU, "endpoint:e")]
    alike = [(a, b) for a in leases for b in leases if a.holds_like(b)]
    assert all(a.holds() == b.holds() for a, b in alike)
    assert len(alike) >= len(leases) and all(a.holds_like(a) for a in leases)
