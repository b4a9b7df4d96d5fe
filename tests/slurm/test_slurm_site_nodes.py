"""Nodes as sites have them, on a real Slurm: two hyperthreads per core, and Debian's hosts file, in
which a node's own name is 127.0.1.1; a network of IPv6 beside Slurm's; and time limits that an
administrator changes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from helpers.devcluster_fixture import running_cluster
from helpers.slurm_site import DATA, Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
ENDS = """#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=4 --mem=1200 --time=1 --output=ends-%j.out
export PATH={venv}/bin:$PATH TANGRAM_END_MARGIN_S=3600
end=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s)
export SLURM_JOB_END_TIME=$((end - {early}))
cd ~
tangram broker --nodes 1 &
until [ -s ~/.tangram/jobs/"$SLURM_JOB_ID"/access.json ]; do sleep 0.1; done
tangram worker --cpus 2 --devices none &
python trainer_session.py {seconds} > trainer-"$SLURM_JOB_ID".out 2>&1
wait
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_cluster(tmp_path_factory, cpu_nodes=2, gpu_nodes=0, trainer_nodes=0,
                         cpus_per_node=8, threads_per_core=2, netns=True, debian_hosts=True,
                         no_dbd=True, conf_line=["SlurmdTimeout=300"]) as cluster:
        yield Site(cluster, install_for(cluster))


def submit(site: Site, name: str, lent: str, rank_cpus: str) -> str:
    shutil.copy(DATA / "trainer_master.py", site.cluster.home)
    return site.submit(
        "homogeneous", name, partition="cpu", nodes="2", cpus_lent=lent, ranks="2", mem="1200",
        mem_lent="600", mem_trainer="500", cpus_per_rank=rank_cpus, gateway="off", mpi="none",
        time="5", trainer="python trainer_master.py")


def test_a_worker_of_5_and_ranks_of_3_cpus_share_a_node_of_8_hyperthreads(nodes: Site) -> None:
    """All ranks reach rank 0 and the broker at addresses that are not loopback."""
    job = submit(nodes, "odd", "5", "3")
    said = nodes.finish("odd", job, 90)
    assert "4 are lent (cpus_lent=5) and the ranks hold 4 (they asked for 3," in said, said
    met = [line.split() for line in said.splitlines() if line.startswith("rank ")]
    assert sorted(words[1] for words in met) == ["0", "1"], said
    hosts = {words[3] for words in met}
    assert len(hosts) == 1 and not hosts.pop().startswith("127."), said


def test_job_steps_that_cannot_fit_end_the_job_with_one_line(nodes: Site) -> None:
    job = submit(nodes, "wide", "1", "7")
    said = nodes.finish("wide", job, 60)
    assert said.count("tangram: error:") == 1 and "cpus_lent=1" in said, said
    assert "threads_per_core=2" in said and "rank " not in said, said


@pytest.fixture
def network6(nodes: Site) -> Iterator[str]:
    """A network of IPv6 that joins the nodes and this host; Slurm goes on with IPv4."""
    port = json.loads((nodes.cluster.prefix / "devcluster.json").read_text())["base_port"]
    base = f"fd00:{port:x}"
    links = [([], f"dcb{port}", f"{base}::1")]
    for number, node in enumerate(nodes.cluster.cpu_nodes, 10):
        inside = ["nsenter", "--target", str(nodes.cluster.pid_of(f"node-{node}")), "--net"]
        links.append((inside, "eth0", f"{base}::{number:x}"))
    for verb in ("add", "del"):
        for inside, device, address in links:
            subprocess.run([*inside, "ip", "-6", "addr", verb, f"{address}/64", "dev", device,
                            *["nodad"] * (verb == "add")], check=True)
        if verb == "add":
            yield f"{base}::/64"


