"""Every template except `hetjob` (see test_slurm_job) on a real Slurm as the plain user: run to the
end, records compared with sacct's, and the Slurm calls counted."""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
from helpers.slurm_site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

MAIN = "python -m tangram_hpc.demo.demo_rank --problems 12 --seed 0 --scale 0.01 --out {}.json"
LAYOUTS = {
    "hetjob": {},
    "homogeneous": {"partition": "gpu", "cpus_lent": "4", "gres": "gpu:2", "gres_lent": "gpu:1",
                    "gres_trainer": "gpu:1", "mem": "1500", "mem_lent": "1000",
                    "mem_trainer": "500"},
    "single-node": {"partition": "cpu", "cpus_lent": "6", "mem": "1800"},
    "satellites": {"partition": "trainer", "satellites": "2"}}
# on nodes of their own, so that a node names its step: `scav` has those of `gpu` too
SATELLITES = ({"partition": "cpu", "cpus": "4", "mem": "800", "component": "spare"},
              {"partition": "gpu", "cpus": "4", "mem": "800", "gres": "gpu:1"})
STEPS = {"hetjob": 3, "homogeneous": 2, "single-node": 2, "satellites": 1}


# ---- what sacct says ---------------------------------------------------------------------------


def sacct(site: Site, job: str) -> list[dict[str, str]]:
    """The job's rows, once all of them have ended; times are epoch seconds."""
    fields = "JobID,JobName,State,ExitCode,Start,End,ElapsedRaw,NCPUS,NNodes,NodeList,AllocTRES"

    def rows() -> list[dict[str, str]]:
        told = site.cluster.run_as_user(["sacct", "-n", "-P", "-j", job, "-o", fields],
                                        env={"SLURM_TIME_FORMAT": "%s"}).stdout.splitlines()
        return [dict(zip(fields.split(","), line.split("|"), strict=True)) for line in told]

    def complete() -> list[dict[str, str]]:
        found = rows()
        # until the controller sends a short job's own record, its row is called `allocation`
        over = all(r["End"].isdigit() and r["NCPUS"] and r["JobName"] != "allocation"
                   for r in found)
        return found if over and any(r["JobID"].endswith(".0") for r in found) else []

    return site.until(complete, f"sacct to have job {job} whole", 90, lambda: str(rows()))


def starts(site: Site, job: str) -> list[str]:
    """How each start of a job ended, once sacct has heard of the last (squeue knows it before)."""
    def states() -> list[str]:
        return site.cluster.run_as_user(["sacct", "-n", "-X", "-P", "--duplicates", "-j", job, "-o",
                                         "State"]).stdout.split()

    site.until(lambda: states()[-1:] not in ([], ["RUNNING"], ["PENDING"]), "sacct to hear it", 60)
    return states()


def steps(rows: list[dict[str, str]], name: str = "") -> list[dict[str, str]]:
    """The job steps made by srun; with `name`, only those of this name."""
    return [r for r in rows if re.search(r"\.\d+$", r["JobID"]) and name in ("", r["JobName"])]


def check_against_sacct(actions: list[dict[str, Any]], lends: list[dict[str, str]],
                        site: Site) -> None:
    """Each action ran within the step that lent its node, and together they never had more CPUs
    than Slurm gave that step, nor used more CPU time."""
    places = {}
    for step in lends:
        told = site.cluster.run_as_user(["scontrol", "show", "hostnames", step["NodeList"]]).stdout
        for node in told.split():
            assert node not in places, "a node is lent once"
            places[node] = step
    for row in actions:
        step = places[row["node"]]
        assert int(step["Start"]) - 1 <= row["start_ns"] / 1e9, row
        assert row["end_ns"] / 1e9 <= int(step["End"]) + 1, row
    for node, step in places.items():
        mine = [r for r in actions if r["node"] == node]
        turns = []
        for row in mine:
            ends = [at for at, _ in row["grants"][1:]] + [row["end_ns"]]
            for (at, cores), end in zip(row["grants"], ends, strict=True):
                turns += [(at, len(cores)), (end, -len(cores))]
        turns.sort()  # at the same instant what ends comes first
        cpus = int(step["NCPUS"]) // int(step["NNodes"])
        assert max(accumulate(change for _, change in turns), default=0) <= cpus, node
        held_s = sum(r["cpu_held_ns"] for r in mine) / 1e9
        assert held_s <= cpus * (int(step["ElapsedRaw"]) + 1), node


