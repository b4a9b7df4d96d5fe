"""A het job whose component of GPU nodes loses one of its two nodes: with that component's own
`--no-kill` the component shrinks, and the job works on and ends well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.devcluster_fixture import devcluster, running_cluster
from helpers.slurm_site import Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_cluster(tmp_path_factory, netns=True, debian_hosts=True, cpu_nodes=2, gpu_nodes=2,
                         trainer_nodes=1, cpus_per_node=16,
                         conf_line=["SlurmdTimeout=30"]) as cluster:
        yield Site(cluster, install_for(cluster))


def component(site: Site, job: str) -> list[str]:
    """State, nodes and their names of the job's second component, by squeue."""
    told = site.cluster.run_as_user(["squeue", "-h", "-j", job, "-o", "%i|%T|%D|%N"]).stdout
    rows = [line.split("|") for line in told.splitlines()]
    return next((row[1:] for row in rows if row[0] == f"{job}+1"), [])


def test_a_component_that_loses_one_of_two_nodes_shrinks(nodes: Site) -> None:
    name, go = "shrinks", nodes.cluster.home / "shrinks.go"
    job = nodes.submit(
        "hetjob", name, partition_cpu="cpu", partition_gpu="gpu", partition_trainer="trainer",
        nodes_gpu="2", gres_gpu="gpu:1", mem_cpu="600", mem_gpu="600", ranks="1", gateway="off",
        mpi="none", time="20", trainer=f"until [ -e {go.name} ]; do sleep 0.2; done")

    def up() -> set[str]:
        return {n["name"] for n in nodes.info(job).get("nodes", []) if n["state"] == "UP"}

    nodes.until(lambda: len(up()) == 4, "all workers to join", 120,
                lambda: nodes.output(name, job))
    lost, kept = nodes.cluster.gpu_nodes[1], nodes.cluster.gpu_nodes[0]
    done = devcluster("node", "--prefix", str(nodes.cluster.prefix), "kill", lost)
    assert done.returncode == 0, done.stderr
    nodes.until(lambda: component(nodes, job)[1:] == ["1", kept], "Slurm to take the node", 200,
                lambda: str(component(nodes, job)))
    assert component(nodes, job)[0] == "RUNNING"
    nodes.until(lambda: up() == {*nodes.cluster.cpu_nodes, kept}, "the broker to know", 90)
    told = nodes.tangram("run", "-j", job, "--gpus", "1", "--", "hostname")
    assert told.stdout == f"{kept}\n", told
    go.touch()
    said = nodes.finish(name, job)
    nodes.until(lambda: not nodes.state(job), "the job to leave the queue", 60)

    def ends() -> list[str]:
        """Of the components; sacct keeps a row for each size that one had before."""
        rows = [row for row in nodes.components(job) if not row.startswith("RESIZING")]
        return [] if len(rows) < 3 or any(row.startswith("RUNNING") for row in rows) else rows

    assert nodes.until(ends, "sacct's ends", 60) == ["COMPLETED|0:0"] * 3, said
