"""A het job whose component of GPU nodes loses one of its two nodes: with that component's own
`--no-kill` the component shrinks, and the job works on and ends well. A component that waits in the
queue because the whole job was put back there is not taken for a lost one, and one that lost its
only node does not start without the others. On a first node that is
set down, nothing of the job stays, though Slurm runs no epilog there."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from helpers.devcluster_fixture import devcluster, running_cluster
from helpers.slurm_site import Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    name = f"l{os.getpid()}"
    prefix = f"/tmp/devcluster-{name}"
    with running_cluster(tmp_path_factory, name=name, prefix=prefix, cpu_nodes=2, gpu_nodes=2,
                         trainer_nodes=1, cpus_per_node=16, conf_line=[
                             "SlurmdTimeout=30", "KillWait=60",
                             f"AuthInfo=socket={prefix}/munge/munge.sock,cred_expire=20",
                         ]) as cluster:
        yield Site(cluster, install_for(cluster))


def rows(site: Site, job: str) -> dict[str, list[str]]:
    """State, nodes and their names of the job's components, by squeue."""
    told = site.cluster.run_as_user(["squeue", "-h", "-j", job, "-o", "%i|%T|%D|%N"]).stdout
    return {row[0]: row[1:] for row in (line.split("|") for line in told.splitlines())}


def component(site: Site, job: str) -> list[str]:
    """State, nodes and node names of the second component."""
    return rows(site, job).get(f"{job}+1", [])


def submitted(site: Site, name: str, strict: bool = True, **keys: str) -> str:
    """A job whose trainer ends when a file of its name is there."""
    return site.submit("hetjob", name, strict, **{
        "partition_cpu": "cpu", "partition_gpu": "gpu", "partition_trainer": "trainer",
        "nodes_gpu": "2", "gres_gpu": "gpu:1", "mem_cpu": "600", "mem_gpu": "600", "ranks": "1",
        "gateway": "off", "mpi": "none", "time": "20",
        "trainer": f"until [ -e {name}.go ]; do sleep 0.2; done", **keys})


def test_a_job_that_is_requeued_while_its_script_still_ends_starts_again(nodes: Site) -> None:
    """Its other components wait in the queue before its script is over, as lost ones would."""
    job = submitted(nodes, "again", requeues="3")
    nodes.until(lambda: len(nodes.info(job).get("nodes", [])) == 4, "all workers to join", 120,
                lambda: nodes.output("again", job))
    told = subprocess.run(["pgrep", "-u", nodes.cluster.user, "-f", "slurm_script"],
                          capture_output=True, text=True, check=True)
    script = min(map(int, told.stdout.split()))  # subshells have its command line too

    def stop() -> None:
        try:
            os.kill(script, signal.SIGSTOP)
        except ProcessLookupError:
            pytest.fail("the script was over before the other components waited")

    def wait_behind_the_script() -> bool:
        stop()  # again and again, as Slurm lets it go on to end it
        return [rows(nodes, job).get(f"{job}+{n}", [""])[0] for n in (1, 2)] == ["PENDING"] * 2

    stop()
    assert nodes.cluster.run_as_user(["scontrol", "requeue", job]).returncode == 0
    nodes.until(wait_behind_the_script, "the other components to wait", 30,
                lambda: str(rows(nodes, job)))
    os.kill(script, signal.SIGCONT)
    nodes.until(lambda: len(nodes.info(job).get("nodes", [])) == 4, "the next start", 200,
                lambda: str(rows(nodes, job)))
    (nodes.cluster.home / "again.go").touch()
    nodes.finish("again", job)


def test_a_component_that_lost_its_only_node_starts_only_with_the_whole_job(nodes: Site) -> None:
    """By itself Slurm starts it as soon as its node is back, with a second copy of the job's script
    on the first node. It then drains that node, ends the whole job and holds it."""
    job = submitted(nodes, "waits", nodes_gpu="1")
    nodes.until(lambda: len(nodes.info(job).get("nodes", [])) == 3, "all workers to join", 120,
                lambda: nodes.output("waits", job))
    node = component(nodes, job)[2]
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"],
                   env=nodes.cluster.env, check=True)

    def time_of(number: int, what: str) -> int:
        """Of a component, by squeue, in seconds since 1970; 0 while there is none."""
        told = nodes.cluster.run_as_user(["squeue", "-h", "-j", job, "-o", f"%i|{what}"],
                                         env={"SLURM_TIME_FORMAT": "%s"}).stdout
        found = dict(line.split("|") for line in told.splitlines())[f"{job}+{number}"]
        return int(found) if found.isdigit() else 0

    nodes.until(lambda: component(nodes, job)[0] == "PENDING"
                and time_of(1, "%S") > time_of(0, "%e"), "it to wait until the job's end", 40,
                lambda: f"{rows(nodes, job)} {nodes.output('waits', job)}")
    assert {state for state, *_ in rows(nodes, job).values()} == {"RUNNING", "PENDING"}
    nodes.cluster.run_as_user(["scontrol", "requeue", job])  # it says that one waits already
    nodes.until(lambda: len(nodes.info(job).get("nodes", [])) == 3, "the next start", 400,
                lambda: f"{rows(nodes, job)} {nodes.output('waits', job)}")
    (nodes.cluster.home / "waits.go").touch()
    nodes.finish("waits", job)