# ---- the light one -----------------------------------------------------------------------------


def test_the_single_node_template_runs_a_torchrun_style_trainer(site: Site) -> None:
    """`single-node` without MPI: ranks meet at the address that `tangram rank` gives, and use the
    socket. A core is two CPUs: three ranks of one CPU hold two cores, and sacct counts three."""
    job = site.sbatch("torchlike", "TRAINER_STATUS=6 python trainer_torch.py", "trainer_torch.py",
                      template="single-node", ranks=3, gateway="off", mpi="none",
                      partition="scav", cpus_lent="2")
    said = site.finish("torchlike", job)
    ours = [line for line in said.splitlines() if not line.startswith("srun: ")]
    assert ours[1:] == ["3 ranks by socket: 328350"], said
    assert "the ranks hold 4 (they asked for 3, and sacct counts these)" in ours[0], said
    rows = sacct(site, job)
    ends = {r["JobName"]: (r["ExitCode"], r["NCPUS"]) for r in rows}
    assert ends == {"torchlike": ("6:0", "6"), "batch": ("6:0", "6"), "workers": ("0:0", "2"),
                    "ranks": ("6:0", "3")}, rows
    done = [r for r in site.acct(job) if r["name"] == "pow"]
    assert len(done) == 100
    check_against_sacct(done, steps(rows, "workers"), site)
    assert not site.left_behind()


def test_the_ranks_are_told_to_end_once_while_another_job_waits(site: Site) -> None:
    """scancel of Slurm 22.05 signals a step twice then, and fails for a node without the step."""
    trainer = "trap 'echo told; sleep 2; exit 4' TERM; echo up; while :; do sleep 0.1; done"
    job = site.sbatch("toldonce", trainer, template="homogeneous", ranks=1, gateway="off",
                      mpi="none", partition="cpu", mem="600", cpus_lent="2")
    site.until(lambda: "up\n" in site.output("toldonce", job), "the rank to be up", 90,
               lambda: site.output("toldonce", job))
    told = site.cluster.run_as_user(
        ["sbatch", "--parsable", "--hold", "-t", "1", "-o", "/dev/null", "--wrap", "true"])
    try:
        site.cluster.run_as_user(["scancel", "--batch", "--signal=USR1", job], check=True)
        said = site.finish("toldonce", job).splitlines()
    finally:
        site.cluster.run_as_user(["scancel", told.stdout.strip()], check=True)
    assert said.count("told") == 1 and not [line for line in said if "scancel" in line], said
    assert starts(site, job) == ["FAILED"]


# ---- the main job in every layout --------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("template", LAYOUTS)
def test_each_template_layout_runs_the_main_job(site: Site, template: str) -> None:
    """The RL step over coding tasks; each reward is certain, and records agree with sacct's."""
    name = "main" + template.replace("-", "")
    job = site.sbatch(name, MAIN.format(name), template=template, **LAYOUTS[template])
    others = [site.submit("satellite", f"{name}{n}", broker=job, time="10", **keys)
              for n, keys in enumerate(SATELLITES) if template == "satellites"]
    said = site.finish(name, job, 200)
    told = json.loads((site.cluster.home / f"{name}.json").read_text())
    assert len(told["ranks"]) == 2 and {r["via"] for r in told["ranks"]} == {"mpi"}, said
    assert sum(len(r["rewards"]) for r in told["ranks"]) == 48
    assert [r["wrong"] for r in told["ranks"]] == [[], []]
    for n, other in enumerate(others):
        site.finish(f"{name}{n}", other)
    rows = sacct(site, job)
    assert {(r["State"], r["ExitCode"]) for r in rows} == {("COMPLETED", "0:0")}, rows
    assert len(steps(rows)) == STEPS[template], rows
    lends = [r for o in others for r in steps(sacct(site, o))] or steps(rows, "workers")
    assert {r["State"] for r in lends} == {"COMPLETED"}
    actions = site.acct(job)
    assert Counter(r["kind"] for r in actions)["exec"] == 96
    used, nodes = len({r["node"] for r in actions}), sum(int(r["NNodes"]) for r in lends)
    assert used == nodes or (others and used), (used, nodes)  # a satellite may come late
    check_against_sacct(actions, lends, site)
    site.until(lambda: not site.left_behind(), "all that is the user's to go", 30,
               lambda: str(site.left_behind()))


