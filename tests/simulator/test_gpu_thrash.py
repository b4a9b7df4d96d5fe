"""Guards that calls of GPU services do not evict each other's services without end where bringing
a service to a block (a restore) takes longer than a call, and that wide calls are still served.
"""

from __future__ import annotations

import random

import pytest
from helpers.builders import World, started

from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.checkers import faults
from tangram_hpc.simulator.run_records import RunRecords
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, Workload, WorkloadTrajectory

S = 10**9
RUN_S = 2.0  # mean run time of a call
SHARE = 1.2  # of the mean ACT of a fixed share of the GPUs for each service


def one_call(number: int, at_s: float, service: str, run_s: float, degrees: tuple[int, ...]
             ) -> WorkloadTrajectory:
    return WorkloadTrajectory.model_validate({"trajectory": f"t{number}", "start_s": at_s,
                                              "turns": [{
        "think_s": 0, "actions": [{"name": service, "resource": f"service:{service}",
                                   "work_s": run_s, "degrees": degrees}]}]})


def steady(seed: int, services: int, gpus: int, calls: int, load: float = 0.8) -> Workload:
    """Calls of one GPU each at random times, equally many of each service."""
    rng = random.Random(seed)
    span_s = calls * RUN_S / (load * gpus)
    return Workload(name="steady", trajectories=tuple(
        one_call(i, rng.uniform(0, span_s), f"s{i % services}",
                 RUN_S * rng.lognormvariate(-.245, .7), (1,)) for i in range(calls)))


