"""Endpoints in the scheduler: token buckets and shares on any history, and grants that clients
hold."""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, replies, started
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.client.endpoints.client_rate_limit import ClientRateLimit
from tangram_hpc.config.endpoints import endpoint_spec
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import FALTERED, MICRO, THROTTLED, EndpointSpec, pushed_by
from tangram_hpc.domain.states import ENDED, ActionState
from tangram_hpc.errors import InvalidInput, Throttled
from tangram_hpc.scheduler.policy.admission import refusal
from tangram_hpc.scheduler.policy.declarations import declaration_of_endpoint
from tangram_hpc.scheduler.policy.lease_reports import reported_by_client
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.scheduler.state import rate_limit as rl

SECOND = 10**9
MS = 10**6
SPEC = EndpointSpec("search", 2, 10 * MICRO, 3 * MICRO)

SPECS = st.builds(EndpointSpec, st.just("x"), st.integers(1, 40), st.integers(1, 200 * MICRO),
                  st.integers(MICRO, 60 * MICRO))
STEPS = st.lists(st.tuples(st.integers(0, 3 * SECOND // 2),
                           st.sampled_from(["draw", "draw", "good", "bad", "falter", "throttle"]),
                           st.integers(0, 2 * SECOND)), max_size=120)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SPECS, STEPS)
def test_an_endpoint_never_exceeds_rate_burst_and_concurrency_in_any_window(
        spec: EndpointSpec, steps) -> None:
    """Concurrency never exceeds the declared limit, whatever the endpoint answers. The share stays
    within its bounds, and no call starts while the endpoint is closed."""
    entry, now = rl.full(spec, 0), 0
    inside: list[int] = []
    starts: list[int] = []
    for step, what, wish in steps:
        now += step
        if what == "draw":
            while entry.free > 0 and entry.tokens(now):
                assert now >= entry.closed_until
                entry.draw(now)
                inside.append(now)
                starts.append(now)
        elif inside:
            granted_at, share, cut_at = inside.pop(0), entry.share, entry.cut_at
            entry.done()
            if what in ("good", "bad"):
                entry.ended(granted_at, now, what == "good", 5)
                gained = rl.STEP if what == "good" and granted_at > cut_at else 0
                assert entry.share == min(rl.WHOLE, share + gained)
            else:
                how = THROTTLED if what == "throttle" else FALTERED
                entry.pushed_back(granted_at, now, now + wish, how)
                if granted_at <= cut_at:
                    assert entry.share == share  # of an episode that was known
                else:
                    assert entry.share == max(rl.LEAST, share // 2 if how == THROTTLED
                                              else share * 7 // 8)
                assert entry.tokens(now + wish - 1) == 0 or not wish
        assert 0 <= entry.busy == len(inside) <= spec.concurrency
        assert rl.LEAST <= entry.share <= rl.WHOLE and 1 <= entry.concurrency <= spec.concurrency
        assert 0 <= entry.level <= spec.burst_micro * SECOND
        assert 0 < entry.rate_micro <= spec.rate_micro
        at = entry.next_token_at(now)
        assert at >= now and entry.tokens(at) >= 1 and (at == now or entry.tokens(at - 1) == 0)
    for first, since in enumerate(starts):  # every window that begins with a start
        for last in range(first, len(starts)):
            most = spec.burst_micro * SECOND + (starts[last] - since) * spec.rate_micro
            assert (last - first + 1) * rl.TOKEN <= most


def test_push_back_of_concurrent_calls_cuts_the_share_once_and_success_restores_it() -> None:
    entry = rl.full(EndpointSpec("x", 64, 50 * MICRO, 5 * MICRO), 0)
    for _ in range(5):
        entry.draw(0)
    for later in range(1, 6):  # five calls that were under way together
        entry.done()
        entry.pushed_back(0, later * MS, SECOND, THROTTLED)
    assert entry.share == rl.WHOLE // 2 and entry.concurrency == 32
    assert entry.tokens(SECOND - 1) == 0 and entry.next_token_at(MS) == SECOND + 40 * MS
    now, served = SECOND, 0
    while entry.share < rl.WHOLE:
        now = entry.next_token_at(now)
        entry.draw(now)
        entry.done()
        entry.ended(now, now + MS, True, 0)
        served += 1
    # what an episode costs beyond its own closing: 8 of 50 a second, for half a second
    assert served == 16 and 50 * (now - SECOND) < 25 * SECOND
    assert entry.rate_micro == 50 * MICRO


def test_push_back_on_an_endpoint_without_a_rate_cuts_its_concurrency() -> None:
    entry = rl.full(EndpointSpec("x", 8), 0)
    entry.draw(5)
    entry.done()
    entry.pushed_back(5, 6, 6, THROTTLED)
    assert (entry.free, entry.tokens(6), entry.next_token_at(6)) == (4, rl.UNLIMITED, 6)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 2000 * MICRO), st.integers(MICRO, 20 * MICRO),
       st.lists(st.integers(0, SECOND), max_size=150))
