"""Intervals of starts and ends: how often they hold, and when none is stated."""

from __future__ import annotations

import pickle
import random
from collections import Counter

import pytest
from helpers.builders import World

from tangram_hpc.broker.queries.explain import explain
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind, Profile
from tangram_hpc.domain.ids import show
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler import intervals
from tangram_hpc.scheduler.forecast import expected_end, forecast
from tangram_hpc.scheduler.intervals import (
    FUTURES,
    LEVEL,
    StartInterval,
    WorkCurve,
    end_interval,
    start_interval,
)
from tangram_hpc.scheduler.state.estimator import Sizes
from tangram_hpc.scheduler.state.speed import octaves

S = 10**9


def drawn(rng: random.Random) -> int:
    return round(10 * S * rng.lognormvariate(0, 0.8))


def curve(works: list[int], running: list[int]) -> WorkCurve:
    sizes = Sizes()
    for work in works:
        if sizes.add(work, octaves(work)):
            sizes.renew()
    mean = sum(works) // len(works)
    return WorkCurve(sizes, mean, Counter(map(octaves, running)))


@pytest.mark.parametrize("done", [0, 5 * S, 30 * S])
def test_quantiles_of_the_work_hold_at_their_level(done: int) -> None:
    rng = random.Random(1)
    known = curve([drawn(rng) for _ in range(40_000)], [])
    low, high = (known.quantile(chance, done) for chance in (0.1, 0.9))
    fresh = [work for work in (drawn(rng) for _ in range(20_000)) if work > done]
    assert sum(low <= work <= high for work in fresh) / len(fresh) == pytest.approx(0.8, abs=0.07)


def test_running_actions_move_the_quantiles() -> None:
    rng = random.Random(2)
    works = [drawn(rng) for _ in range(400)]
    ended = [work for work in works if work < 8 * S]  # all began 8 s ago
    alone = curve(ended, [])
    both = curve(ended, [8 * S] * (len(works) - len(ended)))
    assert alone.quantile(0.9, 0) < 9 * S < 20 * S < both.quantile(0.9, 0)
    assert both.quantile(0.3, 0) == pytest.approx(sorted(works)[120], rel=0.2)


def test_beyond_all_that_is_known_longer_works_get_ever_rarer() -> None:
    known = curve([S] * 20, [])
    far = 100 * S
    assert known.quantile(0.5, far) == 2 * far and known.quantile(0.9, far) == 10 * far


def learned_world(rng: random.Random) -> tuple[World, dict[int, int]]:
    """A world with one node of two CPUs on which 60 actions have ended and more wait; the works of
    all."""
    world, works = World("fcfs:1"), {}
    world.node(2)
    for _ in range(60):
        works[world.submit(1)] = drawn(rng)
    play(world, works, 60)
    for _ in range(6):
        works[world.submit(1)] = drawn(rng)
    world.plan()
    return world, works


def play(world: World, works: dict[int, int], count: int) -> dict[int, int]:
    """Lets this many actions end; returns when actions ended."""
    ends: dict[int, int] = {}
    while len(ends) < count:
        world.plan()
        at, number = min((lease.granted_at + works[lease.action], number)
                         for number, lease in world.ledger.leases.items())
        lease = world.ledger.leases[number]
        world.now = max(at, world.now)
        ends[lease.action] = world.now
        world.happen(ev.LeaseFinished(world.now, number, Outcome(
            ActionState.COMPLETED, exec_ns=world.now - lease.granted_at), True))
    return ends


def test_starts_and_ends_lie_within_their_intervals_about_as_often_as_stated() -> None:
    inside = Counter()
    for seed in range(40):
        world, works = learned_world(random.Random(seed))
        asked = max(works)
        told = start_interval(world.scheduler, asked, world.now,
                              forecast(world.scheduler, asked, world.now))
        assert told.start is not None and told.end is not None and not told.why
        running = next(iter(world.ledger.leases.values()))
        bounds = end_interval(world.ledger, running, world.now)
        assert bounds is not None
        ends = play(world, works, 6)
        inside["start"] += told.start[0] <= ends[asked] - works[asked] <= told.start[1]
        inside["end"] += told.end[0] <= ends[asked] <= told.end[1]
        inside["running"] += bounds[0] <= ends[running.action] <= bounds[1]
    assert LEVEL == 0.8
    assert all(26 <= count <= 39 for count in inside.values()) and len(inside) == 3, inside


