"""Service calls that are prefetched to a busy copy of their service: which calls, how many, how
they begin and end; and what the ledger knows of services."""

from __future__ import annotations

import pytest
from helpers.builders import World, replies, started

from tangram_hpc.accounting.record import fold
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind, Profile
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import FALTERED, ServiceSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.forecast import forecast
from tangram_hpc.scheduler.policy.declarations import refusal_of_service
from tangram_hpc.scheduler.state.demand import ADDED, Demand

S = 10**9


def world(placer: str = "elastic", gpus: int = 1, ahead: int = 8, batch: int = 4,
          services: str = "ab", **fields) -> World:
    w = World(placer)
    w.happen(ev.BrokerStarted(0, "j", placer, "none"))
    w.happen(ev.NodeJoined(0, 1, NodeSpec("n1", "h", (0,), 1000, tuple(range(gpus)), ahead=ahead)))
    w.happen(ev.NodesComplete(0, 1))
    for name in services:
        w.happen(ev.ServiceDeclared(0, ServiceSpec(name, S, backend="fake", batch=batch, **fields)))
    return w


def call(w: World, service: str, attempts: int = 1, degrees: tuple[int, ...] = (1,)) -> int:
    action = Action(w.id(), "x", Kind.CALL, degrees, f"service:{service}", attempts_max=attempts)
    w.now += 1
    w.happen(ev.ActionSubmitted(w.now, action))
    return action.id


def orders(made: list[de.Decision]) -> list[tuple[int, int]]:
    return [(d.action, d.after) for d in made if isinstance(d, de.StartLease)]


def end(w: World, action: int, batch: int = 1, exec_ns: int = 1, restore_ns: int = 0,
        state: ActionState = ActionState.COMPLETED, pushed: int = 0) -> list[de.Decision]:
    w.now += 1
    outcome = Outcome(state, exec_ns=exec_ns, restore_ns=restore_ns, batch=batch, pushed=pushed)
    return w.happen(ev.LeaseFinished(w.now, w.lease_of(action), outcome, True))


def test_a_block_passes_to_calls_that_have_ended_and_whose_client_is_gone() -> None:
    """A client that goes away while its calls run as a batch ends them all at once. The block is
    free only after the batch, when nothing is known of these calls any more.
    """
    w = world()
    calls = [call(w, "a") for _ in range(3)]
    w.plan()
    leases = [w.lease_of(one) for one in calls]
    w.happen(ev.ClientLeft(w.now, 1, w.now + 1, True))
    for lease in leases:
        w.happen(ev.LeaseFinished(w.now, lease, Outcome(ActionState.CANCELLED), False))
    w.happen(ev.ClientExpired(w.now + 1, 1))
    assert not w.ledger.actions
    for lease in leases:
        assert w.ledger.nodes[1].gpus.free == 0
        w.happen(ev.LeaseReleased(w.now + 2, lease))
    assert not w.ledger.leases and w.ledger.nodes[1].gpus.free == 1


