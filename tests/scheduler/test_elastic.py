"""The placers `elastic` and `paper` and their estimates: exact arithmetic, bounds, and figures."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from helpers.builders import World, started
from helpers.sim_material import CLUSTER, workload

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Profile
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import CPU_AT_LEAST, Outcome
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.placement.placers.cpus.cpu_division import (
    ResizableLease,
    WaitingCandidate,
    divide_cpus,
    weight,
)
from tangram_hpc.scheduler.placement.placers.cpus.elastic_cpus import STARTS
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.placement.placers.prefix_program import (
    choose_degrees,
    prefix_program,
    read_off,
)
from tangram_hpc.scheduler.placement.placers.waiting import BYPASS, OVERDUE_NS
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.scheduler.state.estimator import (
    PRIOR,
    UNKNOWN_NS,
    Estimator,
    Serial,
    cpu_to_learn,
)
from tangram_hpc.scheduler.state.ledger import RESIZE_GAP_NS
from tangram_hpc.scheduler.state.speed import run_ns, speed, speed_gains
from tangram_hpc.simulator.checkers import faults
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, read_cluster, read_workload

SHARED = Path(__file__).resolve().parents[3] / "shared" / "workloads"


# ---- the dynamic program -----------------------------------------------------------------------


def test_the_dynamic_program_for_degrees_equals_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        n, free = rng.randrange(1, 7), rng.randrange(1, 20)
        options = [[(d, rng.randrange(1, 1000))
                    for d in sorted(rng.sample([1, 2, 3, 4, 5, 8, 16], rng.randrange(1, 4)))]
                   for _ in range(n)]
        rows, picks = prefix_program(options, free)
        best = min((sum(t for _, t in chosen) for chosen in itertools.product(*options)
                    if sum(d for d, _ in chosen) <= free), default=None)
        if best is None:
            assert rows[n][free] >= 1 << 200
            continue
        degrees = read_off(picks, n, free)
        assert rows[n][free] == best and sum(degrees) <= free
        assert sum(dict(o)[d] for o, d in zip(options, degrees, strict=True)) == best


def test_the_greedy_starts_a_prefix_that_fits() -> None:
    rng = random.Random(2)
    for _ in range(500):
        free, n = rng.randrange(1, 30), rng.randrange(1, 6)
        options = [[(d, 1000 // d + 1) for d in (1, 2, 4)] for _ in range(n)]
        options = options[:free]
        least = [o[0] for o in options] + [(1, 500)] * rng.randrange(3)
        chosen = choose_degrees(options, free, least, [(rng.randrange(900), 2)], 0)
        assert 1 <= len(chosen) <= len(options) and sum(chosen) <= free
    assert choose_degrees([[(1, 9), (4, 3)]], 4, [(1, 9)], [], 0) == [4]


def test_paper_starts_as_many_rigid_actions_as_fit_however_many_wait() -> None:
    """It once counted fewer waiting actions for a shorter prefix and started one of 64."""
    w = World("paper")
    w.node(cpus=64)
    rng = random.Random(1)
    for _ in range(300):
        w.submit(1, profile=Profile(rng.randrange(1, 10**9)))
    assert len(started(w.plan())) == 64


# ---- the division ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(400))
def test_dividing_units_among_leases_conserves_units(seed: int) -> None:
    rng = random.Random(seed)

    def value() -> tuple[int, int]:
        return rng.choice([0, 100, 500]), weight(rng.randrange(1, 10**10), 10**9)

    holders, candidates = [], []
    for i in range(rng.randrange(6)):
        (serial, w), top = value(), rng.choice([1, 4, 16])
        holders.append(ResizableLease(i, rng.randrange(0, top + 1), top, speed_gains(serial, top),
                                      w))
    for i in range(10, 10 + rng.randrange(6)):
        (serial, w), degrees = value(), rng.choice([(1,), (1, 2, 4), (2, 8), (3,)])
        rigid = len(degrees) == 1 or rng.random() < .3
        candidates.append(WaitingCandidate(i, degrees, rigid, speed_gains(serial, degrees[-1]), w,
                                rng.random() < .2))
    free = rng.randrange(12)
    changed, starts = divide_cpus(free, holders, candidates)
    held = {h.id: h.units for h in holders}
    after = held | dict(changed)
    assert sum(after.values()) + sum(u for _, u in starts) <= free + sum(held.values())
    begun = dict(starts)
    room = free + sum(max(0, h.units - 1) for h in holders)
    last = max((k for k, e in enumerate(candidates) if e.id in begun), default=-1)
    for e in candidates[:last + 1]:  # only those are passed over that nothing could let start
        assert e.id in begun or (e.least > room and not e.must)
        room -= e.least if e.id in begun else 0
    for holder in holders:
        assert min(1, holder.units) <= after[holder.id] <= holder.top
    assert [i for i, _ in starts] == [e.id for e in candidates if e.id in begun]
    for e in candidates:
        units = begun.get(e.id, e.degrees[0])
        assert units in e.degrees if e.rigid else 1 <= units <= e.degrees[-1]
    tops = sum(h.top for h in holders) + sum(e.degrees[-1] for e in candidates if e.id in begun)
    if not any(e.rigid for e in candidates):  # nothing is left idle that somebody could use
        used = sum(after.values()) + sum(u for _, u in starts)
        assert used == min(tops, free + sum(held.values()))
    assert divide_cpus(free, holders, candidates) == (changed, starts)


def test_speed_is_amdahls() -> None:
    assert speed(0, 4) == 4 << 20 and speed(1000, 16) == 1 << 20 and speed(100, 0) == 0
    assert run_ns(10**9, 500, 2) == pytest.approx(.75e9, rel=1e-5)


# ---- nobody is overtaken without bound ---------------------------------------------------------


@pytest.mark.parametrize("long", [(1,), (4,), (1, 2, 4)])
def test_a_long_action_is_overtaken_a_bounded_number_of_times(long: tuple[int, ...]) -> None:
    w = World("elastic")
    w.node(4)
    busy = [w.submit(1, profile=Profile(10**6)) for _ in range(4)]
    w.plan()
    victim = w.submit(long, profile=Profile(10**13), resizable=len(long) > 1)
    for _ in range(3 * BYPASS):
        w.submit(1, profile=Profile(10**6))
    before = 0
    while not any(isinstance(e, ev.LeaseGranted) and e.action == victim for e in w.events):
        done = next(iter(w.ledger.leases.values())).action
        w.finish(done)
        before += done not in busy
        w.now += RESIZE_GAP_NS
        w.plan()
        assert before <= BYPASS + 4 and w.now < OVERDUE_NS, "the action is overtaken without end"


def test_an_action_that_waited_past_the_limit_starts_next() -> None:
    w = World("elastic")
    w.node(1)
    w.submit(1)
    w.plan()
    victim = w.submit(1, profile=Profile(10**13))
    w.submit(1, profile=Profile(10**6))
    w.now += OVERDUE_NS
    w.finish(next(iter(w.ledger.leases.values())).action)
    w.plan()
    assert next(iter(w.ledger.leases.values())).action == victim


def test_where_much_work_waits_an_action_is_overtaken_as_long_as_arrival_would_make_it_wait(
        ) -> None:
    """It would wait for 100 others of a second if it had come last."""
    w = World("elastic")
    w.node(1)
    w.submit(1, profile=Profile(10**9))
    w.plan()
    victim = w.submit(1, profile=Profile(10**13))
    for _ in range(100):
        w.submit(1, profile=Profile(10**9))
    since = w.now
    while True:
        w.now += 10**9
        w.finish(next(iter(w.ledger.leases.values())).action)
        w.plan()
        running = next(iter(w.ledger.leases.values())).action
        if running == victim:
            break
        w.submit(1, profile=Profile(10**9))  # always as much is left
    assert 100 * 10**9 <= w.now - since <= 114 * 10**9


@pytest.mark.parametrize("others", [0, 300])
def test_the_work_of_other_clients_counts_no_longer_than_their_turns(others: int) -> None:
    """Another client has hours of work here, which is served in turn with this client's."""
    w = World("elastic")
    w.node(2)
    w.happen(ev.ClientJoined(0, 2, "uid-2", "other", 0, 1, "socket"))
    w.client = 2
    for _ in range(others):
        w.submit(1, profile=Profile(100 * 10**9))
    w.client = 1
    victim = w.submit(1, profile=Profile(10**13))
    mine = [w.submit(1, profile=Profile(10**9)) for _ in range(60)]
    w.plan()
    since = w.now
    while victim not in {lease.action for lease in w.ledger.leases.values()}:
        w.now += 10**9
        for lease in list(w.ledger.leases.values()):
            if lease.action in mine:
                w.finish(lease.action)
                mine.append(w.submit(1, profile=Profile(10**9)))  # always as much is left
            elif w.now - lease.granted_at >= 100 * 10**9:
                w.finish(lease.action)
        w.plan()
    waited = (w.now - since) // 10**9
    # the 60 s of its client, twice for two clients, on two units, until an action of the other ends
    assert 60 <= waited <= 68 + 100 if others else 29 <= waited <= 35


