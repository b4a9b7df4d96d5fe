"""slurm/devcluster with nodes as network namespaces and several users: what it promises, and that
it leaves nothing."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.devcluster_fixture import RunningCluster, devcluster, reason_to_skip, running_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with running_cluster(tmp_path_factory, cpu_nodes=2, gpu_nodes=1, trainer_nodes=0, netns=True,
                         debian_hosts=False, users=2, no_dbd=True) as up:
        record = json.loads((up.prefix / "devcluster.json").read_text())
        yield up
    left = [name for name in os.listdir("/sys/class/net") if str(record["base_port"]) in name]
    assert left == [] and not up.prefix.exists()
    assert str(up.prefix) not in Path("/proc/self/mounts").read_text()
    for user in record["users"]:
        with pytest.raises(KeyError):
            pwd.getpwnam(user["name"])


def node(cluster: RunningCluster, fate: str, name: str) -> None:
    done = devcluster("node", "--prefix", str(cluster.prefix), fate, name)
    assert done.returncode == 0, done.stderr


def where(cluster: RunningCluster) -> dict[str, str]:
    """The addresses of the nodes, as reported by each node."""
    told = cluster.run_as_user("srun -p cpu -N2 bash -c 'echo $(hostname) $(hostname -i)'")
    return dict(line.split() for line in told.stdout.splitlines())


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def runs_on(cluster: RunningCluster, name: str, seconds: float = 60) -> bool:
    """Whether a step runs there, soon."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done = cluster.run_as_user(["timeout", "10", "srun", "-w", name, "hostname"])
        if done.stdout.strip() == name:
            return True
        time.sleep(1)
    return False


def test_each_netns_node_has_its_own_address_tmp_and_shared_memory(cluster: RunningCluster) -> None:
    found = where(cluster)
    assert sorted(found) == cluster.cpu_nodes and len(set(found.values())) == 2
    told = cluster.run_as_user("srun -p cpu -N2 bash -c 'touch /tmp/of-$(hostname); sleep 0.5; "
                               "echo /tmp/of-*; echo /dev/shm/*; rm /tmp/of-*'").stdout.split()
    assert sorted(told) == ["/dev/shm/*"] * 2 + [f"/tmp/of-{n}" for n in cluster.cpu_nodes]


def test_a_second_user_submits_under_the_second_account(cluster: RunningCluster) -> None:
    first, second = cluster.users
    for user in (first, second):
        done = cluster.of(user).run_as_user("srun -n1 bash -c 'id -un; pwd'")
        assert done.stdout.split() == [user, cluster.users[user]], done.stderr
    told = devcluster("exec", "--prefix", str(cluster.prefix), "--user", second, "--", "id", "-un")
    assert told.stdout.strip() == second
    told = devcluster("exec", "--prefix", str(cluster.prefix), "--user", "root", "--", "id")
    assert told.returncode == 2 and "this cluster has" in told.stderr


def test_a_node_is_cut_off_the_network_and_rejoins(cluster: RunningCluster) -> None:
    name = cluster.cpu_nodes[1]
    address, port = where(cluster)[name], slurmd_port(cluster, name)
    assert answers(address, port)
    node(cluster, "cut", name)
    assert not answers(address, port)
    node(cluster, "join", name)
    assert answers(address, port) and runs_on(cluster, name)


def slurmd_port(cluster: RunningCluster, name: str) -> int:
    line = next(row for row in cluster.conf.read_text().splitlines()
                if row.startswith(f"NodeName={name} "))
    return int(line.partition("Port=")[2].split()[0])


def test_a_killed_node_loses_all_processes_and_can_be_started_again(
        cluster: RunningCluster) -> None:
    name = cluster.cpu_nodes[1]
    cluster.run_as_user(["sbatch", "-w", name, "-o", "/dev/null", "--wrap",
                         "setsid sleep 8642 & srun --overlap sleep 8642"], check=True)
    end = time.monotonic() + 30
    while not sleepers() and time.monotonic() < end:
        time.sleep(0.2)
    assert sleepers()
    node(cluster, "kill", name)
    assert sleepers() == []
    before = boot_time(cluster, name)
    node(cluster, "start", name)
    cluster.run_as_user(["scancel", "--user", cluster.user])
    assert runs_on(cluster, name)
    # BootTime of a node without a boot time of its own is its host's, give or take a second
    assert boot_time(cluster, name) - before > 5


def boot_time(cluster: RunningCluster, name: str) -> float:
    """When a node was started, by Slurm, in seconds since the epoch."""
    said = cluster.run_as_user(["scontrol", "show", "node", name], check=True).stdout
    told = said.partition("BootTime=")[2].split()[0]
    return time.mktime(time.strptime(told, "%Y-%m-%dT%H:%M:%S"))


def sleepers() -> list[str]:
    return subprocess.run(["pgrep", "-f", "^sleep 8642"], capture_output=True, text=True,
                          check=False).stdout.split()


@pytest.mark.parametrize(("words", "said"), [
    (["node", "cut", "nosuch"], "is not known"), (["up", "--users", "0"], "--users is 1 to 9"),
    (["up", "--netns", "--plugin", "/tmp/x.so"], "put the plugin elsewhere")])
def test_wrong_devcluster_node_arguments_are_refused_in_one_line(
        cluster: RunningCluster, words: list[str], said: str) -> None:
    where = ["--prefix", str(cluster.prefix)] if words[0] == "node" else ["--name", "nope"]
    done = devcluster(words[0], *where, *words[1:])
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_node_faults_are_refused_on_a_cluster_without_netns(
        tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := reason_to_skip():
        pytest.skip(reason)
    with running_cluster(tmp_path_factory, cpu_nodes=1, gpu_nodes=0, trainer_nodes=0,
                         netns=False, no_dbd=True) as up:
        done = devcluster("node", "--prefix", str(up.prefix), "cut", up.cpu_nodes[0])
        assert done.returncode == 2 and "up --netns" in done.stderr