@pytest.mark.long
def test_workers_ranks_and_users_reach_a_broker_at_an_ipv6_address(nodes: Site, network6: str
                                                                   ) -> None:
    """`bind` is a network, so that each node takes its own address in it."""
    settings = nodes.cluster.home / "six.toml"
    settings.write_text(f'bind = "{network6}"\n')
    shutil.copy(DATA / "trainer_master.py", nodes.cluster.home)
    job = nodes.submit(
        "homogeneous", "six", partition="cpu", nodes="2", cpus_lent="4", ranks="2", mem="1200",
        mem_lent="600", mem_trainer="500", gateway="off", mpi="none", time="5", config="six.toml",
        trainer="python trainer_master.py; until [ -e six.go ]; do sleep 0.2; done")
    nodes.until(lambda: nodes.output("six", job).count("meets") == 2, "both ranks", 90,
                lambda: nodes.output("six", job))
    access = nodes.cluster.home / f".tangram/jobs/{job}/access.json"
    dialled = [a for a in json.loads(access.read_text())["addresses"] if not a.startswith("unix:")]
    told = [nodes.tangram("run", "-j", job, "--cpus", "4", "--", "hostname").stdout
            for _ in range(2)]
    up = {node["name"] for node in nodes.info(job)["nodes"] if node["state"] == "UP"}
    (nodes.cluster.home / "six.go").touch()
    said = nodes.finish("six", job, 60)
    prefix = network6.removesuffix("::/64")
    assert len(dialled) == 1 and f"[{prefix}:" in dialled[0], dialled
    met = {line.split()[3] for line in said.splitlines() if line.startswith("rank ")}
    assert len(met) == 1 and met.pop().startswith(f"{prefix}:"), said
    assert up == set(nodes.cluster.cpu_nodes), said
    assert set(told) <= {f"{name}\n" for name in up} and all(told), told


@pytest.mark.long
def test_doctor_dials_back_from_every_node(nodes: Site) -> None:
    """The address is the one that a broker would publish, and not the one of the node's own
    name."""
    job = nodes.cluster.run_as_user(
        ["sbatch", "--parsable", "-N2", "-n2", "-c4", "--mem=1200", "-t5", "-o", "doctor.out",
         "--wrap", f"{nodes.venv}/bin/tangram doctor --json > doctor.json"]).stdout.strip()
    nodes.until(lambda: not nodes.state(job), "doctor's job to end", 240)
    told = json.loads((nodes.cluster.home / "doctor.json").read_text())
    found = {c["name"]: c for c in told["checks"] if c["group"] == "Network"}
    assert [found[name]["state"] for name in ("address", "tcp", "nodes")] == ["ok"] * 3, found
    assert "127." not in found["address"]["found"], found


def ends(site: Site, early: int, seconds: int) -> str:
    """A job of one minute whose worker believes that it ends even earlier."""
    shutil.copy(DATA / "trainer_session.py", site.cluster.home)
    told = site.cluster.run_as_user(["sbatch", "--parsable"], input=ENDS.format(
        venv=site.venv, early=early, seconds=seconds))
    assert told.returncode == 0, told.stderr
    job = told.stdout.strip()
    site.until(lambda: said_by_trainer(site, job).count("went") > 1, "its session to work", 60,
               lambda: site.output("ends", job) + said_by_trainer(site, job))
    return job


def said_by_trainer(site: Site, job: str) -> str:
    path = site.cluster.home / f"trainer-{job}.out"
    return path.read_text() if path.exists() else ""


def limit(site: Site, job: str, minutes: int) -> None:
    told = site.cluster.run_as_user(
        ["scontrol", "update", f"jobid={job}", f"timelimit={minutes}"], user=0, group=0,
        extra_groups=[], cwd="/")
    assert told.returncode == 0, told.stderr


def test_a_session_works_on_when_the_limit_is_extended(nodes: Site) -> None:
    """Unless Slurm is queried again, the node drains after 16 s and its session is closed."""
    job = ends(nodes, early=36, seconds=22)
    limit(nodes, job, 10)
    nodes.until(lambda: not nodes.state(job), "its end", 90)
    said = said_by_trainer(nodes, job)
    assert "went well" in said and "stopped" not in said, said + nodes.output("ends", job)


@pytest.mark.long
def test_extended_and_shortened_time_limits_are_followed(nodes: Site) -> None:
    """From one minute to four, learned before the drain; then to three, and the node drains in
    time."""
    job = ends(nodes, early=0, seconds=600)
    limit(nodes, job, 4)
    nodes.until(lambda: said_by_trainer(nodes, job).count("went") > 120, "a minute's work", 110)
    assert nodes.info(job)["nodes"][0]["state"] == "UP"
    limit(nodes, job, 3)
    nodes.until(lambda: "stopped" in said_by_trainer(nodes, job), "its drain", 120,
                lambda: str(nodes.info(job)))
    assert "SessionLost" in said_by_trainer(nodes, job)
    nodes.until(lambda: not nodes.state(job), "its end", 60)
    told = nodes.cluster.run_as_user(["scontrol", "show", "job", job]).stdout
    assert "JobState=COMPLETED" in told and "TimeLimit=00:03:00" in told, told  # no TIMEOUT
