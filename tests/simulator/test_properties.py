"""Every invariant on any workload and cluster that hypothesis can generate, under every placer.

The input itself is drawn, never a seed, so a failing case shrinks to the smallest one. The
invariants are checked twice: by the ledger's own `check()` after every event, and from the records
alone.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.checkers import faults
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, Workload, WorkloadTrajectory

# every node can hold every session and every rigid action, so that nothing is "never"
NODES = st.lists(st.builds(
    lambda cpus, mem, gpus: {"cpus": cpus, "mem_mib": mem, "gpus": gpus},
    st.integers(8, 20), st.integers(300, 900), st.sampled_from([0, 4, 8])), min_size=1, max_size=3)
SECONDS = st.one_of(st.sampled_from([0.0, 0.25, 1.0]), st.floats(0, 3, allow_nan=False))
DEGREES = st.sampled_from([[1], [1, 2, 4, 8], [2, 3], [1, 4], [4]])


@st.composite
def actions(draw: Any) -> dict[str, Any]:
    resource = draw(st.sampled_from(["cpu"] * 5 + ["service:a", "service:b", "endpoint:e"]))
    degrees = {"c": draw(DEGREES), "s": draw(st.sampled_from([[1], [2], [1, 2, 4]])), "e": [1]}
    chosen = degrees[resource[0]]
    told = {"name": f"{resource[0]}{draw(st.integers(0, 2))}", "resource": resource,
            "degrees": chosen, "work_s": draw(st.floats(0.001, 5)),
            "serial": draw(st.sampled_from([0.0, 0.1, 0.6]))}
    return told | ({"resize": False} if draw(st.booleans()) else {})


@st.composite
def cases(draw: Any) -> tuple[Workload, Cluster]:
    turns = st.lists(st.fixed_dictionaries({
        "think_s": SECONDS, "actions": st.lists(actions(), min_size=1, max_size=3)}),
        min_size=1, max_size=4)
    trajectories = draw(st.lists(st.tuples(SECONDS, st.integers(1, 300), turns),
                                 min_size=1, max_size=8))
    work = Workload(name="any", trajectories=tuple(WorkloadTrajectory.model_validate({
        "trajectory": f"t{i}", "start_s": start, "session": {"mem_mib": mem}, "turns": told})
        for i, (start, mem, told) in enumerate(trajectories)))
    nodes = [{"name": f"n{i}", **node} for i, node in enumerate(draw(NODES))]
    nodes[0]["gpus"] = 8  # somebody can carry the services
    cluster = Cluster.model_validate({
        "nodes": nodes,
        "services": [{"name": "a", "restore_s": draw(st.sampled_from([0.0, 0.3, 2.0]))},
                     {"name": "b", "restore_s": 0.5}],
        "endpoints": [{"name": "e", "concurrency": draw(st.integers(1, 3)),
                       "rate_per_s": draw(st.sampled_from([0.5, 7])), "burst": 2}]})
    return work, cluster


@pytest.mark.parametrize("placer", ["elastic", "paper", "first-fit", "fcfs:4"])
@settings(max_examples=100, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases(), durations=st.sampled_from(["oracle", "learned"]))
def test_every_invariant_holds_on_any_workload_and_cluster(
        placer: str, case: tuple[Workload, Cluster], durations: str) -> None:
    """Records are complete, in order, within every capacity, aligned, on the home node and resized
    no more than allowed; the same input gives the same records to the byte."""
    work, cluster = case
    run = simulate(work, cluster, make_placer(placer), durations, check=True)
    assert faults(run, work, cluster) == []
    again = simulate(work, cluster, make_placer(placer), durations)
    assert again.records == run.records
