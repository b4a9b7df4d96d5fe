"""The address that brokers and ranks publish is one that other nodes can reach, or an error names
`bind`. The real commands run in two network namespaces with a link between them, whose hosts files
give the host's own name 127.0.1.1, as the installers of Debian and Ubuntu do."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tangram_hpc.slurm import job_environment as slurm_environ
from tangram_hpc.transport.socket.bulk_socket import BulkListener

REPO = Path(__file__).resolve().parents[2]
NAMES, CABLE = ("tangram1", "tangram2"), "10.213.77"
HOLD = """set -e
mount --bind "$1" /etc/hosts
hostname "$2"
ip link set lo up
echo up
exec sleep infinity
"""
DIAL = """
import sys
from pathlib import Path
from tangram_hpc.storage.access import read_access
from tangram_hpc.transport.socket.dial import dial
access = read_access(Path(sys.argv[1]))
dial([a for a in access.addresses if not a.startswith("unix:")], access.key, access.job).close()
"""


def hosts_file(own: int) -> str:
    """Resolves the node's own name to loopback, and the other node's name to its address."""
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {NAMES[own]}",
             f"{CABLE}.{2 - own} {NAMES[1 - own]}"]
    return "\n".join(lines) + "\n"


class Pair:
    """Two hosts with separate networks, host names and hosts files, and common files."""

    def __init__(self, folder: Path, plugged: bool = True) -> None:
        self.folder = folder
        self.holders: list[subprocess.Popen[str]] = []
        for own, name in enumerate(NAMES):
            hosts = folder / f"hosts-{name}"
            hosts.write_text(hosts_file(own))
            holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "sh", "-c",
                 HOLD, "hold", str(hosts), name], stdout=subprocess.PIPE, text=True)
            assert holder.stdout is not None and holder.stdout.readline() == "up\n"
            self.holders.append(holder)
        if plugged:
            self.plug()

    def plug(self) -> None:
        other = str(self.holders[1].pid)
        self.ip(0, "link", "add", "fast0", "type", "veth", "peer", "name", "fast0", "netns", other)
        for own in (0, 1):
            self.ip(own, "addr", "add", f"{CABLE}.{own + 1}/24", "dev", "fast0")
            self.ip(own, "link", "set", "fast0", "up")

    def ip(self, own: int, *words: str) -> None:
        subprocess.run([*self.enter(own), "ip", *words], check=True, timeout=20)

    def enter(self, own: int) -> list[str]:
        return ["nsenter", "--target", str(self.holders[own].pid), "--net", "--uts", "--mount"]

    def environ(self, own: int, others: bool = True, **more: str) -> dict[str, str]:
        """The environment of a node in a job of two nodes, or of one."""
        nodes = "tangram[1-2]" if others else NAMES[own]
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder), "SLURM_JOB_ID": "77",
                "TANGRAM_HOME": str(self.folder / "home"), "SLURMD_NODENAME": NAMES[own],
                "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_NUM_NODES": "2" if others else "1",
                "SLURM_CONF": "/nowhere/slurm.conf", "TANGRAM_JOB_COMMENT": "false", **more}

    def tangram(self, own: int, *words: str, others: bool = True, **more: str
                ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.enter(own), sys.executable, "-m", "tangram_hpc", *words],
            env=self.environ(own, others, **more), cwd=self.folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    @property
    def access(self) -> Path:
        return next((self.folder / "home").rglob("access.json"), self.folder / "none")

    @contextlib.contextmanager
    def broker(self, *, others: bool = True, **more: str) -> Iterator[list[str]]:
        """Runs a broker on the first host; yields the TCP addresses that it publishes."""
        child = self.tangram(0, "broker", "--nodes", "1", others=others, **more)
        try:
            while not (self.access.exists() and self.access.stat().st_size):
                assert child.poll() is None, child.communicate()[1]
                time.sleep(0.05)
            told = json.loads(self.access.read_text())["addresses"]
            yield [a for a in told if not a.startswith("unix:")]
        finally:
            child.send_signal(signal.SIGTERM)
            child.communicate(timeout=60)

    def dialled(self) -> subprocess.CompletedProcess[str]:
        """The second host connects to the broker over TCP only."""
        return subprocess.run([*self.enter(1), sys.executable, "-c", DIAL, str(self.access)],
                              env=self.environ(1), capture_output=True, text=True, timeout=60,
                              cwd=REPO, check=False)

    def end(self) -> None:
        for holder in self.holders:
            holder.kill()
            holder.communicate()


def made(folder: Path, plugged: bool) -> Iterator[Pair]:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"):
        pytest.skip("namespaces with names and cables of their own need root, iproute2 and nsenter")
    pair = Pair(folder, plugged)
    try:
        yield pair
    finally:
        pair.end()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    yield from made(tmp_path, True)


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Pair]:
    """Two hosts that have loopback only."""
    yield from made(tmp_path, False)


@pytest.mark.parametrize("bind", ["", "0.0.0.0", "fast0", f"{CABLE}.0/24"])
def test_a_broker_publishes_an_address_that_other_nodes_reach(pair: Pair, bind: str) -> None:
    with pair.broker(TANGRAM_BIND=bind) as told:
        assert [a.rpartition(":")[0] for a in told] == [f"tls:{CABLE}.1"]
        done = pair.dialled()
        assert done.returncode == 0, done.stderr


def test_a_broker_beside_its_job_publishes_the_address_on_the_way_to_the_nodes(pair: Pair) -> None:
    """As on a login node under `salloc`: its name has an address in the users' network, which the
    nodes do not reach."""
    pair.ip(0, "addr", "add", "198.51.100.7/24", "dev", "lo")
    hosts = pair.folder / f"hosts-{NAMES[0]}"
    hosts.write_text(hosts_file(0).replace("127.0.1.1", "198.51.100.7"))
    with pair.broker(SLURMD_NODENAME="", SLURM_JOB_NODELIST=NAMES[1],
                     SLURM_JOB_NUM_NODES="1") as told:
        assert [a.rpartition(":")[0] for a in told] == [f"tls:{CABLE}.1"]
        done = pair.dialled()
        assert done.returncode == 0, done.stderr


def errors_of(told: str) -> list[str]:
    """The lines on standard error, without the line that says that no Slurm can be asked here."""
    return [line for line in told.splitlines() if "Slurm does not tell when job" not in line]


@pytest.mark.parametrize("bind", ["", "0.0.0.0", "lo"])
def test_an_address_that_other_nodes_cannot_reach_is_an_error_naming_bind(
        apart: Pair, bind: str) -> None:
    child = apart.tangram(0, "broker", "--nodes", "1", TANGRAM_BIND=bind)
    deadline = time.monotonic() + 60
    while child.poll() is None and not apart.access.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=60)
        raise AssertionError("it serves at an address that the other node cannot reach")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 2 and len(errors_of(err)) == 1, err
    assert "`bind`" in err and NAMES[1] in err and "127.0.0.1" in err, err


@pytest.mark.parametrize(("bind", "said"), [
    ("fast9", "'fast9' is no interface or address of this host"),
    ("10.99.0.0/16", "no address in 10.99.0.0/16")])
def test_a_bind_setting_that_matches_nothing_lists_the_interfaces(
        pair: Pair, bind: str, said: str) -> None:
    child = pair.tangram(0, "broker", "--nodes", "1", TANGRAM_BIND=bind)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 2 and len(errors_of(err)) == 1 and said in err, err
    assert f"fast0 {CABLE}.1" in err, err


def test_a_job_of_one_node_may_use_loopback(apart: Pair) -> None:
    with apart.broker(others=False) as told:
        assert [a.startswith("tcp:127.0.") for a in told] == [True]


def test_a_local_cluster_needs_no_network_even_inside_a_job(apart: Pair) -> None:
    code = ("from tangram_hpc import LocalCluster\n"
            "with LocalCluster(cpus=1) as cluster:\n"
            "    assert cluster.client.submit(['true'], trusted=True).result(60).ok\n")
    done = subprocess.run([*apart.enter(0), sys.executable, "-c", code], env=apart.environ(0),
                          capture_output=True, text=True, timeout=90, cwd=REPO, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("bind", ["", f"{CABLE}.2"])
def test_master_addr_is_an_address_of_rank_0_that_other_nodes_reach(pair: Pair, bind: str) -> None:
    """`bind` may be an address of the broker's node, which is not that of rank 0."""
    step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2",
            "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "tangram[1-2]"}
    with pair.broker():
        child = pair.tangram(0, "rank", "--gateway", "off", "--", "printenv", "MASTER_ADDR",
                             TANGRAM_BIND=bind, **step)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, f"{CABLE}.1\n"), err


