"""The firewall that slurm/README.md shows for a site's nodes lets jobs of this project through, and
nothing else: its rules are loaded as they are printed there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from helpers.devcluster_fixture import running_cluster
from helpers.slurm_site import DATA, REPO, Site, install_for

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(400)]
PORTS = "7000-7019"


def in_node(site: Site, node: str, *words: str, stdin: str = "") -> str:
    """Runs a command as root in the network of a node."""
    holder = str(site.cluster.pid_of(f"node-{node}"))
    return subprocess.run(["nsenter", "-t", holder, "-n", *words], input=stdin, text=True,
                          check=True, stdout=subprocess.PIPE).stdout


def rules(site: Site) -> str:
    """The rules of the page, with the addresses and Slurm ports of this cluster."""
    text = (REPO / "slurm" / "README.md").read_text()
    shown = re.search(r"```text\n(table inet .*?)```", text, re.DOTALL)
    assert shown
    record = json.loads((site.cluster.prefix / "devcluster.json").read_text())
    base, node = record["base_port"], site.cluster.cpu_nodes[0]
    own = in_node(site, node, "ip", "-4", "-br", "addr", "show", "scope", "global").split()[2]
    filled = shown[1].replace("10.1.0.0/16", own).replace("6818", f"{base + 10}-{base + 199}")
    assert filled != shown[1] and PORTS in filled
    return filled


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if not shutil.which("nft"):
        pytest.skip("no nft here: install nftables")
    with running_cluster(tmp_path_factory, cpu_nodes=2, gpu_nodes=0, trainer_nodes=0, netns=True,
                         cpus_per_node=8, no_dbd=True, conf_line=[
                             "SlurmdTimeout=300", "SrunPortRange=60001-60999"]) as cluster:
        site = Site(cluster, install_for(cluster))
        for node in cluster.cpu_nodes:
            in_node(site, node, "nft", "-f", "-", stdin=rules(site))
        yield site


def run(site: Site, name: str, ports: str) -> tuple[set[str], str]:
    """The nodes on which actions ran, and what the job printed."""
    shutil.copy(DATA / "trainer_hosts.py", site.cluster.home)
    job = site.submit("homogeneous", name, partition="cpu", nodes="2", cpus_lent="4", ranks="1",
                      mem="1200", mem_lent="600", mem_trainer="500", gateway="off", mpi="none",
                      time="5", trainer="python trainer_hosts.py 4 12",
                      setup=f"source {site.venv}/bin/activate; export TANGRAM_PORTS={ports}")
    said = site.finish(name, job, 150)
    return {row["node"] for row in site.acct(job) if row["state"] == "COMPLETED"}, said


def test_a_broker_on_a_port_that_is_let_through_has_workers_on_all_nodes(nodes: Site) -> None:
    ran_on, said = run(nodes, "open", PORTS)
    assert ran_on == set(nodes.cluster.cpu_nodes), said


def test_a_worker_says_so_when_the_brokers_port_is_closed(nodes: Site) -> None:
    """All goes on with the worker beside the broker."""
    ran_on, said = run(nodes, "shut", "8000-8019")
    assert ran_on == {nodes.cluster.cpu_nodes[0]}, said
    assert re.search(r"tangram: error: job \d+: no broker answers .*:80\d\d.*timed out", said), said