@pytest.mark.long
def test_the_replay_template_runs_and_compares_with_the_simulation(site: Site) -> None:
    """One job step, and the figures of the live run beside those of the simulation."""
    rng = random.Random(0)
    lines = [{"format": "tangram-workload/1", "name": "small"}] + [
        {"trajectory": f"t{n}", "start_s": 0.0, "session": {"mem_mib": 100}, "turns": [
            {"think_s": rng.uniform(0.1, 1), "actions": [
                {"name": "build", "resource": "cpu", "degrees": [1, 2, 4], "serial": 0.1,
                 "work_s": rng.uniform(1, 6)}]} for _ in range(2)]} for n in range(20)]
    work = site.cluster.home / "small.jsonl"
    work.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = site.submit("replay", "replayed", workload=str(work), virtual_cpus="8", time="10",
                      partition="scav", scale="0.2", mem="1500")
    said = site.finish("replayed", job, 200)
    told = json.loads((site.cluster.home / f"replayed-{job}.json").read_text())
    assert told["ratio"], said
    records = (site.cluster.home / f"replayed-{job}.jsonl").read_text().splitlines()
    assert sum(json.loads(r).get("state") == "COMPLETED" for r in records) == 40
    rows = sacct(site, job)
    assert len(steps(rows)) == 1 and {r["State"] for r in rows} == {"COMPLETED"}
    assert not site.left_behind()


# ---- satellites come and go --------------------------------------------------------------------


@pytest.mark.long
def test_a_satellite_that_is_cancelled_loses_no_action(site: Site) -> None:
    """Its actions start again on the other satellite and end once; its node is recorded as having
    left."""
    job = site.sbatch("moves", "python trainer_moves.py 8 6", "trainer_moves.py",
                      template="satellites", **LAYOUTS["satellites"])
    first, second = (site.submit("satellite", f"moves{n}", broker=job, time="10", **keys)
                     for n, keys in enumerate(SATELLITES))
    site.until(lambda: site.info(job).get("actions", {}).get("RUNNING") == 8, "all to run", 90,
               lambda: site.output("moves", job))
    site.cluster.run_as_user(["scancel", first], check=True)
    said = site.finish("moves", job)
    assert "ok by attempts [(1, 4), (2, 4)]" in said, said
    rows = [r for r in site.acct(job) if r["name"] == "stays"]
    assert len(rows) == 8 and {r["state"] for r in rows} == {"COMPLETED"}
    assert len({r["node"] for r in rows}) == 1
    site.finish("moves1", second)
    assert sacct(site, first)[0]["State"].startswith("CANCELLED")
    assert sacct(site, second)[0]["State"] == "COMPLETED"
    site.until(lambda: not site.left_behind(), "all that is the user's to go", 30,
               lambda: str(site.left_behind()))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_preempted_satellite_leaves_and_joins_again(site: Site) -> None:
    """During its grace time Slurm signals the job steps and not the script: the worker says that it
    leaves, and joins again when the job restarts."""
    stop = site.cluster.home / "preempted.stop"
    job = site.sbatch("preempted", f"until [ -e {stop} ]; do sleep 0.5; done",
                      template="satellites", partition="trainer", ranks=1, gateway="off",
                      mpi="none")
    other = site.submit("satellite", "victim", broker=job, time="10", partition="scav", cpus="2",
                        mem="500")

    def nodes() -> Counter[str]:
        return Counter(n["state"] for n in site.info(job).get("nodes", []))

    site.until(lambda: nodes() == {"UP": 1}, "the satellite to join", 90,
               lambda: site.output("victim", other))
    for part in ("cpu", "gpu"):  # whole nodes of a higher tier, wherever it is
        site.cluster.run_as_user(["sbatch", "-p", part, "-N", "2", "--exclusive", "-o",
                                  "/dev/null", "--wrap", "sleep 5"], check=True)
    site.until(lambda: nodes() == {"DOWN": 1}, "its node to go", 90, lambda: str(nodes()))
    site.until(lambda: nodes() == {"DOWN": 1, "UP": 1}, "it to come back", 300,
               lambda: f"{nodes()} {site.state(other)}")
    stop.touch()
    site.finish("preempted", job)
    site.finish("victim", other)
    told = starts(site, other)
    assert told[0] in ("PREEMPTED", "REQUEUED") and told[1:] == ["COMPLETED"], told
    site.until(lambda: not site.left_behind(), "all that is the user's to go", 30,
               lambda: str(site.left_behind()))