def test_an_expected_time_lies_within_its_interval() -> None:
    for seed in range(20):
        world, works = learned_world(random.Random(seed))
        for asked in sorted(works)[-4:]:
            expected = forecast(world.scheduler, asked, world.now)
            told = start_interval(world.scheduler, asked, world.now, expected)
            assert told.start is not None and told.end is not None
            assert expected.at is not None and expected.end is not None
            assert told.start[0] <= expected.at <= told.start[1]
            assert told.end[0] <= expected.end <= told.end[1]


def test_a_mean_that_few_long_works_make_lies_within_the_interval_of_an_end() -> None:
    world = World("fcfs:1")
    world.node(1)
    for work in [S] * 40 + [2000 * S]:
        action = world.submit(1)
        world.plan()
        world.now += work
        world.finish(action)
    runs = world.submit(1)
    world.plan()
    lease = world.ledger.leases[world.lease_of(runs)]
    bounds = end_interval(world.ledger, lease, world.now)
    end = expected_end(world.ledger, lease, world.now)
    assert bounds is not None and end is not None and bounds[0] <= end <= bounds[1]


def test_the_same_question_has_the_same_answer_and_changes_nothing() -> None:
    world, works = learned_world(random.Random(3))

    def state() -> tuple[str, bytes]:
        learned = vars(world.ledger.estimator)
        return repr(world.ledger), pickle.dumps({k: v for k, v in learned.items() if k != "_memo"})

    before = state()
    asked, now = max(works), world.now
    told = forecast(world.scheduler, asked, now)
    first = start_interval(world.scheduler, asked, now, told)
    assert first == start_interval(world.scheduler, asked, now, told)
    assert state() == before


def test_an_interval_is_unknown_where_a_class_is_unknown_and_a_point_where_profiles_tell() -> None:
    world = World("fcfs:1")
    world.node(1)
    first = world.submit(1)
    waits = world.submit(1)
    world.plan()
    told = start_interval(world.scheduler, waits, world.now,
                          forecast(world.scheduler, waits, world.now))
    assert told.start is None and told.end is None and "unknown" in told.why
    lease = world.ledger.leases[world.lease_of(first)]
    assert end_interval(world.ledger, lease, world.now) is None

    sure = World("fcfs:1")
    sure.node(1)
    first, waits = (sure.submit(1, profile=Profile(2 * S)) for _ in range(2))
    sure.plan()
    ahead = forecast(sure.scheduler, waits, sure.now)
    told = start_interval(sure.scheduler, waits, sure.now, ahead)
    assert told.start == (ahead.at, ahead.at) and told.end == (ahead.end, ahead.end)
    assert ahead.at is not None and ahead.end == ahead.at + 2 * S


def test_no_interval_is_computed_far_ahead() -> None:
    world = World("fcfs:1")
    world.node(1)
    waits = [world.submit(1, profile=Profile(S)) for _ in range(900)][-1]
    told = forecast(world.scheduler, waits, world.now)
    assert told.at is not None
    assert "too many events" in start_interval(world.scheduler, waits, world.now, told).why


def submitted(world: World, name: str) -> int:
    """Submits an action of one CPU with a name."""
    action = Action(world.id(), name)
    world.now += 1
    world.happen(ev.ActionSubmitted(world.now, action))
    return action.id


def ended(world: World, *names: str) -> None:
    """Lets actions with these names run and end, one after the other."""
    for name in names:
        action = submitted(world, name)
        world.plan()
        world.finish(action)
        world.happen(ev.ActionAcknowledged(world.now, (action,)))


def asked(world: World, action: int) -> StartInterval:
    return start_interval(world.scheduler, action, world.now,
                          forecast(world.scheduler, action, world.now))


def test_a_lease_whose_action_is_forgotten_while_its_node_cleans_up_tells_nothing() -> None:
    world = World("fcfs:1")
    world.node(2)
    ended(world, *["x"] * 3)
    gone, runs, waits = (submitted(world, "x") for _ in range(3))
    world.plan()
    world.finish(gone, clean=False)
    world.happen(ev.ActionAcknowledged(world.now, (gone,)))
    assert gone in [lease.action for lease in world.ledger.leases.values()]
    assert gone not in world.ledger.actions
    assert end_interval(world.ledger, world.ledger.leases[world.lease_of(runs)], world.now)
    assert asked(world, waits).start is not None
    assert explain(world.scheduler, world.now, show(waits))["start"]["between_s"] is not None


def test_a_class_that_would_become_known_ahead_stays_unknown() -> None:
    """The seventeenth variant of a template joins the others when it starts, not before."""
    world = World("fcfs:1")
    world.node(1)
    ended(world, *[f"test-{n}" for n in range(16)])
    submitted(world, "test-0")
    waits = submitted(world, "test-99")
    world.plan()
    told = asked(world, waits)
    assert told.start is not None and told.end is None