def test_call_starts_keep_to_the_token_bucket_whenever_grants_arrive(
        rate: int, burst: int, steps) -> None:
    pace, now, starts = ClientRateLimit(), 0, []
    gap = -(-SECOND * MICRO // rate)
    for step in steps:
        now += step if step % 3 else 0  # a third of them are seen together
        start = pace.start_at(now, rate, burst)
        if start >= 0:
            assert now <= start <= now + max(gap, 5 * MS)
            starts.append(start)
    for first in range(len(starts)):
        for last in range(first, len(starts)):  # a whole ns is lost or won by each rounding
            room = burst * SECOND + (starts[last] - starts[first] + 1) * rate
            assert (last - first + 1) * rl.TOKEN <= room


def test_grants_that_arrive_together_start_at_the_endpoint_rate() -> None:
    limit = ClientRateLimit()  # 600 calls a second, one at once: 1.67 ms between two
    starts = [limit.start_at(0, 600 * MICRO, MICRO) for _ in range(9)]
    assert starts == [0, 1_666_667, 3_333_334] + [-1] * 6


@pytest.mark.parametrize(("rates", "burst"), [((1, 1000), 1), ((1, 1000), 10), ((1, 50), 10),
                                              ((100, 1000), 100)])
def test_a_rate_that_rises_is_used_at_once(rates: tuple[int, int], burst: int) -> None:
    limit, (low, high) = ClientRateLimit(), rates
    for _ in range(burst + 3):
        limit.start_at(0, low * MICRO, burst * MICRO)
    starts = [limit.start_at(now * MS, high * MICRO, burst * MICRO) for now in range(1, 200)]
    kept = [start for start in starts if start >= 0]
    assert starts[0] >= 0 and len(kept) >= 150 * high // 1000
    assert all(later - kept[0] >= (n - burst) * SECOND // high for n, later in enumerate(kept))


def test_a_process_that_was_stopped_returns_the_grants_it_cannot_start_soon() -> None:
    pace = ClientRateLimit()
    starts = [pace.start_at(7 * SECOND, 50 * MICRO, 3 * MICRO) for _ in range(20)]
    assert starts == [7 * SECOND] * 3 + [7 * SECOND + 20 * MS] + [-1] * 16
    assert pace.start_at(7 * SECOND + 40 * MS, 50 * MICRO, 3 * MICRO) == 7 * SECOND + 40 * MS
    assert pace.start_at(5, 0, MICRO) == 5


# ---- grants ------------------------------------------------------------------------------------


def world_with_endpoint(spec: EndpointSpec = SPEC, placer: str = "elastic") -> World:
    w = World(placer)
    w.happen(ev.EndpointDeclared(0, spec))
    return w


def ask_grant(w: World, name: str = "search") -> int:
    w.now += 1
    action = Action(w.id(), name, Kind.GRANT, key="endpoint:" + name)
    w.happen(ev.ActionSubmitted(w.now, action))
    return action.id


def end(w: World, action: int, state: ActionState, *, lease: int | None = None, pushed: int = 0,
        wait_ns: int = 0, client: int = 1) -> list[de.Decision]:
    lease = w.lease_of(action) if lease is None else lease
    w.now += 1
    made: list[de.Decision] = []
    outcome = Outcome(state, cost_micro=7, pushed=pushed, retry_after_ns=wait_ns)
    for fact in reported_by_client(w.ledger, client, action, lease, outcome, w.now):
        made += w.happen(fact)
    return made


@pytest.mark.parametrize("placer", ["first-fit", "fcfs:4", "static:2", "paper", "elastic"])
def test_an_endpoint_grant_needs_no_node_and_frees_its_slot_at_its_end(placer: str) -> None:
    w = world_with_endpoint(placer=placer)
    calls = [ask_grant(w) for _ in range(4)]
    assert started(w.plan()) == calls[:2]
    assert {d.node for d in w.decisions if isinstance(d, de.StartLease)} == {0}
    assert replies(end(w, calls[0], ActionState.COMPLETED)) == {calls[0]: ActionState.COMPLETED}
    assert started(w.plan()) == [calls[2]]
    entry = w.ledger.endpoints["search"]
    assert (entry.busy, entry.calls, entry.cost_micro) == (2, 1, 7)
    assert end(w, calls[0], ActionState.COMPLETED, lease=1) == []  # said twice
    assert end(w, calls[1], ActionState.COMPLETED, client=2) == []  # not its own
    assert end(w, calls[1], ActionState.COMPLETED, lease=99) == []  # fenced


def test_a_call_that_was_pushed_back_keeps_its_place_until_the_endpoint_opens() -> None:
    w = world_with_endpoint()
    first, second, third = (ask_grant(w) for _ in range(3))
    w.plan()
    until = w.now + 1 + SECOND
    assert end(w, first, ActionState.PREEMPTED, pushed=THROTTLED, wait_ns=SECOND) == []
    assert replies(end(w, second, ActionState.COMPLETED)) and started(w.plan()) == []
    entry = w.ledger.endpoints["search"]
    assert entry.closed_until == until and entry.share == rl.WHOLE // 2
    assert w.scheduler.next_deadline() == until + 200 * MS  # its bucket begins empty, at 5/s
    w.now = until
    assert started(w.plan()) == []
    w.now = until + 200 * MS
    assert started(w.plan()) == [first]
    assert w.ledger.actions[first].attempt == 2
    w.now += 200 * MS
    assert started(w.plan()) == []  # half the slots: one
    end(w, first, ActionState.COMPLETED)
    assert started(w.plan()) == [third]


def test_a_timed_out_or_cancelled_call_ends_with_or_without_its_grant() -> None:
    w = world_with_endpoint()
    granted, crossed, waiting, cancelled = (ask_grant(w) for _ in range(4))
    w.plan()
    assert replies(end(w, waiting, ActionState.TIMEOUT, lease=0)) == {waiting: ActionState.TIMEOUT}
    assert replies(end(w, crossed, ActionState.TIMEOUT, lease=0)) == {crossed: ActionState.TIMEOUT}
    assert w.ledger.endpoints["search"].busy == 1
    assert replies(w.happen(ev.ActionCancelled(w.now, granted, "by its client"))) == {
        granted: ActionState.CANCELLED}
    assert replies(w.happen(ev.ActionCancelled(w.now, cancelled, "by its client"))) == {
        cancelled: ActionState.CANCELLED}
    assert w.ledger.endpoints["search"].busy == 0 and not w.ledger.leases


@pytest.mark.parametrize("bye", [True, False])
def test_a_lost_client_gives_its_slots_back(bye: bool) -> None:
    w = world_with_endpoint()
    calls = [ask_grant(w) for _ in range(3)]
    w.plan()
    w.happen(ev.ClientJoined(w.now, 2, "uid-2", "other", 0, 1, "socket"))
    w.client = 2
    other = ask_grant(w)
    w.happen(ev.ClientLeft(w.now, 1, bye, w.now if bye else w.now + SECOND))
    if not bye:
        assert started(w.plan()) == []  # it may come back
        w.now += SECOND
    assert started(w.plan()) == [other]
    assert not set(calls) & set(w.ledger.actions) and 1 not in w.ledger.clients


def test_a_client_whose_link_is_lost_gets_no_grant_until_it_reconnects() -> None:
    w = world_with_endpoint()
    mine = [ask_grant(w), ask_grant(w)]
    w.happen(ev.ClientLeft(w.now, 1, False, w.now + SECOND))
    w.happen(ev.ClientJoined(w.now, 2, "uid-2", "other", 0, 1, "socket"))
    w.client = 2
    other = ask_grant(w)
    assert started(w.plan()) == [other]
    w.happen(ev.ClientJoined(w.now, 1, "uid-1", "test", 0, 1, "socket"))
    assert started(w.plan()) == mine[:1]


def test_an_infeasible_grant_or_a_changed_endpoint_in_use_is_refused_in_one_line() -> None:
    w = world_with_endpoint()
    grant = Action(1, "x", Kind.GRANT, key="endpoint:poet")
    assert "register_endpoint" in refusal(w.ledger, w.scheduler.state.placer, grant)
    odd = Action(1, "x", Kind.GRANT, key="endpoint:search", mem_mib=5)
    assert "holds none" in refusal(w.ledger, w.scheduler.state.placer, odd)
    assert declaration_of_endpoint(w.ledger, SPEC, w.now) == ([], "")
    other = EndpointSpec("search", 4, 10 * MICRO, 3 * MICRO)
    call = ask_grant(w)
    w.plan()
    facts, why = declaration_of_endpoint(w.ledger, other, w.now)
    assert facts == [] and "in use with concurrency 2, rate 10/s" in why
    end(w, call, ActionState.COMPLETED)
    facts, why = declaration_of_endpoint(w.ledger, other, w.now)
    assert why == "" and len(facts) == 1
    before = w.ledger.endpoints["search"].level_at(w.now)
    w.happen(facts[0])
    entry = w.ledger.endpoints["search"]
    assert entry.spec == other and entry.level_at(w.now) == before  # no fuller by that


@pytest.mark.parametrize(("fields", "told"), [
    ({"concurrency": 0}, "concurrency"), ({"rate": -1}, "rate"), ({"burst": 0.5}, "burst"),
    ({"speed": 3}, "speed"), ({"jitter_ms": "x"}, "jitter_ms"), (7, "not a table"),
    ({"concurrency": True}, "concurrency: must be a number"), ({"burst": False}, "burst"),
    ({"rate": 4e-7}, "rate: must be 0 for no limit, or at least 1e-06")])
def test_a_wrong_quota_names_its_field(fields, told: str) -> None:
    with pytest.raises(InvalidInput, match=rf"endpoint search: .*{told}"):
        endpoint_spec("search", fields)


@pytest.mark.parametrize("wait", [None, "soon", float("nan"), -1.0,
                                  pytest.param(10**400, id="huge")])
def test_a_wait_that_is_no_number_of_seconds_counts_as_none(wait) -> None:
    failure = Throttled()
    failure.retry_after = wait
    assert pushed_by(failure) == (THROTTLED, 0)


def test_the_brokers_token_bucket_is_reduced_by_the_jitter() -> None:
    assert endpoint_spec("x", {"rate": 50, "burst": 5, "jitter_ms": 40}).burst_micro == 3 * MICRO
    assert endpoint_spec("x", {"rate": 50, "jitter_ms": 0}).burst_micro == 50 * MICRO
    assert endpoint_spec("x", {"rate": 50, "burst": 1}).burst_micro == MICRO


@pytest.mark.parametrize("seed", range(6))
def test_random_push_back_violates_no_invariant_and_replays(seed: int) -> None:
    rng = random.Random(seed)
    w = world_with_endpoint(EndpointSpec("search", 5, 30 * MICRO, 4 * MICRO))
    w.node(cpus=2)
    submitted: list[int] = []
    for _ in range(400):
        grant = rng.random() < 0.8
        submitted.append(ask_grant(w) if grant else w.submit(1, key="endpoint:search"))
        w.now += rng.randrange(SECOND // 10)
        held = list(w.ledger.leases.values())
        if held and rng.random() < 0.9:
            lease = rng.choice(held)
            if lease.node:
                w.finish(lease.action)
            else:
                end(w, lease.action, rng.choice([ActionState.COMPLETED, ActionState.PREEMPTED,
                                                 ActionState.FAILED]),
                    lease=rng.choice([lease.lease] * 5 + [0]),
                    pushed=rng.choice([0, 0, FALTERED, THROTTLED]),
                    wait_ns=rng.choice([0, SECOND // 3]))
        w.plan()
    w.drain()
    assert all(w.ledger.actions[a].state in ENDED for a in submitted)
    again = Scheduler(w.scheduler.state.placer)
    for event in w.events:
        again.handle(event)
    assert again.ledger.actions == w.ledger.actions
    assert again.ledger.endpoints == w.ledger.endpoints


def test_an_endpoint_that_is_declared_again_keeps_its_calls_and_its_share() -> None:
    """A broker that was started again declares the endpoints of its config file."""
    endpoint = rl.full(SPEC, 0)
    endpoint.draw(0)
    endpoint.pushed_back(0, 1, 2, FALTERED)
    assert rl.declared_again(endpoint, SPEC, 5) == endpoint
    other = rl.declared_again(endpoint, EndpointSpec("search", 3, 10 * MICRO, 3 * MICRO), 5)
    assert other.busy == 1 and other.free == 2


def test_a_clock_that_was_set_back_does_not_stop_the_refill() -> None:
    world = World()
    world.happen(ev.EndpointDeclared(3600 * SECOND, SPEC))
    endpoint = world.ledger.endpoints[SPEC.name]
    for _ in range(3):
        endpoint.draw(3600 * SECOND)
        endpoint.done()
    assert not endpoint.tokens(3600 * SECOND)
    world.happen(ev.BrokerStarted(10 * SECOND, "7", "elastic", "none"))
    assert endpoint.tokens(11 * SECOND) == 3
    assert endpoint.next_token_at(10 * SECOND) < 11 * SECOND