# ---- a component that is lost ------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("status", "word"), [("0", "COMPLETED"), ("3", "FAILED")])
def test_a_het_job_leaves_no_component_in_the_queue(site: Site, status: str, word: str) -> None:
    """Slurm requeues a component alone that has lost its only node. It goes when the job ends, and
    the job has its trainer's status."""
    name, stop = f"lost{status}", site.cluster.home / f"lost{status}.stop"
    job = site.sbatch(name, f"until [ -e {stop} ]; do sleep 0.5; done; exit {status}", ranks=1,
                      nodes_gpu="1", gateway="off", mpi="none")
    site.until(lambda: len(site.info(job).get("nodes", [])) == 3, "all workers to join", 120,
               lambda: site.output(name, job))

    def component(what: str) -> str:
        told = site.cluster.run_as_user(["squeue", "-h", "-j", job, "-o", f"%i|{what}"]).stdout
        return dict(line.split("|") for line in told.splitlines()).get(f"{job}+1", "")

    node = component("%N")
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"],
                   env=site.cluster.env, check=True)
    site.until(lambda: component("%T") == "PENDING", "Slurm to requeue the component", 60)
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"],
                   env=site.cluster.env, check=False, capture_output=True)  # it may be up already
    stop.touch()
    site.until(lambda: not site.cluster.run_as_user(["squeue", "-h", "-j", job]).stdout.strip(),
               "the queue to be empty", 90, lambda: site.output(name, job))

    def leader() -> list[str]:
        """The rows of the leader; one more is written when the job loses a node."""
        return site.cluster.run_as_user(["sacct", "-n", "-X", "-P", "-j", f"{job}+0", "-o",
                                         "State,ExitCode"]).stdout.splitlines()

    site.until(lambda: leader()[-1:] == [f"{word}|{status}:0"], "sacct to hear it", 60,
               lambda: str(leader()))


# ---- preemption --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("template", "after"), [("single-node", "true"), ("homogeneous", "false")])
def test_a_preempted_trainer_that_ends_in_the_grace_time_starts_again(
        site: Site, template: str, after: str) -> None:
    """In the grace time Slurm signals the job steps and not the script, and the trainer saves its
    state and ends, with status 0 or another one. The job waits in the queue and goes on."""
    name = "evicted" + template.replace("-", "")
    keys = LAYOUTS[template] | {"partition": "scav"}
    job = site.sbatch(name, f"trap : TERM; python trainer_resumes.py 60 1 {name}.state; {after}",
                      "trainer_resumes.py", template=template, warn="20", ranks=1, gateway="off",
                      mpi="none", **keys)
    state = site.cluster.home / f"{name}.state"
    site.until(lambda: state.exists() and int(state.read_text()) > 3, "some steps", 90,
               lambda: site.output(name, job))
    node = site.cluster.run_as_user(["squeue", "-h", "-j", job, "-o", "%B"]).stdout.strip()
    part = "cpu" if node in site.cluster.cpu_nodes else "gpu"
    site.cluster.run_as_user(["sbatch", "-p", part, "-w", node, "--exclusive", "-o", "/dev/null",
                              "--wrap", "sleep 2"], check=True)
    site.until(lambda: site.state(job) == "PENDING", "it to wait in the queue", 90,
               lambda: site.output(name, job))
    first = site.output(name, job)
    assert "the job waits for its next start" in first, first
    again = site.cluster.home / f"{name}-{job}.1.out"
    site.until(lambda: again.exists() and "at step 60 of 60" in again.read_text(), "the rest", 400,
               lambda: str(site.state(job)))
    site.finish(name, job)
    told = starts(site, job)
    assert told[0] in ("PREEMPTED", "REQUEUED") and len(told) == 2, told
    assert {r["state"] for r in site.acct(job)} == {"COMPLETED"}
    site.until(lambda: not site.left_behind(), "all that is the user's to go", 30,
               lambda: str(site.left_behind()))