def test_all_names_of_a_class_have_one_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a future are all drawn alike, and few are computed."""
    world = World("fcfs:1")
    world.node(60)
    ended(world, *[f"step-{n}" for n in range(40)])
    waits = [submitted(world, f"step-{n}") for n in range(61)][-1]
    world.plan()
    made = []
    monkeypatch.setattr(intervals, "WorkCurve", lambda *of: made.append(of) or WorkCurve(*of))
    assert asked(world, waits).start is not None
    assert len(made) <= FUTURES


def test_a_file_operation_in_flight_hides_no_interval() -> None:
    world = World("fcfs:1")
    world.node(1)
    ended(world, *["x"] * 3)
    session = world.session()
    world.plan()
    world.happen(ev.SessionReady(world.now, session))
    submitted(world, "x")
    world.plan()
    world.now += 1
    write = Action(world.id(), "write", Kind.FILE, (0,), session=session)
    world.happen(ev.ActionSubmitted(world.now, write))
    world.plan()
    assert world.ledger.actions[write.id].lease
    assert asked(world, submitted(world, "x")).start is not None


def test_calls_of_a_service_of_which_nothing_is_known_hide_no_interval_of_cores() -> None:
    world = World("fcfs:1")
    world.node(1, gpus=1)
    world.happen(ev.ServiceDeclared(world.now, ServiceSpec("judge")))
    ended(world, *["x"] * 3)
    calls = [Action(world.id(), "judge", Kind.CALL, key="service:judge") for _ in range(2)]
    for call in calls:
        world.happen(ev.ActionSubmitted(world.now, call))
    submitted(world, "x")
    world.plan()
    assert world.ledger.actions[calls[0].id].lease, "one call runs, one waits"
    waits = submitted(world, "x")
    assert asked(world, waits).start is not None
    assert forecast(world.scheduler, waits, world.now).rests_on == {"learned": 1}
    assert "unknown" in forecast(world.scheduler, calls[1].id, world.now).why


def test_a_waiting_action_of_both_kinds_carries_what_is_unknown_over_to_the_cores() -> None:
    """It may take the core once its GPU is free, in front of the action that is asked about."""
    world = World("fcfs:1")
    world.node(1, gpus=1)
    world.happen(ev.ServiceDeclared(world.now, ServiceSpec("judge")))
    ended(world, *["x"] * 3)
    call = Action(world.id(), "judge", Kind.CALL, key="service:judge")
    world.happen(ev.ActionSubmitted(world.now, call))
    submitted(world, "x")
    world.plan()
    world.submit(1, gpus=1)
    told = asked(world, submitted(world, "x"))
    assert told.start is None and "nothing is known" in told.why


def test_a_session_that_waits_rests_on_what_holds_cores_and_memory() -> None:
    world = World("fcfs:1")
    world.node(1, mem=100)
    world.submit(1, mem_mib=95)
    world.plan()
    session = world.session(mem=50)
    write = Action(world.id(), "write", Kind.FILE, (0,), session=session)
    world.happen(ev.ActionSubmitted(world.now, write))
    world.plan()
    assert forecast(world.scheduler, write.id, world.now).rests_on == {"unknown": 1}


def test_an_action_without_a_session_rests_on_what_runs_on_reserved_cores() -> None:
    """The lease itself holds no core. Its session does, and may close after the action."""
    world = World("static:2")
    world.node(2)
    session = world.session()
    world.plan()
    world.happen(ev.SessionReady(world.now, session))
    runs = world.submit(2, session=session)
    world.plan()
    assert world.ledger.leases[world.lease_of(runs)].reserved
    assert forecast(world.scheduler, world.submit(1), world.now).rests_on == {"unknown": 1}


def test_no_end_lies_beyond_the_limit_on_the_run_time() -> None:
    world = World("fcfs:1")
    world.node(1)
    for _ in range(3):
        action = world.submit(1)
        world.plan()
        world.now += 10 * S
        world.finish(action)
    runs, waits = world.submit(1, timeout_ns=2 * S), world.submit(1)
    world.plan()
    lease = world.ledger.leases[world.lease_of(runs)]
    bounds, told = end_interval(world.ledger, lease, world.now), asked(world, waits)
    assert bounds is not None and bounds[1] <= lease.granted_at + 2 * S
    assert told.start is not None and told.start[1] <= lease.granted_at + 2 * S
