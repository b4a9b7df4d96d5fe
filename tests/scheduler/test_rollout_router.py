"""The rollout router: every request is served once, bounds hold, and requests stay where their KV
cache is when that is cheaper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.errors import InfeasibleRequest, InvalidInput
from tangram_hpc.scheduler.routing.rollout_router import (
    ANY,
    PREFILL,
    STAY,
    TRANSFER,
    KvCost,
    RolloutInstance,
    Route,
    Router,
    RouteRequest,
)


def instance(id_: int, bucket: int = 0, *, node: str = "n0", running: int = 2, queue: int = 1,
             context: int = 40_000) -> RolloutInstance:
    degree = 1 << bucket
    return RolloutInstance(id_, bucket, degree, node, running, queue, context,
                           20_000_000 // degree, 100_000 // degree, 100_000 // degree)


PLAIN = KvCost(idle=0, crowded=ANY)  # buckets alone


def router(*instances: RolloutInstance, rules: KvCost = PLAIN) -> Router:
    made = Router(rules)
    for one in instances:
        assert made.add(one) == []
    return made


def test_a_request_goes_to_the_least_loaded_instance_of_its_bucket_then_a_larger() -> None:
    r = router(instance(1), instance(2), instance(3, 1, running=1, queue=0), instance(4, 2))
    went = [r.ask(RouteRequest(i, 0, 100, 1_000)) for i in range(6)]
    assert [w.instance for w in went if w] == [1, 2, 1, 2, 1, 2]  # queues fill evenly
    outward = r.ask(RouteRequest(6, 0, 100, 1_000))
    assert outward is not None and outward.instance == 3
    both = router(instance(1, 0), instance(2, 1, running=1, queue=0), instance(3, 2))
    both.ask(RouteRequest(0, 1, 100, 10))
    up = both.ask(RouteRequest(1, 1, 100, 10))
    assert up is not None and up.instance == 3


def test_the_kv_cache_is_reused_transferred_or_recomputed_by_cost() -> None:
    r = router(instance(1), instance(2), instance(3, 1), instance(4, 1, node="n1"))
    first = r.ask(RouteRequest(9, 0, 1_000, 5_000))
    assert first == Route(9, 1, PREFILL, 100_000_000)
    assert r.left(9) == []
    assert r.ask(RouteRequest(9, 0, 30_000, 5_000)) == Route(9, 1, STAY, 0)
    r.left(9)
    moved = r.ask(RouteRequest(9, 1, 30_000, 20_000))
    assert moved == Route(9, 3, TRANSFER, 10_000_000 + 30_000 * 8_000)
    r.left(9)
    r.ask(RouteRequest(8, 0, 50, 5_000))
    r.left(8)
    again = r.ask(RouteRequest(8, 1, 50, 1_000_000))  # shorter to read than to move
    assert again == Route(8, 3, PREFILL, 50 * 50_000)


def test_a_request_stays_when_moving_its_kv_costs_more_than_it_gains() -> None:
    r = router(instance(1), instance(2, 1))
    r.ask(RouteRequest(1, 0, 30_000, 1_000))
    r.left(1)
    assert r.ask(RouteRequest(1, 1, 30_000, 20)) == Route(1, 1, STAY, 0)
    r.left(1)
    gone = r.ask(RouteRequest(1, 1, 30_000, 20_000))
    assert gone is not None and gone.instance == 2


def test_an_idle_larger_degree_takes_requests_and_a_crowded_one_does_not() -> None:
    # one request lengthens a step of bucket 0 by 1/200
    rules = KvCost(idle=10, crowded=15)
    r = router(instance(1, running=50), instance(2, 1, running=50), rules=rules)
    went = [r.ask(RouteRequest(i, 0, 100, 1_000)) for i in range(8)]
    # 0 and 1 to the idle larger one, then the own bucket until it is crowded, then outwards
    assert [w.instance for w in went if w] == [2, 2, 1, 1, 1, 1, 2, 2]
    late = r.ask(RouteRequest(8, 0, 100, 1_000))  # all are crowded: the own bucket again
    assert late is not None and late.instance == 1
    r.check()


def test_a_larger_degree_keeps_the_requests_whose_kv_it_holds() -> None:
    r = router(instance(1), instance(2, 1, running=4))
    r.ask(RouteRequest(1, 1, 20_000, 20_000))
    r.left(1)
    for i in range(2, 5):
        r.ask(RouteRequest(i, 1, 100, 100))
    assert r.ask(RouteRequest(1, 0, 21_000, 3_000)) == Route(1, 2, STAY, 0)


def test_the_router_raises_for_infeasible_requests_and_queues_the_others() -> None:
    r = router(instance(1, context=1_000, running=1, queue=0))
    with pytest.raises(InfeasibleRequest, match="larger degree"):
        r.ask(RouteRequest(1, 0, 1_001, 5))
    assert r.ask(RouteRequest(2, 0, 10, 5)) is not None
    assert r.pressure == 1000
    assert r.ask(RouteRequest(3, 0, 10, 5)) is None and r.waiting == 1 and r.pressure == 2000
    assert [p.request for p in r.left(2)] == [3]
    with pytest.raises(InvalidInput, match="exists already"):
        r.add(instance(1))
    with pytest.raises(InvalidInput, match="running_max"):
        r.add(instance(2, running=0))


def test_removing_an_instance_returns_the_requests_that_ran_on_it() -> None:
    r = router(instance(1), instance(2, queue=0, running=1))
    for i in range(4):
        r.ask(RouteRequest(i, 0, 10, 10))
    there = r.remove(1)
    assert len(there) == 3
    assert [r.ask(RouteRequest(i, 0, 10, 10)) for i in there] == [None] * 3
    placed = r.add(instance(5, running=4))
    assert [p.request for p in placed] == there and all(p.how == PREFILL for p in placed)
    r.check()


steps = st.lists(st.tuples(st.sampled_from(["ask", "leave", "end", "add", "remove"]),
                           st.integers(0, 40), st.integers(0, 3)), max_size=80)


@given(steps)
@settings(max_examples=80, deadline=None)
def test_the_router_serves_every_request_once_on_any_history(moves: list) -> None:
    r = router(instance(0), instance(1, 1, queue=0))
    state: dict[int, str] = {}  # request -> waits, runs, idle
    served: dict[int, int] = {}
    asked: dict[int, int] = {}
    up, next_id = [0, 1], 2

    def placed(routes: list[Route]) -> None:
        for route in routes:
            assert state[route.request] == "waits" and route.instance in up
            state[route.request] = "runs"
            served[route.request] = served.get(route.request, 0) + 1

    def ask(request: int, bucket: int) -> None:
        state[request] = "waits"
        asked[request] = asked.get(request, 0) + 1
        route = r.ask(RouteRequest(request, bucket, 100, 5_000))
        placed([route] if route else [])

    for what, n, bucket in moves:
        if what == "ask" and state.get(n, "idle") == "idle":
            ask(n, bucket)
        elif what == "leave" and state.get(n) == "runs":
            state[n] = "idle"
            placed(r.left(n))
        elif what == "end" and n in state:
            asked[n] -= state.pop(n) == "waits"
            placed(r.ended(n))
        elif what == "add" and len(up) < 6:
            up.append(next_id)
            next_id += 1
            placed(r.add(instance(up[-1], bucket, running=1 + n % 3, queue=n % 2)))
        elif what == "remove" and len(up) > 1:
            for request in r.remove(up.pop(n % len(up))):
                ask(request, bucket)
        r.check()
        assert sum(r.load(i) for i in up) == sum(s == "runs" for s in state.values())
        assert r.waiting == sum(s == "waits" for s in state.values())
    for request in list(state):  # drain: nobody is forgotten
        if state.get(request) == "runs":
            del state[request]
            placed(r.ended(request))
    while any(s == "runs" for s in state.values()):
        request = next(n for n, s in state.items() if s == "runs")
        del state[request]
        placed(r.ended(request))
    assert r.waiting == 0 and asked == {n: served.get(n, 0) for n in asked}