def test_nothing_stays_on_a_first_node_that_is_set_down(nodes: Site) -> None:
    """Slurm takes the node from the job, which has others, and kills the script and its broker."""
    job = submitted(nodes, "down")
    nodes.until(lambda: len(nodes.info(job).get("nodes", [])) == 4, "all workers to join", 120,
                lambda: nodes.output("down", job))
    first = nodes.cluster.run_as_user(["squeue", "-h", "-j", job, "-o", "%B"]).stdout.split()[0]
    assert any(f"{nodes.roots[first]}/tmp/tangram-broker-" in path for path in nodes.left_behind())
    subprocess.run(["scontrol", "update", f"nodename={first}", "state=down", "reason=test"],
                   env=nodes.cluster.env, check=True)
    nodes.until(lambda: not nodes.state(job), "the job to leave the queue", 90)
    nodes.until(lambda: not nodes.left_behind(), "all that is the user's to go", 30,
                lambda: str(nodes.left_behind()))


@pytest.mark.parametrize(("name", "number"), [("own", 0), ("other", 1), ("dead", 1)])
def test_a_job_starts_again_whose_first_component_alone_is_put_back(
        nodes: Site, name: str, number: int) -> None:
    """Slurm puts a first component of one node back into the queue when any node of the job is set
    down or lost, and ends the others when the script is over. They have to follow it, as it cannot
    start alone."""
    job = submitted(nodes, name, strict=False, nodes_cpu="1")
    nodes.until(lambda: len(nodes.info(job).get("nodes", [])) == 3, "all workers to join", 120,
                lambda: nodes.output(name, job))
    node = rows(nodes, job)[f"{job}+{number}"][2].replace("[1-2]", "1")
    prefix = ("node", "--prefix", str(nodes.cluster.prefix))
    if name == "dead":
        assert devcluster(*prefix, "kill", node).returncode == 0
        nodes.until(lambda: rows(nodes, job)[f"{job}+0"][0] == "PENDING", "Slurm to notice", 120,
                    lambda: str(rows(nodes, job)))
        assert devcluster(*prefix, "start", node).returncode == 0
    else:
        subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"],
                       env=nodes.cluster.env, check=True)
    again = nodes.cluster.home / f"{name}-{job}.1.out"
    nodes.until(again.exists, "the next start", 200, lambda: str(rows(nodes, job)))

    def up() -> int:
        return sum(n["state"] == "UP" for n in nodes.info(job).get("nodes", []))

    nodes.until(lambda: up() == 3, "all workers to join again", 120,
                lambda: f"{nodes.info(job)} {again.read_text()}")
    (nodes.cluster.home / f"{name}.go").touch()
    nodes.until(lambda: not nodes.state(job), "the job to leave the queue", 90, again.read_text)

    def left() -> list[str]:
        """Without that of the node that lost its power, where nothing could be removed: its scratch
        folder stays until the epilog or a later worker removes it."""
        return [path for path in nodes.left_behind()
                if name != "dead" or not path.endswith(f"-{node}")]

    nodes.until(lambda: not left(), "all that is the user's to go", 30, lambda: str(left()))


def test_a_component_that_loses_one_of_two_nodes_shrinks(nodes: Site) -> None:
    name, go = "shrinks", nodes.cluster.home / "shrinks.go"
    job = submitted(nodes, name)

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
        told = [row for row in nodes.components(job) if not row.startswith("RESIZING")]
        return [] if len(told) < 3 or any(row.startswith("RUNNING") for row in told) else told

    assert nodes.until(ends, "sacct's ends", 60) == ["COMPLETED|0:0"] * 3, said
