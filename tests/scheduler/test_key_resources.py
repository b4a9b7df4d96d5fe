"""Key resources other than CPUs: the ready queue, GPU blocks, endpoint quotas, resizes and parallel
sessions."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from helpers.builders import World, started

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.service import MICRO, EndpointSpec, ServiceSpec
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState, SessionState
from tangram_hpc.scheduler.placement.placers.base import Grant, Placement, Resizing
from tangram_hpc.scheduler.placement.placers.static import assign_gpus
from tangram_hpc.scheduler.policy.admission import refusal
from tangram_hpc.scheduler.state.gpu_blocks import GpuSet
from tangram_hpc.scheduler.state.queue import CPU, GPU, NOTHING, ReadyQueue, TagHeap
from tangram_hpc.scheduler.state.rate_limit import EndpointEntry, full
from tangram_hpc.scheduler.state.tenant_use import Tenants

SECOND = 10**9


def world_with_services(placer: str = "first-fit", gpus: int = 8, nodes: int = 1) -> World:
    """A world with two services and an endpoint."""
    w = World(placer)
    for name in ("judge", "teacher"):
        w.happen(ev.ServiceDeclared(0, ServiceSpec(name, restore_ns=SECOND)))
    w.happen(ev.EndpointDeclared(0, EndpointSpec("search", 2, 4 * MICRO, 3 * MICRO)))
    for _ in range(nodes):
        w.node(cpus=4, gpus=gpus)
    return w


@pytest.mark.parametrize("seed", range(5))
def test_a_tag_heap_walks_in_order_after_any_removal_or_move(seed: int) -> None:
    rng, turns, model = random.Random(seed), TagHeap[int](), dict[int, int]()
    for _ in range(3000):
        if model and rng.random() < 0.48:
            turn = rng.choice([min(model), *list(model)[:3]])
            to = rng.randrange(1, 10**6)
            if rng.random() < 0.3 and to not in model:
                turns.move(turn, to)
                model[to] = model.pop(turn)
            else:
                assert turns.drop(turn) == model.pop(turn)
        else:
            turn = rng.randrange(1, 10**6)
            if turn not in model:
                model[turn] = turn * 2
                turns.add(turn, turn * 2)
        if rng.random() < 0.02:
            assert list(turns.walk()) == sorted(model.items())
            assert not model or turns.first() == min(model)


@pytest.mark.parametrize("seed", range(5))
def test_a_walk_of_the_ready_queue_is_in_order_and_can_skip_whole_shapes(seed: int) -> None:
    rng, queue = random.Random(seed), ReadyQueue(Tenants())
    waiting: dict[int, tuple[int, object]] = {}
    for number in range(1, 400):
        action = Action(number, rng.choice("ab"), degrees=rng.choice([(1,), (1, 2)]))
        turn = queue.draw() if rng.random() < 0.7 else 10**6 - number
        queue.push(action, rng.randrange(3), 0, turn)
        waiting[number] = (turn, queue.shape_of(number))
        if rng.random() < 0.3:
            gone = rng.choice(list(waiting))
            queue.remove(gone)
            del waiting[gone]
    order = sorted(waiting, key=lambda a: waiting[a][0])
    walk, seen, skipped = queue.walk(CPU), [], set()
    while (head := walk.head()) is not None:
        seen.append(head[0])
        if rng.random() < 0.1:
            skipped.add(head[1])
            walk.skip_shape()
        else:
            walk.next()
        order = [a for a in order if a in seen or waiting[a][1] not in skipped]
    assert seen == order
    for action in list(waiting):
        queue.remove(action)
    assert len(queue) == 0 and not queue.pools


def test_a_full_gpu_pool_does_not_block_cpu_actions_or_endpoint_calls() -> None:
    w = world_with_services("fcfs:8")
    holder = w.submit((8,), key="service:judge")
    assert started(w.plan()) == [holder]
    gpu, cpu, call = w.submit((8,), key="service:judge"), w.submit(1), w.submit(
        1, key="endpoint:search")
    both = w.submit(1, gpus=1)  # wants a CPU and a GPU: the GPU is what it lacks
    behind = w.submit(1)
    assert sorted(started(w.plan())) == [cpu, call, behind]
    assert {w.ledger.actions[a].state for a in (gpu, both)} == {ActionState.PENDING}
    file = Action(w.id(), "f", Kind.FILE, (0,))
    w.happen(ev.ActionSubmitted(w.now, file))
    assert w.ledger.ready.waits(NOTHING) and w.ledger.ready.waits(GPU)
    assert started(w.plan()) == [file.id]


def test_a_service_copy_stays_resident_until_its_gpus_are_needed() -> None:
    w = world_with_services(gpus=4)
    restored = []

    def call(service: str, size: int) -> tuple[int, ...]:
        action = w.submit((size,), key=f"service:{service}")
        w.plan()
        grant = next(e for e in w.events
                     if isinstance(e, ev.LeaseGranted) and e.action == action)
        restored.append(grant.restore_ns)
        w.finish(action)
        return grant.gpus

    assert call("judge", 2) == (0, 1) and call("judge", 2) == (0, 1)
    assert call("teacher", 2) == (2, 3)  # a bare block before one that is stood on
    assert call("judge", 1) == (0,)  # the same service on another block is another thing
    assert call("judge", 2) == (2, 3)  # what was used longest ago is parked
    assert restored == [SECOND, 0, SECOND, SECOND, SECOND]
    exclusive = w.submit(1, gpus=1)
    w.plan()
    assert w.ledger.leases[w.lease_of(exclusive)].gpus == (1,)  # where nothing stands
    another = w.submit(1, gpus=2)
    w.plan()
    assert w.ledger.leases[w.lease_of(another)].gpus == (0, 2)
    assert w.ledger.nodes[1].gpus.resident == {}  # a block is parked whole


def test_blocks_are_aligned_by_gpu_number_and_consist_of_free_gpus() -> None:
    gpus = GpuSet((2, 3, 4, 5, 6))
    assert gpus.free_blocks(2) == [(2, 3), (4, 5)] and gpus.free_blocks(4) == []
    gpus.take((3,))
    assert gpus.free_blocks(2) == [(4, 5)] and gpus.free_blocks(1) == [(2,), (4,), (5,), (6,)]


@pytest.mark.parametrize("seed", range(8))
def test_a_token_bucket_never_exceeds_its_rate_and_burst(seed: int) -> None:
    rng = random.Random(seed)
    rate, burst = rng.randrange(1, 40 * MICRO), rng.randrange(MICRO, 5 * MICRO)
    entry, now, level = full(EndpointSpec("x", 10**6, rate, burst), 0), 0, Fraction(burst, MICRO)
    for _ in range(400):
        step = rng.choice([0, 1, rng.randrange(10**9)])
        now, level = now + step, min(Fraction(burst, MICRO),
                                     level + Fraction(step * rate, MICRO * SECOND))
        assert entry.tokens(now) == int(level)
        at = entry.next_token_at(now)
        assert entry.tokens(at) >= 1 and (at == now or entry.tokens(at - 1) < 1)
        if entry.tokens(now) and rng.random() < 0.8:
            entry.draw(now)
            level -= 1


def test_the_next_endpoint_token_is_a_scheduler_deadline() -> None:
    w = world_with_services()
    calls = [w.submit(1, key="endpoint:search") for _ in range(5)]
    assert started(w.plan()) == calls[:2]  # two at once
    w.finish(calls[0])
    assert started(w.plan()) == [calls[2]]  # the last token of the burst
    assert w.scheduler.next_deadline() == 0  # nobody may come in, token or not
    w.finish(calls[1])
    assert started(w.plan()) == []
    due = w.scheduler.next_deadline()
    assert due == w.ledger.endpoints["search"].next_token_at(0) > w.now
    w.now = due - 2
    assert started(w.plan()) == []
    w.now = due - 1
    assert started(w.plan()) == [calls[3]]


def test_endpoints_that_nobody_calls_cost_a_pass_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world_with_services()
    for n in range(50):
        w.happen(ev.EndpointDeclared(0, EndpointSpec(f"idle{n}", 2, MICRO, MICRO)))
    looked: list[str] = []
    tokens = EndpointEntry.tokens

    def look(entry: EndpointEntry, now: int) -> int:
        looked.append(entry.spec.name)
        return tokens(entry, now)

    monkeypatch.setattr(EndpointEntry, "tokens", look)
    plain = w.submit(1)
    assert started(w.plan()) == [plain] and not looked
    call = w.submit(1, key="endpoint:search")
    assert started(w.plan()) == [call] and set(looked) == {"search"}


class Resizer:
    """A placer that returns the placement that the test has set."""

    name, reserve, block_max = "resizer", 0, 8

    def __init__(self) -> None:
        self.next = Placement()

    def place(self, view):
        placement, self.next = self.next, Placement()
        return placement


def test_units_of_a_shrunk_lease_serve_growth_and_starts_in_the_same_placement() -> None:
    w = World("first-fit")
    w.node(cpus=8)
    a, b = w.submit((1, 2, 4)), w.submit((1, 2, 4))
    w.plan()
    c = w.submit((1, 4))
    placer = w.scheduler.state.placer = Resizer()
    la, lb = w.lease_of(a), w.lease_of(b)
    w.now = 50_000_000
    placer.next = Placement(resizings=[Resizing(lb, 3), Resizing(la, 0)],
                            grants=[Grant(c, 1, 4)], again_at=90_000_000)
    w.plan()
    assert [w.ledger.leases[x].units for x in (la, lb, w.lease_of(c))] == [0, 3, 4]
    assert w.ledger.nodes[1].cores.free == 1
    assert w.scheduler.next_deadline() == 90_000_000
    w.scheduler.state.dirty = True
    placer.next = Placement(resizings=[Resizing(la, 1)])
    with pytest.raises(AssertionError, match="too soon"):
        w.plan()
    w.now = 90_000_000
    placer.next = Placement(resizings=[Resizing(la, 5)])
    with pytest.raises(AssertionError, match="Resizing"):
        w.plan()
    placer.next = Placement(resizings=[Resizing(la, 1)])
    w.plan()
    assert w.ledger.leases[la].units == 1 and w.scheduler.next_deadline() == 0


def test_a_parallel_session_runs_several_actions_and_waits_count_from_submission() -> None:
    w = World("fcfs:4")
    w.node(cpus=2)
    spec = SessionSpec(w.id(), "s", 10, parallel=True)
    w.happen(ev.SessionRequested(w.now, spec))
    one, two, three = (w.submit(1, session=spec.id) for _ in range(3))
    later = w.submit(2)
    w.scheduler.state.dirty = True
    placed = w.scheduler.plan(5)
    assert [type(e) for e in placed] == [ev.SessionPlaced]  # openings alone
    w.happen(placed[0])
    w.happen(ev.SessionReady(5, spec.id))
    assert started(w.plan()) == [one, two]
    w.finish(one)
    assert started(w.plan()) == [three]  # before `later`, which was submitted after it
    w.finish(two)
    assert w.ledger.sessions[spec.id].state is SessionState.BUSY
    w.finish(three)
    assert w.ledger.sessions[spec.id].state is SessionState.IDLE
    assert started(w.plan()) == [later]


def test_a_lost_node_frees_the_endpoint_slots_and_service_calls_on_it() -> None:
    w = world_with_services(nodes=2)
    a = w.submit((8,), key="service:judge", attempts=2)
    b = w.submit(1, key="endpoint:search")
    w.plan()
    node = w.ledger.leases[w.lease_of(a)].node
    w.happen(ev.NodeLost(w.now, node, "gone"))
    w.plan()
    assert w.ledger.leases[w.lease_of(a)].node != node
    if w.ledger.actions[b].lease:
        w.finish(b, ActionState.FAILED)
    assert w.ledger.endpoints["search"].busy == 0


@pytest.mark.parametrize(("fields", "named"), [
    ({"key": "service:poet"}, "no service 'poet'"), ({"key": "endpoint:x"}, "no endpoint"),
    ({"key": "disk"}, "key: 'disk'"), ({"key": "service:judge", "degrees": (3,)}, "1, 2, 4 or 8"),
    ({"key": "service:judge", "degrees": (8,)}, "aligned block of 8"),
    ({"key": "endpoint:search", "degrees": (2,)}, "degrees"),
    ({"key": "service:judge", "gpus": 1}, "gpus")])
def test_an_infeasible_request_names_the_resource_it_lacks(fields, named) -> None:
    w = world_with_services(gpus=4)
    assert named in refusal(w.ledger, w.scheduler.state.placer, Action(1, "x", **fields))
    assert refusal(w.ledger, w.scheduler.state.placer, Action(1, "x", key="service:judge")) == ""


def test_gpus_are_assigned_to_services_in_proportion_to_their_calls() -> None:
    services = [ServiceSpec("a", calls=10), ServiceSpec("b", calls=40), ServiceSpec("c", calls=0)]
    assigned = assign_gpus(services, [(1, g) for g in range(7)])
    assert {name: len(gpus) for name, gpus in assigned.items()} == {"a": 2, "b": 4, "c": 1}


@pytest.mark.parametrize("placer", ["first-fit", "fcfs:4", "static:2", "paper", "elastic"])
@pytest.mark.parametrize("seed", range(4))
def test_random_key_resources_violate_no_invariant_and_replay(seed: int, placer: str) -> None:
    rng, w = random.Random(seed), world_with_services(placer, gpus=4, nodes=2)
    submitted: list[int] = []
    for _ in range(300):
        key = rng.choice(["cpu", "service:judge", "service:teacher", "endpoint:search"])
        degrees = (1,) if key[0] == "e" else rng.choice([(1,), (1, 2), (1, 2, 4)])
        gpus = rng.choice([0, 0, 1]) if key == "cpu" else 0
        submitted.append(w.submit(degrees, key=key, gpus=gpus, attempts=2))
        w.now += rng.randrange(SECOND // 4)
        leases = list(w.ledger.leases.values())
        if leases and rng.random() < 0.8:
            w.finish(rng.choice(leases).action)
        if rng.random() < 0.02:
            w.happen(ev.NodeLost(w.now, w.ledger.up_nodes()[0].node, "chaos"))
            w.node(cpus=4, gpus=4)
        w.plan()
    w.drain()
    ends = {w.ledger.actions[a].state for a in submitted}
    assert ends <= {ActionState.COMPLETED, ActionState.NODE_FAIL} and not len(w.ledger.ready)
    again = type(w.scheduler)(w.scheduler.state.placer)
    for event in w.events:
        again.handle(event)
    assert again.ledger.actions == w.ledger.actions
    assert again.ledger.endpoints == w.ledger.endpoints
    assert [n.gpus.resident for n in again.ledger.nodes.values()] == [
        n.gpus.resident for n in w.ledger.nodes.values()]
