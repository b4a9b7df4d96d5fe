"""A real job that grows and shrinks: a burst starts satellites, idle nodes are released, and
Slurm's accounting and ours agree on what was held. It runs for minutes as the cluster's plain
user."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.devcluster_fixture import RunningCluster, running_cluster
from helpers.slurm_site import Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(1500)]

IDLE_S = 15
ELASTIC = f"""
[elastic]
max_nodes = 3
max_core_hours = 4
idle_release_s = {IDLE_S}
give_back = "all"
target_s = 10
grow_after_s = 2
arrive_s = 10

[[elastic.satellites]]
name = "unknown"
partition = "nowhere"
cpus = 8
time_min = 5

[[elastic.satellites]]
name = "limited"
partition = "scav"
cpus = 8
mem_mib = 400
time_min = 5

[[elastic.satellites]]
name = "spare"
partition = "cpu"
cpus = 8
mem_mib = 400
time_min = 5
"""
BURST, NAP_S, QUIET_S = 400, 2, 70
JOB = {"nodes_cpu": "1", "cpus_cpu": "4", "nodes_gpu": "1", "cpus_gpu": "4", "ranks": "1",
       "strict": True, "mem_cpu": "400", "mem_gpu": "400"}


@pytest.fixture(scope="module")
def grows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_cluster(tmp_path_factory, cpu_nodes=4, gpu_nodes=1, trainer_nodes=1,
                         cpus_per_node=8, conf_line=["SlurmdTimeout=300"]) as cluster:
        limit = ["scontrol", "update", "partitionname=scav", "MaxTime=1"]
        subprocess.run(limit, check=True, env={**cluster.env, "HOME": "/"})  # as the site's admin
        yield Site(cluster, install_for(cluster))


def queue(cluster: RunningCluster) -> list[str]:
    """The user's jobs and components that hold nodes or wait, by name and state."""
    told = cluster.run_as_user(["squeue", "-h", "-o", "%i %j %T"], check=True)
    return told.stdout.splitlines()


def start(site: Site, name: str, elastic: str) -> str:
    """A het job whose trainer makes the burst, is quiet for QUIET_S, and ends."""
    (site.cluster.home / "tangram.toml").write_text(elastic)
    stop = site.cluster.home / f"{name}.stop"
    trainer = f"python trainer_burst.py {BURST} {NAP_S} {stop.name} {QUIET_S}"
    return site.sbatch(name, trainer, "trainer_burst.py", config="tangram.toml", **JOB)  # type: ignore[arg-type]


def figures(site: Site, name: str, job: str, others: list[str]) -> dict[str, Any]:
    """Held and used core-hours by our accounting, held ones by sacct, and the time of the burst."""
    told = site.tangram("acct", "-j", job, "--held", "--json")
    assert told.returncode == 0, told.stderr
    ours = json.loads(told.stdout)

    def elapsed() -> dict[str, int]:
        rows = site.cluster.run_as_user(["sacct", "-n", "-X", "-P", "-j", ",".join([job, *others]),
                                         "-o", "JobID,ElapsedRaw,State,End"]).stdout.splitlines()
        found = [row.split("|") for row in rows]
        whole = len(found) == 3 + len(others) and all(r[3] != "Unknown" for r in found)
        return {r[0]: int(r[1]) for r in found} if whole else {}

    slurm = site.until(elapsed, "sacct to have all jobs", 90)
    for row in ours["allocations"]:
        # the job's own workers start after it and end before it; a satellite is held as Slurm says
        by_slurm = slurm[row["job"]]
        by_us = (row["until"] - row["since"]) / 1e9
        slack = 25 if "+" in row["job"] or not row["name"] else 3
        assert -2 < by_slurm - by_us < slack, (row, by_slurm)
    (burst,) = [line for line in site.output(name, job).splitlines() if line.startswith("burst:")]
    assert burst.startswith(f"burst: {BURST} of {BURST} ok")
    lent = {row["job"]: row["cpus"] for row in ours["allocations"]}
    return {"held_core_h": ours["held_core_h"], "used_core_h": ours["used_core_h"],
            "held_core_h_sacct": sum(slurm[j] * cpus for j, cpus in lent.items()) / 3600,
            "burst_s": float(burst.split()[-2])}