def cluster(services: int, gpus: int, restore_s: float) -> Cluster:
    nodes = [{"name": f"g{n}", "cpus": 1, "mem_mib": 100, "gpus": min(8, gpus - 8 * n)}
             for n in range(-(-gpus // 8))]
    return Cluster.model_validate({"nodes": nodes, "services": [
        {"name": f"s{n}", "restore_s": restore_s} for n in range(services)]})


def mean_s(run: RunRecords) -> float:
    return float(run.figures()["mean_act_s"])


@pytest.mark.parametrize("durations", ["oracle", "learned"])
@pytest.mark.parametrize(("services", "gpus", "restore_s"), [
    (4, 4, 10.0), (8, 8, 6.0), (4, 4, 30.0)])
def test_with_as_many_services_as_gpus_elastic_is_about_as_fast_as_static(
        services: int, gpus: int, restore_s: float, durations: str) -> None:
    """The fixed shares have every service on its GPU from the start; `elastic` is allowed the first
    restore of each service beside."""
    work, where = steady(3, services, gpus, 60 * gpus), cluster(services, gpus, restore_s)
    fixed = mean_s(simulate(work, where, make_placer("static")))
    run = simulate(work, where, make_placer("elastic"), durations)
    assert faults(run, work, where) == []
    assert mean_s(run) <= SHARE * (fixed + restore_s)


def test_a_short_queue_does_not_evict_a_service_that_will_be_called_again() -> None:
    """At this load one copy of each service is enough: a second one would be brought in for a few
    calls, and the service that it replaced would have to be brought in again."""
    work, where = steady(1, 8, 8, 480, load=0.4), cluster(8, 8, 6.0)
    fixed = mean_s(simulate(work, where, make_placer("static")))
    run = simulate(work, where, make_placer("elastic"))
    assert mean_s(run) <= SHARE * fixed
    assert sum(1 for r in run.records if r.restore) <= 5 * 8


def test_the_first_service_copy_does_not_take_all_gpus_before_the_load_is_known() -> None:
    """If the first call took all GPUs as one block, the calls that follow would overload it."""
    rng, span_s = random.Random(5), 400 * RUN_S / (0.8 * 8)
    drawn = [(rng.uniform(0, span_s), RUN_S * rng.lognormvariate(-.245, .7)) for _ in range(400)]
    found = [mean_s(simulate(
        Workload(name="one", trajectories=tuple(
            one_call(i, at_s, "s0", run_s, degrees) for i, (at_s, run_s) in enumerate(drawn))),
        cluster(1, 8, 6.0), make_placer("elastic"), "learned"))
        for degrees in ((1,), (1, 2, 4, 8))]
    narrow, any_width = found
    assert any_width <= SHARE * narrow


@pytest.mark.parametrize("restore_s", [3.0, 10.0, 30.0])
@pytest.mark.parametrize(("services", "gpus"), [(6, 4), (12, 4)])
def test_with_more_services_than_gpus_most_gpu_time_is_spent_on_calls(
        services: int, gpus: int, restore_s: float) -> None:
    work, where = steady(5, services, gpus, 60 * gpus), cluster(services, gpus, restore_s)
    run = simulate(work, where, make_placer("elastic"))
    assert faults(run, work, where) == []
    restoring = sum(r.restore for r in run.records)
    computing = sum(r.end - r.start - r.restore for r in run.records)
    assert restoring <= 1.5 * computing, "most GPU time was spent on restores"
    assert run.step_ns <= 4 * S * max(t.start_s for t in work.trajectories)


@pytest.mark.parametrize("restore_s", [0.3, 6.0])
def test_a_call_on_8_gpus_is_served_under_endless_calls_on_one_gpu(restore_s: float) -> None:
    rng, span_s = random.Random(9), 400.0
    count = round(1.1 * 8 * span_s / RUN_S)  # more than the GPUs can serve
    narrow = [one_call(i, rng.uniform(0, span_s), f"s{i % 8}", RUN_S, (1,)) for i in range(count)]
    wide = [one_call(count + i, 30.0 + 20 * i, "s8", RUN_S * 8, (8,)) for i in range(10)]
    work, where = Workload(name="wide", trajectories=(*narrow, *wide)), cluster(9, 8, restore_s)
    run = simulate(work, where, make_placer("elastic"))
    assert faults(run, work, where) == []
    first = min(r.start for r in run.records if r.action.degrees == (8,))
    assert first < span_s * S, "it waited for the end of the narrow calls"


# ---- the rule, call by call ---------------------------------------------------------------------


def world(gpus: int = 1, batch: int = 1, services: str = "ab", restore_s: int = 10) -> World:
    w = World("elastic")
    w.happen(ev.NodeJoined(0, 1, NodeSpec("n1", "h", (0,), 1000, tuple(range(gpus)),
                                          ahead=8 * (batch > 1))))
    w.happen(ev.NodesComplete(0, 1))
    for name in services:
        w.happen(ev.ServiceDeclared(0, ServiceSpec(name, restore_s * S, backend="fake",
                                                   batch=batch)))
    return w


def call(w: World, service: str) -> int:
    action = Action(w.id(), "x", Kind.CALL, (1,), f"service:{service}")
    w.now += 1
    w.happen(ev.ActionSubmitted(w.now, action))
    return action.id


def end(w: World, action: int, after_s: float) -> list[int]:
    """Ends a call `after_s` later; returns the calls that start then."""
    w.now += round(after_s * S)
    w.happen(ev.LeaseFinished(w.now, w.lease_of(action), Outcome(
        ActionState.COMPLETED, exec_ns=S), True))
    return started(w.plan())


def test_a_restored_copy_serves_calls_before_a_starving_call_takes_its_gpu() -> None:
    w = world()
    mine = [call(w, "a")]
    assert started(w.plan()) == mine
    other = call(w, "b")
    mine += [call(w, "a") for _ in range(60)]
    began, served = w.now, 1
    w.plan()
    running = mine[0]
    while (running := end(w, running, 2 if served > 1 else 12)[0]) != other:
        served += 1
        assert running in mine
    waited = (w.now - began) / S
    assert served >= 15, "a restore of 10 s served only a few calls"
    assert waited <= 10 + 8 * 10 * 2 + 10, "the other service was starved"


def test_a_starving_call_with_a_resident_copy_evicts_no_other_service() -> None:
    w = world(gpus=2)
    first = {s: call(w, s) for s in "ab"}
    w.plan()
    more = {s: [call(w, s) for _ in range(40)] for s in "ab"}
    w.plan()
    end(w, first["a"], 12), end(w, first["b"], 0)
    for _ in range(39):
        w.now += 2 * S
        for s in "ab":
            running = next((x for x in more[s] if w.ledger.actions[x].lease), None)
            assert running is not None, f"no call of {s} runs: its copy was taken"
            more[s].remove(running)
            end(w, running, 0)
    brought = [d for d in w.decisions if isinstance(d, de.StartLease) and d.restore_ns]
    assert len(brought) == 2, "each service was restored once"


def test_batches_continue_beside_a_starving_call_until_the_minimum_residency_ends() -> None:
    w = world(batch=4)
    a, b = call(w, "a"), call(w, "b")
    w.plan()
    w.now += 30 * S  # a's restore took 10 s; its term lasts for 30 s more at least
    late = call(w, "a")
    assert started(w.plan()) == [late], "it is prefetched to the busy copy of its service"
    w.now += 200 * S
    later = call(w, "a")
    assert started(w.plan()) == []
    end(w, a, 0)
    end(w, late, 0)
    w.plan()
    assert w.ledger.actions[b].lease and not w.ledger.actions[later].lease
