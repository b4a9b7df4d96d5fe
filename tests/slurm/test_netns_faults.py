"""Nodes that lose their power or their network, for each layout: what survives, what runs again,
what is lost, and that the trainer learns the end of every action (docs/FAULTS.md)."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.devcluster_fixture import running_cluster
from helpers.netns_rig import LAYOUTS, Trial, nothing_is_lost, tally
from helpers.slurm_site import Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(900)]

# Longer than the cut, as everywhere (the default is 300 s), by more than a third: so seldom Slurm
# asks, and it counts from the last answer before the cut.
SLURMD_TIMEOUT_S = 90
CUT_S = 40


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_cluster(tmp_path_factory, netns=True, cpu_nodes=3, gpu_nodes=1, trainer_nodes=1,
                         cpus_per_node=16,
                         conf_line=[f"SlurmdTimeout={SLURMD_TIMEOUT_S}"]) as cluster:
        yield Site(cluster, install_for(cluster))


@pytest.fixture(params=LAYOUTS)
def trial(request: pytest.FixtureRequest, site: Site) -> Iterator[Trial]:
    name = f"{request.param}{len(os.listdir(site.cluster.home))}"
    trial = Trial(site, request.param, name)
    try:
        trial.start()
        yield trial
    finally:
        trial.clean()


def on_node(trial: Trial, node: str, pattern: str) -> bool:
    """Whether something runs on a node, by its network."""
    holder = trial.site.cluster.pid_of(f"node-{node}")
    space = os.readlink(f"/proc/{holder}/ns/net")
    for pid in trial.site.pids(pattern):
        try:
            if os.readlink(f"/proc/{pid}/ns/net") == space:
                return True
        except OSError:
            continue
    return False


def report(trial: Trial, what: str, told: dict) -> None:
    """A line for docs/FAULTS.md: `pytest -s` shows it; NETNS_REPORT names a file for it."""
    line = json.dumps({"layout": trial.layout, "what": what, "marks": trial.marks, **told})
    print(line)
    if path := os.environ.get("NETNS_REPORT"):
        with Path(path).open("a") as file:
            file.write(line + "\n")


def worker_node(trial: Trial) -> str:
    """A node with a worker and neither broker nor trainer."""
    return next(n for n in reversed(trial.nodes("UP")) if n != trial.leader()
                and n not in trial.site.cluster.trainer_nodes)


def flows(trial: Trial, seconds: float = 30) -> bool:
    """Whether actions still complete."""
    ran = len(trial.ended())
    end = time.monotonic() + seconds
    while (more := len(trial.ended())) <= ran and time.monotonic() < end:
        time.sleep(1)
    return more > ran


def told_by_slurm(trial: Trial, node: str) -> str:
    return f"{node} is {trial.node_state(node)}, jobs {trial.states()}"


def test_actions_run_again_and_sessions_are_lost_when_a_worker_node_dies(trial: Trial) -> None:
    """Its actions run again elsewhere; its sessions are lost, and their trainer learns that."""
    node = worker_node(trial)
    trial.fate("kill", node)
    trial.site.until(lambda: node not in trial.nodes("UP"), "the broker to know", 90)
    trial.mark("broker knows")
    trial.site.until(lambda: trial.node_state(node).startswith("down"), "Slurm to know", 300,
                     lambda: told_by_slurm(trial, node))
    trial.mark("Slurm knows")
    if trial.layout == "homogeneous":
        ends_with_its_node(trial, node)
        return
    time.sleep(10)
    states, on = trial.states(), flows(trial)
    ledger = trial.stop()
    report(trial, "kill worker node", {"states": states, "flows": on, "tally": tally(ledger)})
    back(trial, node)
    nothing_is_lost(ledger)
    assert states[trial.job] == "RUNNING" and on
    assert tally(ledger)["plain"]["ends"].keys() == {"result COMPLETED"}
    assert tally(ledger)["plain"]["again"] > 0
    assert tally(ledger)["session"]["ends"].keys() <= {"result COMPLETED", "error SessionLost",
                                                       "error ActionFailed"}


def back(trial: Trial, node: str) -> None:
    """Power again: Slurm takes it back."""
    trial.fate("start", node)
    trial.site.until(lambda: trial.node_state(node) in ("idle", "mixed", "allocated"),
                     "the node to be back", 200, lambda: told_by_slurm(trial, node))
    trial.mark("the node is back")


def ends_with_its_node(trial: Trial, node: str) -> None:
    """Trainer ranks span all nodes of a homogeneous job: Slurm ends their step with any of them,
    the script ends in order, and the journal has an end for every action."""
    trial.site.until(lambda: trial.state_of(trial.job) not in ("RUNNING", "COMPLETING"),
                     "the job to end", 300, lambda: told_by_slurm(trial, node))
    trial.mark("the job is over")
    rows = trial.rows()
    report(trial, "kill worker node", {
        "states": trial.states(), "journal": dict(Counter(r["state"] for r in rows)),
        "said": trial.site.output(trial.name, trial.job)[-400:]})
    back(trial, node)
    assert {r["state"] for r in rows} & {"COMPLETED"}
    assert {r["state"] for r in rows} <= {"COMPLETED", "NODE_FAIL", "CANCELLED"}


def test_a_worker_node_that_was_cut_off_rejoins_as_a_new_node(trial: Trial) -> None:
    """The node is cut off for less than Slurm's timeout and more than the broker's. The job does
    not change; the node is lost to the broker and joins as a new one."""
    node = worker_node(trial)
    trial.fate("cut", node)
    until = time.monotonic() + CUT_S
    trial.site.until(lambda: node not in trial.nodes("UP"), "the broker to know", 90)
    trial.mark("broker knows")
    time.sleep(max(0.0, until - time.monotonic()))
    during = told_by_slurm(trial, node)
    trial.fate("join", node)
    trial.site.until(lambda: node in trial.nodes("UP"), "its worker to come back", 90,
                     lambda: trial.site.output(trial.name, trial.job)[-2000:])
    trial.mark("lends again")
    trial.site.until(lambda: not trial.node_state(node).endswith("*"), "Slurm to hear it", 200,
                     lambda: told_by_slurm(trial, node))
    trial.mark("Slurm hears it")
    states, on, since = trial.states(), flows(trial), len(trial.ended())
    trial.site.until(lambda: any(r["node"] == node for r in trial.ended()[since:]),
                     "work to flow there again", 60)
    ledger = trial.stop()
    report(trial, "cut worker node 40 s", {"states": states, "flows": on, "tally": tally(ledger),
                                           "during": during})
    nothing_is_lost(ledger)
    assert states[trial.job] == "RUNNING" and on
    assert tally(ledger)["plain"]["ends"].keys() == {"result COMPLETED"}


def test_the_trainer_learns_every_end_and_slurm_requeues_when_the_leader_dies(trial: Trial) -> None:
    """The broker dies with its node. A trainer elsewhere learns the end of every action; Slurm ends
    the job and starts it again."""
    node, lenders = trial.leader(), trial.nodes("UP")
    trial.fate("kill", node)
    ledger = trial.ledger(150) if trial.layout == "hetjob" else None
    trial.mark("trainer told")
    others = [n for n in lenders if n != node]
    trial.site.until(lambda: not any(on_node(trial, n, "bin/tangram worker") for n in others),
                     "the other workers to end", 120)
    trial.mark("workers ended")
    trial.site.until(lambda: trial.lost(node), "Slurm to know", 300,
                     lambda: told_by_slurm(trial, node))
    trial.mark("Slurm knows")
    trial.site.until(lambda: trial.state_of(trial.job) not in ("RUNNING", "COMPLETING"),
                     "the job to be ended", 150, lambda: told_by_slurm(trial, node))
    trial.mark("the job is ended")
    states = trial.states()
    report(trial, "kill leader node", {"states": states,
                                       "tally": tally(ledger) if ledger else None})
    trial.fate("start", node)
    (trial.home / f"{trial.name}.json").unlink(missing_ok=True)
    trial.site.until(lambda: trial.state_of(trial.job) == "RUNNING", "it to run again", 240,
                     lambda: told_by_slurm(trial, node))
    trial.mark("runs again")
    trial.go.touch()
    second = trial.ledger(180)
    report(trial, "leader: second start", {"tally": tally(second)})
    if ledger is not None:
        nothing_is_lost(ledger)
        assert ledger["via"] in ("mpi", "socket")