@pytest.mark.parametrize("placer", ["elastic", "paper", "first-fit", "fcfs:1"])
def test_calls_are_prefetched_to_a_busy_copy_in_order_and_share_its_gpu_time(placer: str) -> None:
    w = world(placer)
    a, b, c = call(w, "a"), call(w, "a"), call(w, "a")
    assert orders(w.plan()) == [(a, 0), (b, 1), (c, 2)]
    held = [w.ledger.leases[n].units for n in (1, 2, 3)]
    assert held == [1, 0, 0] and w.ledger.nodes[1].gpus.free == 0
    for one in (a, b, c):
        assert replies(end(w, one, batch=3, exec_ns=5)) == {one: ActionState.COMPLETED}
    assert w.ledger.nodes[1].gpus.free == 1 and not w.ledger.batching
    rows = [fold(w.events).records[x] for x in (a, b, c)]
    assert [row.state for row in rows] == [ActionState.COMPLETED] * 3
    assert all(row.elapsed_ns == 5 or row.start_ns == row.submit_ns for row in rows)
    assert [row.gpu_held_ns for row in rows] == [5 // 3] * 3


def test_a_copy_gets_two_batches_at_most() -> None:
    w = world(batch=4)
    for _ in range(20):
        call(w, "a")
    assert len(started(w.plan())) == 8
    first = next(iter(w.ledger.leases.values())).action
    end(w, first)
    assert len(started(w.plan())) == 1


def test_calls_are_not_prefetched_with_batch_1_or_to_a_worker_without_prefetch() -> None:
    for ahead, batch in ((0, 4), (8, 1)):
        w = world(ahead=ahead, batch=batch)
        call(w, "a"), call(w, "a")
        assert len(started(w.plan())) == 1


def test_only_calls_of_the_same_service_are_prefetched_and_none_before_a_starving_call() -> None:
    w = world("fcfs:1")
    a, b = call(w, "a"), call(w, "b")
    c = call(w, "a")
    assert orders(w.plan()) == [(a, 0), (c, 1)]
    w.now += 30 * S
    d = call(w, "a")
    assert orders(w.plan()) == []  # b is overdue
    end(w, a)
    end(w, c)
    w.plan()
    assert w.ledger.actions[b].lease and not w.ledger.actions[d].lease


def test_calls_are_spread_evenly_over_busy_copies() -> None:
    w = world("fcfs:1", gpus=2, batch=8)
    first = [call(w, "a"), call(w, "a")]
    w.plan()
    assert len({w.ledger.leases[w.lease_of(x)].gpus for x in first}) == 2
    for _ in range(6):
        call(w, "a")
    w.plan()
    assert sorted(len(lease.lease_queue) for lease in w.ledger.leases.values()) == [4] * 8


def test_a_lost_node_requeues_its_prefetched_calls_and_a_cancelled_call_ends() -> None:
    w = world()
    a, b, c = (call(w, "a", attempts=2) for _ in range(3))
    w.plan()
    made = w.happen(ev.ActionCancelled(w.now, c, "no longer wanted"))
    assert [type(d) for d in made] == [de.KillLease]
    w.happen(ev.LeaseFinished(w.now, w.lease_of(c), Outcome(ActionState.CANCELLED), True))
    w.happen(ev.NodeLost(w.now, 1, "gone"))
    assert [w.ledger.actions[x].state for x in (a, b)] == [ActionState.PENDING] * 2
    assert not w.ledger.batching and not w.ledger.leases


def test_a_measured_restore_time_moves_the_estimate_of_its_service() -> None:
    w = world()
    a = call(w, "a")
    w.plan()
    end(w, a, restore_ns=3 * S, exec_ns=80)
    assert w.ledger.services["a"].restore_ns == S + (3 * S - S) // 4


def test_a_service_copy_keeps_its_gpus_for_its_minimum_residency() -> None:
    w = world(stay_ns=5 * S)
    end_of_stay = w.now
    a = call(w, "a")
    w.plan()
    end_of_stay = w.now + 5 * S
    end(w, a)
    b = call(w, "b")
    assert started(w.plan()) == []
    assert w.scheduler.next_deadline() == end_of_stay
    w.now = end_of_stay
    assert started(w.plan()) == [b]


def test_a_service_that_could_not_be_brought_to_its_gpus_keeps_none() -> None:
    w = world(stay_ns=600 * S)
    first, second = call(w, "a"), call(w, "a")
    w.plan()
    gpus = w.ledger.nodes[1].gpus
    end(w, first, state=ActionState.FAILED, pushed=FALTERED)
    assert gpus.holds("a", (0,))  # its next call is tried there
    end(w, second, state=ActionState.FAILED, pushed=FALTERED)
    assert gpus.resident == {}
    b = call(w, "b")
    assert started(w.plan()) == [b]


def test_a_gpu_node_learns_all_services_whether_it_joins_before_or_after_them() -> None:
    w = world(services="a")
    made = w.happen(ev.ServiceDeclared(1, ServiceSpec("c", backend="fake", weights_mib=100)))
    assert [(d.node, d.spec.name) for d in made] == [(1, "c")]
    made = w.happen(ev.NodeJoined(1, 2, NodeSpec("n2", "h", (0,), 1000, (0,))))
    assert [(d.node, d.spec.name) for d in made] == [(2, "a"), (2, "c")]
    assert w.happen(ev.NodeJoined(1, 3, NodeSpec("n3", "h", (0,), 1000))) == []
    assert [n.parked_mib for n in w.ledger.nodes.values()] == [100, 100, 0]
    assert [n.room_mib for n in w.ledger.nodes.values()] == [900, 900, 1000]


def test_a_service_whose_weights_do_not_fit_is_refused_and_shared_weights_count_once() -> None:
    w = world(services="")
    for name, shares in (("a", "x"), ("b", "x"), ("c", "")):
        spec = ServiceSpec(name, backend="fake", weights_mib=400, shares=shares)
        assert refusal_of_service(w.ledger, w.scheduler.state.placer, spec) == ""
        w.happen(ev.ServiceDeclared(0, spec))
    placer, more = w.scheduler.state.placer, ServiceSpec("d", backend="fake", weights_mib=400)
    why = refusal_of_service(w.ledger, placer, more)
    assert why.startswith("weights_mib: too many services: parked they would take 1200 MiB")
    again = ServiceSpec("c", backend="fake", weights_mib=400, batch=9)
    assert "declared already" in refusal_of_service(w.ledger, placer, again)
    assert "no node has" in refusal_of_service(w.ledger, placer, ServiceSpec("e", degrees=(2,)))


@pytest.mark.parametrize("placer", ["elastic", "paper", "first-fit", "fcfs:1"])
def test_calls_of_an_engine_run_only_on_its_own_gpus(placer: str) -> None:
    w = world(placer, gpus=4, services="a")
    spec = ServiceSpec("vllm", S, backend="vllm", degrees=(2,), node="n1", gpus=(2, 3))
    assert refusal_of_service(w.ledger, w.scheduler.state.placer, spec) == ""
    w.happen(ev.ServiceDeclared(0, spec))
    w.happen(ev.NodeJoined(0, 2, NodeSpec("n2", "h", (0,), 1000, (0, 1, 2, 3), ahead=8)))
    first, second = call(w, "vllm", degrees=(2,)), call(w, "vllm", degrees=(2,))
    w.plan()
    lease = w.ledger.leases[w.lease_of(first)]
    assert (lease.node, lease.gpus) == (1, (2, 3))
    end(w, first)
    w.plan()
    lease = w.ledger.leases[w.lease_of(second)]
    assert (lease.node, lease.gpus) == (1, (2, 3))
    for wrong in (ServiceSpec("x", degrees=(2,), gpus=(1, 2)),
                  ServiceSpec("x", degrees=(2,), gpus=(2, 3), node="n9")):
        why = refusal_of_service(w.ledger, w.scheduler.state.placer, wrong)
        assert why.startswith("degrees: no node has")


def test_a_forecast_finishes_while_calls_are_prefetched_to_a_batch() -> None:
    """A forecast takes back prefetched calls and does not prefetch them again."""
    w = world(services="a")
    calls = [call(w, "a") for _ in range(3)]
    w.plan()
    for one in calls:
        end(w, one, exec_ns=5 * S)
    calls = [call(w, "a") for _ in range(10)]  # 8 are given to the copy
    w.plan()
    assert len(w.ledger.ready) == 2
    told = forecast(w.scheduler, calls[-1], w.now)
    assert told.at is not None and told.at > w.now + 5 * S and len(w.ledger.ready) == 2


@pytest.mark.parametrize("added", [100, 300, 1000])
def test_what_a_call_adds_to_a_batch_is_learned(added: int) -> None:
    """Half of the calls run alone, for 1 s, and half in batches of 4."""
    w = world(batch=4)
    assert w.ledger.demand.added("a") == ADDED
    for n in range(120):
        calls = [call(w, "a") for _ in range(4 if n % 2 else 1)]
        w.plan()
        took = S + added * S // 1000 * (len(calls) - 1)
        w.now += took
        for one in calls:
            end(w, one, batch=len(calls), exec_ns=took)
    assert w.ledger.demand.added("a") == pytest.approx(added, abs=60)
    assert w.ledger.demand.added("b") == ADDED, "of another service nothing is known"
    _, work_ns = w.ledger.estimator.estimate(Action(9, "x", Kind.CALL, (1,), "service:a"))
    assert work_ns == pytest.approx(S, rel=0.2), "the work is that of a call alone"


@pytest.mark.parametrize(("state", "exec_ns"), [
    (ActionState.CANCELLED, 0), (ActionState.CANCELLED, 50 * S), (ActionState.NODE_FAIL, 0),
    (ActionState.FAILED, 0)])
def test_calls_that_were_ended_from_outside_teach_nothing_of_run_times(
        state: ActionState, exec_ns: int) -> None:
    w = world(services="a")
    for _ in range(20):
        one = call(w, "a")
        w.plan()
        w.now += S
        end(w, one, exec_ns=S)
    (kind,) = w.ledger.demand.kinds.values()
    known = kind.alone_ns
    assert known == pytest.approx(S, rel=0.2)
    for _ in range(20):
        one = call(w, "a")
        w.plan()
        w.now += max(S, exec_ns)
        end(w, one, exec_ns=exec_ns, state=state)
    assert kind.alone_ns == known


def test_the_share_of_a_call_in_a_batch_and_its_time_alone_agree() -> None:
    demand = Demand()
    for batch in (1, 2, 8):
        took = demand.share("a", batch, S) * batch
        assert demand.alone("a", batch, took) == pytest.approx(S, abs=2)
    assert demand.share("a", 1, S) == S


def test_a_batch_of_what_is_no_call_is_taken_as_it_is() -> None:
    """A worker may report what it likes."""
    w = world()
    action = Action(w.id(), "x", Kind.FUNCTION, (1,), "cpu")
    w.happen(ev.ActionSubmitted(w.now, action))
    w.plan()
    assert replies(end(w, action.id, batch=7)) == {action.id: ActionState.COMPLETED}
    assert w.ledger.demand.added("") == ADDED


@pytest.mark.parametrize(("batch", "widest"), [(1, 1), (8, 8)])
def test_copies_are_wide_where_full_batches_can_carry_the_load(batch: int, widest: int) -> None:
    """3 calls of 2 s a second take 6 of 8 GPUs, one GPU each. With 8 GPUs each they would take
    all 8 of them for 1 s in a second, unless they share batches."""
    w = world(gpus=8, batch=batch, services="a")
    for _ in range(60):
        w.now += S // 3
        w.happen(ev.ActionSubmitted(w.now, Action(
            w.id(), "x", Kind.CALL, (1, 2, 4, 8), "service:a", profile=Profile(2 * S, 50))))
    w.plan()
    assert max(len(lease.gpus) for lease in w.ledger.leases.values()) == widest


def test_batches_that_do_not_fill_up_carry_less() -> None:
    """4 calls of 2 s a second take all 8 GPUs, one GPU each. Batches of 16 on all 8 GPUs would
    carry them, but only 2 calls come while one runs there."""
    w = world(gpus=8, batch=16, services="a")
    for _ in range(60):
        w.now += S // 4
        w.happen(ev.ActionSubmitted(w.now, Action(
            w.id(), "x", Kind.CALL, (1, 2, 4, 8), "service:a", profile=Profile(2 * S, 50))))
    w.plan()
    assert max(len(lease.gpus) for lease in w.ledger.leases.values()) == 1