def satellites(cluster: RunningCluster, job: str) -> list[str]:
    return [row for row in queue(cluster) if f"tangram-{job}-s" in row]


def test_a_job_gets_satellites_for_a_burst_and_releases_idle_nodes(grows: Site) -> None:
    site, told = grows, {}
    told["static"] = _static(site)
    job = start(site, "alone", "")
    site.finish("alone", job, 300)
    told["alone"] = figures(site, "alone", job, [])
    told["elastic"] = _elastic(site)
    for name, way in told.items():
        used = way["used_core_h"] / way["held_core_h"]
        print(f"{name:<8} held {way['held_core_h']:.3f} core-h (sacct "
              f"{way['held_core_h_sacct']:.3f}), used {way['used_core_h']:.3f} ({used:.0%}), "
              f"burst {way['burst_s']:.1f} s")
    assert told["elastic"]["burst_s"] < told["alone"]["burst_s"]
    assert told["elastic"]["held_core_h"] < told["static"]["held_core_h"]
    assert site.left_behind() == []


def _static(site: Site) -> dict[str, Any]:
    """A job with as many nodes as the elastic job may have, from start to end."""
    job = start(site, "static", "")
    others = [site.submit("satellite", f"hand{i}", broker=job, partition="cpu", cpus="8",
                          mem="400", time="10") for i in range(3)]
    site.finish("static", job, 300)
    for i, other in enumerate(others):
        site.finish(f"hand{i}", other)
    return figures(site, "static", job, others)


def _elastic(site: Site) -> dict[str, Any]:
    cluster, job = site.cluster, start(site, "elastic", ELASTIC)
    site.until(lambda: sum("RUNNING" in row for row in satellites(cluster, job)) >= 2,
               "two satellites to run", 120, lambda: site.tangram("info", "-j", job).stdout)
    said = site.tangram("info", "-j", job).stdout
    assert "Invalid partition name" in said and "REFUSED  unknown" in said, said
    assert "PartitionTimeLimit" in said and "REFUSED  limited" in said, said
    assert "spare" in said and "asked for spare" in said, said
    component = [row for row in queue(cluster) if row.startswith(f"{job}+")]
    assert len(component) == 3
    site.until(lambda: "burst:" in site.output("elastic", job), "the burst to end", 120)
    site.until(lambda: not satellites(cluster, job), "the satellites to go", 120,
               lambda: "\n".join(queue(cluster)))
    site.until(lambda: not any(row.startswith(f"{job}+1 ") for row in queue(cluster)),
               "the idle component to go", 120, lambda: "\n".join(queue(cluster)))
    assert any(row.startswith(f"{job}+0 ") for row in queue(cluster)), "the job goes on"
    said = site.tangram("explain", "-j", job, "allocation").stdout
    print(said)
    assert said.count("gave back") >= 3 and "limit 15 s" in said, said
    assert said.count("was refused") >= 1 and "Slurm holds it back: PartitionTimeLimit" in said
    scratch = [path for root in site.roots.values()
               for path in Path(root, "tmp").glob(f"tangram-node-*-{cluster.name}*")]
    assert len(scratch) == 1, scratch  # the one node that is left
    calls = site.info(job)["slurm"]
    assert calls["submits"] + calls["queries"] + calls["cancels"] < 30, calls
    site.finish("elastic", job, 300)
    jobs = [row["job"] for row in json.loads(
        site.tangram("acct", "-j", job, "--held", "--json").stdout)["allocations"] if row["name"]]
    assert len(jobs) >= 2
    return figures(site, "elastic", job, jobs)
