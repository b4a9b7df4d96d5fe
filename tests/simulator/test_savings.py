"""What a job would have needed otherwise, computed from its journal alone.

The journals are those of simulated runs, so the simulator's own run of the shipped workload says
what the answer must be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.recorded_job import played

from tangram_hpc.accounting.record import ActionRecord, fold
from tangram_hpc.domain import event as ev
from tangram_hpc.errors import InvalidInput
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.savings import recorded_run as recorded_run_module
from tangram_hpc.simulator.savings.recorded_run import RecordedRun, recorded_run
from tangram_hpc.simulator.savings.run_witness import RunWitness
from tangram_hpc.simulator.savings.savings import (
    AS_RUN,
    FCFS,
    JOBS,
    RECORDED,
    SERVICES,
    STATIC,
    Savings,
    _with_own_gpus,
    reservation,
    savings,
)
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.sizing import Holding, resized
from tangram_hpc.simulator.workload import (
    EXAMPLES,
    Cluster,
    Workload,
    all_actions,
    read_cluster,
    read_workload,
    together,
)
from tangram_hpc.simulator.world import SimulationWorld


def coding(trajectories: int = 200, cpus: int = 800) -> tuple[Workload, Cluster]:
    """The first trajectories of the shipped workload, and its cluster with so many CPUs."""
    work, cluster = read_workload(Path("coding-200")), read_cluster(Path("coding-200"))
    return (work.model_copy(update={"trajectories": work.trajectories[:trajectories]}),
            resized(cluster, Holding(cpus, 0)))


def recorded(events: list[ev.Event], actions_max: int | None = None) -> RecordedRun:
    witness = RunWitness()
    for event in events:
        witness.add(event)
    run = recorded_run(fold(events), witness, actions_max)
    assert run is not None
    return run


def saved(events: list[ev.Event], actions_max: int | None = None, **given: int) -> Savings:
    return savings(recorded(events, actions_max), fold(events), **given)


def check_against_the_simulator(work: Workload, cluster: Cluster, placer: str, oracle: bool
                                ) -> None:
    run, events = played(work, cluster, placer, oracle)
    found = saved(events)
    own, first, figures = found.row(STATIC), found.row(RECORDED), run.figures()
    want = simulate(work, cluster, make_placer("static:4")).figures()
    assert own is not None and own.policy == "static:4" and first is not None
    assert own.mean_act_s == pytest.approx(want["mean_act_s"], rel=0.01)
    assert own.step_s == pytest.approx(want["step_s"], rel=0.01)
    assert own.held_core_h == pytest.approx(own.cpus * want["step_s"] / 3600, rel=0.01)
    assert first.mean_act_s == pytest.approx(figures["mean_act_s"], rel=1e-6)
    assert first.step_s == pytest.approx(figures["step_s"], rel=0.01)
    again = found.row(AS_RUN)
    assert again is not None and again.mean_act_s == pytest.approx(first.mean_act_s, rel=0.01)


def test_a_static_reservation_is_what_the_simulator_says_of_the_shipped_workload() -> None:
    """Of its first trajectories; the whole of it is played by the long test below."""
    check_against_the_simulator(*coding(30, 120), "fcfs:4", oracle=False)


@pytest.mark.long
@pytest.mark.parametrize(("placer", "oracle"), [("elastic", True), ("fcfs:4", False),
                                                ("static:4", False)])
def test_the_same_of_the_whole_workload(placer: str, oracle: bool) -> None:
    check_against_the_simulator(*coding(), placer, oracle)


@pytest.mark.long
def test_where_reservations_wait_the_error_is_in_their_favour() -> None:
    """A journal of fcfs does not say how long a trajectory thought before its first action and
    after its last one, when a reservation would have been held; that of static does.
    """
    work, cluster = coding(cpus=400)
    want = simulate(work, cluster, make_placer("static:4")).figures()["mean_act_s"]
    for placer, at_least in (("static:4", 0.999), ("fcfs:4", 0.97)):
        row = saved(played(work, cluster, placer)[1]).row(STATIC)
        assert row is not None and row.mean_act_s is not None
        assert at_least * want <= row.mean_act_s <= 1.001 * want


def test_rows_say_what_each_way_holds() -> None:
    work, cluster = coding(12, 24)
    found = saved(played(work, cluster, "fcfs:4")[1])
    assert [row.way for row in found.rows] == [RECORDED, AS_RUN, FCFS, STATIC, JOBS, "75%", "50%"]
    assert [row.cpus for row in found.rows] == [24, 24, 24, 24, 48, 18, 12]
    static, jobs, half = (found.row(way) for way in (STATIC, JOBS, "50%"))
    assert static and jobs and half
    assert jobs.mean_act_s < static.mean_act_s  # type: ignore[operator]  # nobody waits
    # each job ends with its trajectory, so together they hold less than CPUs x step
    assert jobs.held_core_h < jobs.cpus * jobs.step_s / 3600  # type: ignore[operator]
    assert half.held_core_h == pytest.approx(12 * half.step_s / 3600)  # type: ignore[operator]
    assert found.growth("50%") > found.growth("75%") >= 0  # type: ignore[operator]
    assert found.actions == found.actions_of_job == len(all_actions(work))


def test_each_tenant_is_told_what_its_own_trajectories_would_have_needed() -> None:
    (work, cluster), few = coding(6, 24), coding(3, 24)[0]
    both = saved(played(together([("a", work, 0), ("b", few, 5)]), cluster, "fcfs:4")[1])
    first, second = both.tenants
    assert [first.tenant, second.tenant] == ["a", "b"]
    assert (first.trajectories, second.trajectories) == (6, 3)
    assert (first.actions, second.actions) == (len(all_actions(work)), len(all_actions(few)))
    assert first.used_gpu_h == second.used_gpu_h == 0
    assert first.part_core_h + second.part_core_h == pytest.approx(both.rows[0].held_core_h)
    assert first.part_core_h / second.part_core_h == pytest.approx(
        first.used_core_h / second.used_core_h)
    # nothing of it depends on the other tenant
    jobs = both.row(JOBS)
    assert jobs and jobs.held_core_h == pytest.approx(
        first.jobs.held_core_h + second.jobs.held_core_h, rel=.01)  # type: ignore[operator]
    assert (first.jobs.cpus, second.jobs.cpus) == (24, 12)
    assert first.jobs.held_core_h > first.used_core_h  # type: ignore[operator]
    assert not saved(played(work, cluster, "fcfs:4")[1]).tenants  # one tenant is the whole job


def test_services_and_endpoints_are_simulated_and_an_impossible_way_says_why() -> None:
    work, cluster = read_workload(Path("mixed-24")), read_cluster(EXAMPLES / "cluster-24.json")
    _, events = played(work, cluster, "elastic")
    found, run = saved(events), recorded(events)
    first, again = found.row(RECORDED), found.row(AS_RUN)
    assert first and again and first.gpus == 4 and first.held_gpu_h
    assert again.step_s == pytest.approx(first.step_s, rel=0.02)
    assert sorted(a.resource for a in all_actions(run.work)) == sorted(
        a.resource for a in all_actions(work))
    one_gpu = run.cluster.model_copy(update={"nodes": tuple(
        n.model_copy(update={"gpus": min(n.gpus, 1)}) for n in run.cluster.nodes)})
    run.cluster = one_gpu
    static = next(row for row in savings(run, fold(events)).rows if row.way == STATIC)
    assert "2 services want a GPU each" in static.why_not and static.mean_act_s is None


def many_services() -> list[ev.Event]:
    """A job in which four reward models took turns on one GPU, and a judge of two GPUs had two."""
    action = {"work_s": 0.5, "degrees": (1,)}
    rows = [{"trajectory": f"t{n}", "start_s": n, "turns": [{"think_s": 0.2, "actions": [
        {"name": "tool", "resource": "cpu", **action},
        {"name": "score", "resource": f"service:rm{n % 4}", **action},
        {"name": "judge", "resource": "service:judge", "work_s": 0.5, "degrees": (2,)}]}] * 3}
        for n in range(8)]
    work = Workload.model_validate({"name": "w", "trajectories": rows})
    services = [{"name": name, "restore_s": 0.1, "weights_mib": 100}
                for name in ("rm0", "rm1", "rm2", "rm3", "judge", "never-called")]
    cluster = Cluster.model_validate({"nodes": [
        {"name": "a", "cpus": 8, "mem_mib": 4000, "gpus": 1},
        {"name": "b", "cpus": 8, "mem_mib": 4000, "gpus": 2}], "services": services})
    return played(work, cluster, "elastic")[1]


def test_services_on_gpus_of_their_own_hold_them_from_the_first_to_the_last_moment() -> None:
    found = saved(many_services())
    own, again, first = (found.row(way) for way in (SERVICES, AS_RUN, RECORDED))
    assert own and again and first and first.gpus == 3
    assert own.gpus == 4 * 1 + 2 and own.cpus == again.cpus  # and none for the one never called
    assert own.held_gpu_h == pytest.approx(6 * own.step_s / 3600)  # type: ignore[operator]
    assert own.held_gpu_h > again.held_gpu_h  # type: ignore[operator]
    assert own.mean_act_s < again.mean_act_s  # type: ignore[operator]  # nothing is restored twice
    assert any(text.startswith('"services" keeps every GPU service') for text in found.assumptions)
    # a placer with reservations runs a call on one GPU only, so the judge cannot be compared there
    jobs = next(row for row in found.rows if row.way == JOBS)
    assert jobs.gpus == 6 and "judge" in jobs.why_not
    assert not saved(played(*coding(3, 12), "fcfs:4")[1]).row(SERVICES)


def one_service(*least: int, gpus: int = 0) -> Savings:
    """What a job would have needed whose calls of a judge need so many GPUs, in turn, and beside
    which a command held so many whole GPUs.
    """
    rows = [{"trajectory": f"t{n}", "start_s": n, "turns": [{"think_s": 0.2, "actions": [
        {"name": "tool", "resource": "cpu", "work_s": 0.5, "degrees": (1,)},
        {"name": "judge", "resource": "service:judge", "work_s": 0.5,
         "degrees": (least[n % len(least)],)}]}]} for n in range(4)]
    work = Workload.model_validate({"name": "w", "trajectories": rows})
    cluster = Cluster.model_validate({
        "nodes": [{"name": "b", "cpus": 8, "mem_mib": 4000, "gpus": 2}],
        "services": [{"name": "judge", "restore_s": 0.1, "weights_mib": 100}]})
    return saved([ev.ActionSubmitted(e.at, msgspec.structs.replace(e.action, gpus=gpus))
                  if isinstance(e, ev.ActionSubmitted) and e.action.key == "cpu" else e
                  for e in played(work, cluster, "elastic")[1]])


def test_no_copy_of_one_size_serves_calls_of_different_sizes() -> None:
    own = next(row for row in one_service(1, 2).rows if row.way == SERVICES)
    assert own.mean_act_s is None and own.why_not.startswith(
        "calls of service 'judge' differ in size: they need 1 to 2 GPUs at least")
    assert one_service(2).row(SERVICES)


def test_gpus_of_other_actions_are_told_to_be_missing() -> None:
    text = 'The GPUs that 4 other actions held are in neither "services" nor "jobs".'
    assert text in one_service(1, gpus=1).assumptions
    assert text.partition("4")[0] not in " ".join(one_service(1).assumptions)


def test_each_service_stays_on_its_own_gpus() -> None:
    events = many_services()
    cluster = _with_own_gpus(recorded(events))
    assert cluster is not None
    blocks = {s.name: s.gpus for s in cluster.services}
    assert blocks == {"judge": (0, 1), "rm0": (2,), "rm1": (3,), "rm2": (4,), "rm3": (5,)}
    world = SimulationWorld(recorded(events).work, cluster, make_placer("elastic"), True)
    world.events = []
    world.run()
    asked = {e.action.id: e.action.key.partition(":")[2] for e in world.events
             if isinstance(e, ev.ActionSubmitted)}
    lent = {(asked[e.action], e.gpus) for e in world.events
            if isinstance(e, ev.LeaseGranted) and e.gpus}
    assert lent == {*blocks.items()}


def test_a_long_job_is_compared_by_the_trajectories_that_began_first() -> None:
    work, cluster = coding(12, 24)
    _, events = played(work, cluster, "fcfs:4")
    found = saved(events, actions_max=40)
    assert 0 < found.actions <= 40 < found.actions_of_job
    assert any("trajectories that began first" in text for text in found.assumptions)
    # not even the first trajectory has so few: its first turns are simulated, and the page says so
    first = recorded(events).work.trajectories[0].turns
    one, all_of_it = len(first[0].actions), sum(len(turn.actions) for turn in first)
    assert recorded(events, one).work.trajectories[0].turns == first[:1]
    cut = saved(events, actions_max=one)
    assert (cut.trajectories, cut.actions) == (1, one) and one < all_of_it
    assert cut.rows[0].mean_act_s and cut.rows[1].mean_act_s
    assert any("of which the last turns are left out" in text for text in cut.assumptions)
    with pytest.raises(InvalidInput, match=f"has {one} actions.*`tangram report --simulate {one}`"):
        saved(events, actions_max=one - 1)


def test_only_what_is_simulated_is_made_into_a_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    _, events = played(*coding(12, 24), "fcfs:4")
    made = list[ActionRecord]()

    def counted(r: ActionRecord, serials: Any, make: Any = recorded_run_module._work_action) -> Any:
        made.append(r)
        return make(r, serials)

    monkeypatch.setattr(recorded_run_module, "_work_action", counted)
    run = recorded(events, 40)
    assert len(made) == len(run.numbers) <= 40 < run.actions_of_job
    made.clear()
    assert len(recorded(events).numbers) == run.actions_of_job == len(made)


def test_gpus_of_a_smaller_allocation_are_rounded_up() -> None:
    work, cluster = read_workload(Path("mixed-24")), read_cluster(EXAMPLES / "cluster-24.json")
    events = played(work, cluster, "elastic")[1]
    run = recorded(events, 60)
    run.cluster = run.cluster.model_copy(update={"nodes": tuple(
        n.model_copy(update={"gpus": min(n.gpus, 3)}) for n in run.cluster.nodes)})
    assert [row.gpus for row in savings(run, fold(events)).rows[-2:]] == [3, 2]


@pytest.mark.parametrize(("degrees", "cpus"), [
    ([(1,)], 1), ([(1, 2)], 2), ([(1, 2, 4, 8, 16)], 4), ([(8,), (1,)], 8), ([(1, 3)], 3)])
def test_a_reservation_has_what_its_actions_need_and_can_use(degrees: list[tuple[int, ...]],
                                                            cpus: int) -> None:
    turns = [{"think_s": 0, "actions": [{"name": "a", "resource": "cpu", "work_s": 1,
                                         "degrees": each} for each in degrees]}]
    work = Workload.model_validate({"name": "w", "trajectories": [
        {"trajectory": "t", "start_s": 0, "turns": turns}]})
    assert reservation(work) == cpus


def test_a_job_without_nodes_or_without_an_end_cannot_be_simulated() -> None:
    events = played(*coding(1, 4), "fcfs:4", stop=False)[1]
    begun = [e for e in events if not isinstance(e, ev.LeaseFinished)]
    witness = RunWitness()
    assert recorded_run(fold(events), witness) is None  # it has seen no node
    for event in begun:
        witness.add(event)
    assert recorded_run(fold(begun), witness) is None