# ---- the time limit ----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_at_its_time_limit_saves_and_is_requeued(site: Site) -> None:
    """The work takes longer than the limit of two minutes. The job is warned (by Slurm, up to a
    minute early), saved, requeued, continued and finished; each start has its log."""
    (site.cluster.home / "limit.state").unlink(missing_ok=True)
    job = site.sbatch("limit", "python trainer_resumes.py 120 1 limit.state", "trainer_resumes.py",
                      template="single-node", time="2", warn="20", requeues="5", partition="cpu",
                      cpus_lent="2", gateway="off", mpi="none", ranks=1)
    site.finish("limit", job, 840)
    logs = [site.output("limit", job)]
    while (later := site.cluster.home / f"limit-{job}.{len(logs)}.out").exists():
        logs.append(later.read_text())
    assert len(logs) > 1, logs
    for n, log in enumerate(logs):
        assert f"start {n}: at step" in log, logs
        assert ("at step 120 of 120" in log) == (n == len(logs) - 1), logs
        assert (f"start {n + 1} of 5 follows" in log) == (n < len(logs) - 1), logs
    told = starts(site, job)
    assert told == ["REQUEUED"] * (len(logs) - 1) + ["COMPLETED"], told
    assert [r["state"] for r in site.acct(job)] == ["COMPLETED"] * len(site.acct(job))
    assert not site.left_behind()


# ---- what Slurm is asked -----------------------------------------------------------------------


def rpcs_of_user(site: Site) -> int:
    """How many RPCs the controller has had of our user, by its own count (asked as root)."""
    told = subprocess.run(["sdiag"], env=site.cluster.env, capture_output=True, text=True,
                          check=True).stdout
    found = re.search(rf"{site.cluster.user} +\( *\d+\) count:(\d+)", told)
    return int(found[1]) if found else 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_whole_job_makes_as_many_steps_and_rpcs_for_10000_actions_as_for_100(site: Site) -> None:
    """Job steps and RPCs from sbatch to the end. The test itself calls Slurm only afterwards (the
    broker's access file says when the job is over)."""
    counts = {}
    for actions in (100, 10_000):
        name = f"asks{actions}"
        before = rpcs_of_user(site)
        job = site.sbatch(name, f"python trainer_actions.py {actions}", "trainer_actions.py")
        access = site.cluster.home / f".tangram/jobs/{job}/access.json"
        site.until(lambda at=access: at.exists() and json.loads(at.read_text())["ended"],
                   "the broker to end", 400, lambda name=name, job=job: site.output(name, job))
        site.until(lambda job=job: not subprocess.run(
            ["squeue", "-h", "-j", job, "-t", "RUNNING,COMPLETING"], env=site.cluster.env,
            capture_output=True, text=True, check=False).stdout, "the job to go", 60)
        asked = rpcs_of_user(site) - before
        assert f"{actions} of {actions} ok" in site.output(name, job)
        rows = sacct(site, job)
        counts[actions] = (len(steps(rows)), asked, int(rows[0]["ElapsedRaw"]))
    print(f"steps, RPCs of the user and seconds by actions: {counts}")
    few, many = counts[100], counts[10_000]
    assert few[0] == many[0] == 3
    longer_s = max(0, many[2] - few[2])  # the broker looks every 30 s, whatever runs
    assert 0 < many[1] <= few[1] + 5 + longer_s // 30, counts