STREAM = """
import socket, sys, tempfile
import tangram_hpc
tempfile.tempdir = sys.argv[1]  # a path too long for a Unix socket: both hosts have one kernel
with tangram_hpc.connect() as client, client.direct() as direct:
    print(direct.call(socket.gethostname), direct.via, direct.call(divmod, 7, 2), direct.reason)
"""


def test_direct_calls_come_from_another_host_over_tls(pair: Pair) -> None:
    long = pair.folder / ("x" * 110)
    long.mkdir()
    with pair.broker():
        worker = pair.tangram(1, "worker", "--cpus", "1", TANGRAM_ACCESS=str(
            pair.access.with_name("worker.json")))
        try:
            done = subprocess.run(
                [*pair.enter(0), sys.executable, "-c", STREAM, str(long)],
                env=pair.environ(0, TANGRAM_ACCESS=str(pair.access)), capture_output=True,
                text=True, timeout=90, cwd=REPO, check=False)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.communicate(timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{NAMES[1]} node (3, 1) \n"), done.stderr


def test_other_nodes_of_a_job_are_read_from_its_environment() -> None:
    other_nodes = slurm_environ.other_nodes
    plain: dict[str, Any] = {"SLURMD_NODENAME": "n2", "SLURM_JOB_NODELIST": "n[1-3]"}
    assert other_nodes(plain) == ("n1", "n3")
    assert other_nodes(plain | {"SLURM_STEP_NODELIST": "n[2-3]"}, step=True) == ("n3",)
    het = plain | {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-3]",
                   "SLURM_JOB_NODELIST_HET_GROUP_1": "g1"}
    assert other_nodes(het) == ("n1", "n3", "g1")
    assert other_nodes({"SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n1"}) == ()
    assert other_nodes({}) == ()


def test_a_hybrid_pool_channel_publishes_no_wildcard_address() -> None:
    listener = BulkListener("0.0.0.0", b"k" * 32, "job", lambda link: None)
    try:
        scheme, _, rest = listener.address.partition(":")
        assert scheme == "tls" and not rest.startswith("0.0.0.0"), listener.address
    finally:
        listener.close()