def test_an_action_without_free_gpus_blocks_no_cpu_action_and_is_not_starved() -> None:
    w = World("elastic")
    w.node(8, gpus=2)
    w.happen(ev.ServiceDeclared(0, ServiceSpec("judge", 10**9)))
    calls = [w.submit(1, key="service:judge") for _ in range(30)]
    w.plan()
    both = w.submit(1, gpus=2)
    plain = w.submit(1)
    w.plan()
    running = {lease.action for lease in w.ledger.leases.values()}
    assert plain in running and both not in running
    w.now += OVERDUE_NS
    for _ in range(3):
        call = next((x.action for x in w.ledger.leases.values() if x.action in calls), None)
        if call is not None:
            w.finish(call)
        w.plan()
    assert both in {lease.action for lease in w.ledger.leases.values()}


# ---- beliefs -----------------------------------------------------------------------------------


def test_the_estimator_learns_classes_and_uses_their_parent_for_new_ones() -> None:
    e = Estimator()
    short, long, new = (Action(i, n) for i, n in ((1, "ls"), (2, "make"), (3, "new")))
    assert e.estimate(new) == (0, UNKNOWN_NS)
    for _ in range(100):
        for action, ns in ((short, 10**7), (long, 10**10)):
            e.began(action)
            e.ended(action, [(1, ns)], True)
    assert e.estimate(short)[1] < 10**9 < 9 * 10**9 < e.estimate(long)[1] < 10**10 + 10**9
    assert e.estimate(short)[1] < e.estimate(new)[1] < e.estimate(long)[1]
    assert e.remaining(short, 10**9) > 10**9  # it is no ordinary one, then
    known = Action(4, "ls", degrees=(1, 2), profile=Profile(77, 250_000))
    assert e.estimate(known) == (250, 77)
    assert e.used == {"profile": 0, "learned": 200}


