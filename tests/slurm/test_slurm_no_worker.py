"""On a real Slurm a broker that no worker joins says why, and does not hold its nodes for ever. A
broker on a login node is one that workers can join."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.slurm_site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]

SCRIPT = """#!/bin/bash
source {venv}/bin/activate
export TANGRAM_NO_WORKER_S=8
tangram broker &
while ! tangram info >/dev/null 2>&1; do sleep 0.5; done
tangram run -- true
echo "run: $?"
wait $!
echo "broker: $?"
"""


def test_a_job_whose_workers_do_not_start_ends_and_says_why(site: Site) -> None:
    job = site.script("no-worker", SCRIPT)
    told = site.finish("no-worker", job)
    assert "is pending (ReqNodeNotAvail); `tangram explain -j" in told, told
    assert f"error: job {job}: no worker has joined within" in told, told
    assert f"squeue --steps -j {job}" in told, told
    assert "run: 1" in told and "broker: 1" in told, told


@contextmanager
def broker_beside_salloc(site: Site, *before: str) -> Iterator[tuple[str, Path]]:
    """A broker on this host with a worker on a node; the job's id and the broker's log. The words
    of `before`, which are run as root, stand before the command."""
    name = f"salloc{len(before)}"
    log, number = (site.cluster.home / f"{name}.{what}" for what in ("log", "job"))
    inside = (f"source {site.venv}/bin/activate; echo $SLURM_JOB_ID > {number}; "
              f"setsid tangram broker > {log} 2>&1 & srun -n 1 tangram worker")
    salloc = subprocess.Popen(
        [*before, "runuser", "-u", site.cluster.user, "--", "salloc", "-p", "cpu", "-t", "5", "-n",
         "1", "-Q", "bash", "-c", inside],
        stdin=subprocess.DEVNULL, cwd=site.cluster.home, env=site.cluster.env)
    try:
        site.until(lambda: number.exists() and number.read_text().strip(), "salloc to begin")
        job = number.read_text().strip()
        site.until(lambda: site.info(job).get("nodes"), "a worker to join",
                   told=lambda: log.read_text())
        yield job, log
    finally:
        salloc.terminate()
        salloc.wait(30)


def test_a_broker_beside_salloc_ends_with_its_job(site: Site) -> None:
    with broker_beside_salloc(site) as (job, log):
        site.cluster.run_as_user(["scancel", job])
        site.until(lambda: f"job {job} has ended, and the broker with it" in log.read_text(),
                   "the broker to end", 100, lambda: log.read_text())
        told = site.tangram("info", "-j", job)
        assert told.returncode != 0


@pytest.fixture
def users_network(site: Site) -> Iterator[tuple[str, ...]]:
    """Words before a command, which then runs on a host that has a network besides the nodes': the
    host's name has an address in it, to which no node has a route."""
    address, shown = "198.51.100.7", site.cluster.run_as_user(["scontrol", "-o", "show", "node"])
    nodes = re.findall(r"NodeName=(\S+) .*? NodeAddr=(\S+)", shown.stdout)
    hosts = site.cluster.prefix / "etc" / "hosts-login"
    hosts.write_text("".join(f"{at} {name}\n" for name, at in [
        ("localhost", "127.0.0.1"), (os.uname().nodename, address), *nodes]))
    subprocess.run(["ip", "addr", "replace", f"{address}/32", "dev", "lo"], check=True)
    yield ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"',
           str(hosts))
    subprocess.run(["ip", "addr", "del", f"{address}/32", "dev", "lo"], check=True)


def test_a_worker_joins_a_broker_on_a_login_node_with_two_networks(
        site: Site, users_network: tuple[str, ...]) -> None:
    with broker_beside_salloc(site, *users_network) as (job, _):
        access = site.cluster.home / ".tangram" / "jobs" / job / "access.json"
        dialled = json.loads(access.read_text())["addresses"]
        assert [a.partition(":")[0] for a in dialled] == ["unix", "tls"], dialled
        assert dialled[1].startswith("tls:10."), dialled
        told = site.tangram("run", "-j", job, "--", "hostname")
        assert told.stdout.strip() in site.cluster.cpu_nodes, told
        site.tangram("shutdown", "-j", job)