def test_a_killed_action_counts_as_longer_than_its_run_time() -> None:
    whole, killed = Estimator(), Estimator()
    action = Action(1, "x")
    for i in range(40):
        for e in (whole, killed):
            e.began(action)
        whole.ended(action, [(1, 10**9)], True)
        killed.ended(action, [(1, 10**9)], i % 2 == 0)
    assert killed.estimate(action)[1] > whole.estimate(action)[1]


@pytest.mark.parametrize("serial", [10, 450])
def test_the_estimator_learns_the_serial_fraction_of_a_class(serial: int) -> None:
    rng, e = random.Random(serial), Estimator()
    action = Action(1, "x", degrees=(1, 2, 4, 8, 16))
    assert e.serial(action) == PRIOR
    for _ in range(600):
        units, work = rng.choice([1, 2, 4, 8, 16]), int(rng.lognormvariate(20, .3))
        e.began(action)
        e.ended(action, [(units, run_ns(work, serial, units))], True)
    assert e.serial(action) < PRIOR if serial < PRIOR else e.serial(action) > 3 * PRIOR


@pytest.mark.parametrize("serial", [10, 300, 1000])
def test_cpu_time_shows_the_serial_fraction_after_a_few_actions(serial: int) -> None:
    rng, e, action = random.Random(serial), Estimator(), Action(1, "x", degrees=(1, 2, 4, 8))
    for number in range(412):
        truth = serial if number < 12 else 100  # the class changes
        units, work = rng.choice([2, 4, 8]), int(rng.lognormvariate(21, .8))
        e.began(action)
        e.ended(action, [(units, run_ns(work, truth, units))], True, work)
        if number == 11:
            assert abs(e.serial(action) - serial) <= max(10, serial // 2)
    assert e.serial(action) == pytest.approx(100, abs=50)


@pytest.mark.parametrize("serial", [10, 1000])
def test_cpu_time_of_long_ago_counts_little(serial: int) -> None:
    """All actions have one size, so their run times do not contradict."""
    rng, e, action = random.Random(serial), Estimator(), Action(1, "x", degrees=(1, 2, 4, 8))
    for number in range(800):
        truth = serial if number < 400 else 100
        work = int(rng.lognormvariate(21, .8))
        e.began(action)
        e.ended(action, [(4, run_ns(work, truth, 4))], True, work)
        if number == 399:
            assert abs(e.serial(action) - serial) <= serial // 4 + 10
    assert e.serial(action) == pytest.approx(100, abs=50)


def test_cpu_time_is_not_compared_with_time_in_which_nothing_ran() -> None:
    spans = [(4, 10**9), (8, 10**9)]
    for exec_ns, learned in ((2 * 10**9, 7 * 10**9), (10**9, 0), (0, 0)):
        outcome = Outcome(ActionState.COMPLETED, exec_ns=exec_ns, cpu_ns=7 * 10**9)
        assert cpu_to_learn(outcome, spans) == learned


def test_names_that_are_merged_keep_what_their_cpu_time_says() -> None:
    one, other = Serial(), Serial()
    for each in (one, other):
        for _ in range(12):
            each.add([(4, 10**9)], 0, 10**9)
    other.merge(one)
    assert other.best > 5 * PRIOR
    fresh = Serial()
    fresh.merge(one)
    assert fresh.best == one.best > 5 * PRIOR


def test_cpu_time_on_one_unit_tells_no_serial_fraction() -> None:
    e, action = Estimator(), Action(1, "x", degrees=(1, 2, 4, 8))
    for _ in range(20):
        e.began(action)
        e.ended(action, [(1, 10**9)], True, 10**8)
    assert e.serial(action) == PRIOR


def test_a_wait_in_a_long_run_on_one_unit_is_not_taken_for_serial_work() -> None:
    found = Serial()
    for _ in range(20):  # parallel, but it waits for half a second on its only unit
        found.add([(2, 10**9), (1, 20 * 10**9)], 0, cpu_ns=21_500_000_000)
    assert found.best == PRIOR


def test_the_ledger_learns_from_cpu_time_that_is_complete_only() -> None:
    for at_least, learned in ((0, True), (CPU_AT_LEAST, False)):
        w = World("fcfs:4")
        w.node(4)
        for _ in range(8):
            action = w.submit((4, 8))
            w.plan()
            lease = w.ledger.actions[action].lease
            w.now += 10**9
            w.happen(ev.LeaseFinished(w.now, lease, Outcome(
                ActionState.COMPLETED, exec_ns=10**9, cpu_ns=10**9, at_least=at_least), True))
        assert (w.ledger.estimator.serial(Action(9, "x", degrees=(4, 8))) > 5 * PRIOR) is learned


def test_a_replay_gives_the_same_estimates() -> None:
    w = World("elastic")
    w.node(2)
    for n in range(20):
        w.submit((1, 2) if n % 2 else 1)
    while w.ledger.actions and (w.plan() or w.ledger.leases):
        w.now += 10**8 * (1 + w.now % 7)
        for lease in list(w.ledger.leases.values())[:1]:
            w.finish(lease.action)
        if not w.ledger.leases and not len(w.ledger.ready):
            break
    again = Scheduler(make_placer("fcfs:1"))
    for event in w.events:
        again.handle(event)
    for degrees in ((1,), (1, 2)):
        action = Action(9, "x", degrees=degrees)
        assert again.ledger.estimator.estimate(action) == w.ledger.estimator.estimate(action)
        assert w.ledger.estimator.estimate(action)[1] != UNKNOWN_NS


# ---- laws and figures --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["paper", "elastic"])
@pytest.mark.parametrize("seed", range(10, 22))
def test_learned_durations_violate_no_invariant(seed: int, policy: str) -> None:
    work = workload(seed, 16, ("cpu", "cpu", "service:judge", "service:teacher",
                               "endpoint:search"))
    cluster = Cluster.model_validate(CLUSTER)
    runs = [simulate(work, cluster, make_placer(policy), "learned", check=True)
            for _ in range(2)]
    assert faults(runs[0], work, cluster) == []
    assert [r.line() for r in runs[0].records] == [r.line() for r in runs[1].records]


@pytest.mark.parametrize("seed", range(3))
def test_elastic_violates_no_invariant_behind_drivers_and_a_network(seed: int) -> None:
    work, cluster = workload(seed, 12), Cluster.model_validate(CLUSTER)
    alone = simulate(work, cluster, make_placer("elastic")).figures()
    wired = simulate(work, cluster, make_placer("elastic"), latency_us=0, check=True)
    assert faults(wired, work, cluster) == []
    assert wired.figures()["mean_act_s"] == pytest.approx(alone["mean_act_s"], rel=.05)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared workloads")
@pytest.mark.parametrize(("work", "size", "durations", "at_most"), [
    ("coding-200", "0.5x", "oracle", 1.72),
    pytest.param("coding-200", "0.29x", "oracle", 2.55, marks=pytest.mark.long),
    pytest.param("coding-200", "0.5x", "learned", 1.80, marks=pytest.mark.long),
    ("coding-200", "0.29x", "learned", 2.65),
    ("mopd-512", "0.5x", "oracle", 1.6), ("mopd-512", "0.29x", "oracle", 2.4)])
def test_mean_act_of_elastic_stays_below_the_recorded_bounds(
        work: str, size: str, durations: str, at_most: float) -> None:
    workload_, cluster = (read_workload(SHARED / f"{work}.jsonl"),
                          read_cluster(SHARED / f"cluster-{work}-{size}.json"))
    elastic = simulate(workload_, cluster, make_placer("elastic"), durations).figures()
    assert elastic["mean_act_s"] <= at_most
    if work == "coding-200":
        fcfs = simulate(workload_, cluster, make_placer("fcfs:4")).figures()
        assert elastic["p99_act_s"] <= fcfs["p99_act_s"] and elastic["step_s"] <= 100


def test_many_idle_nodes_are_filled_in_bounded_passes() -> None:
    w = World("elastic")
    for _ in range(40):
        w.node(cpus=4)
    waiting = [w.submit((1,)) for _ in range(200)]
    passes = 0
    while (now := w.scheduler.next_deadline()) <= w.now + 1 or w.scheduler.state.dirty:
        w.now = max(w.now, now)
        before = w.ledger.next_lease
        w.plan()
        passes += 1
        if w.ledger.next_lease == before:
            break
        assert w.ledger.next_lease - before <= STARTS + 4
    assert sum(bool(w.ledger.actions[a].lease) for a in waiting) == 160 and passes >= 160 // 68
    assert all(n.cores.free == 0 for n in w.ledger.up_nodes())


@pytest.mark.parametrize("degrees", [(1,), (1, 2)])
def test_only_actions_that_may_grow_let_a_node_be_looked_at_again(degrees: tuple[int, ...]
                                                                 ) -> None:
    """With nothing to resize and nothing that waits, time alone changes nothing."""
    w = World("elastic")
    w.node(cpus=4)
    for _ in range(3):
        w.submit(degrees)
        w.plan()
        w.now += 1
    assert (w.scheduler.state.place_again_at > 0) == (degrees != (1,))
    w.ledger.check()


def test_the_start_time_of_a_sandbox_process_is_not_learned_as_action_time() -> None:
    w = World("elastic")
    w.node(2)
    first = w.submit(1)
    w.plan()
    w.now += 10**9  # until its host stood; it ran a millisecond of these
    w.happen(ev.LeaseFinished(w.now, w.lease_of(first), Outcome(
        ActionState.COMPLETED, exec_ns=10**6), True))
    action = w.ledger.actions[first].action
    quick = Estimator()
    quick.began(action)
    quick.ended(action, [(1, 10**6)], True)
    assert w.ledger.estimator.estimate(action) == quick.estimate(action)


@pytest.mark.parametrize("place", [0, 1])
def test_an_action_that_moved_the_clock_is_learned_with_at_most_the_elapsed_time(
        place: int) -> None:
    """Holds for actions that began at once and for prefetched ones. Otherwise the scheduler would
    expect all unknown actions to take years and to fit into no allocation."""
    w = World("elastic")
    w.happen(ev.NodeJoined(0, 1, NodeSpec("n", "h", (0,), 64, ahead=8, untrusted=("model",))))
    w.happen(ev.NodesComplete(0, 1))
    actions = [w.submit(1, profile=Profile(1000)) for _ in range(2)]
    w.plan()
    assert w.ledger.leases[w.lease_of(actions[1])].prefetched
    for action in actions[:place]:
        w.finish(action)
    w.now += 10**6
    w.happen(ev.LeaseFinished(w.now, w.lease_of(actions[place]), Outcome(
        ActionState.COMPLETED, exec_ns=1 << 63), True))
    assert w.ledger.estimator.mean("cpu", "never heard of", (1,)) <= UNKNOWN_NS
