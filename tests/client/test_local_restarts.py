"""`LocalCluster` starts its broker again when it has crashed, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.cluster_parts import broker_of, kill_broker, processes_of, until

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.errors import AccessError
from tangram_hpc.storage.access import read_access, worker_file
from tangram_hpc.transport.socket.dial import dial

DEADLINE_S = 60.0


def next_broker(cluster: LocalCluster, other: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """The broker that the cluster has started after another one, once it serves."""
    def serving() -> bool:
        try:
            return read_access(cluster.access).pid == broker_of(cluster).pid != other.pid
        except AccessError:
            return False
    until(serving, "another broker serves")
    return broker_of(cluster)


def test_a_broker_that_was_killed_is_started_again(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(cpus=1, home=tmp_path, grace_s=5) as c:
        assert c.submit("echo 1", once="one").result(60).text == "1\n"
        first = broker_of(c)
        old = [read_access(file) for file in (c.access, worker_file(c.access))]
        first.kill()
        second = next_broker(c, first)
        for known in old:  # with the keys of before nobody gets in, whatever address he finds
            with pytest.raises(AccessError, match="the key is wrong"):
                dial(read_access(c.access).addresses, known.key, known.job)
        command = Path(f"/proc/{second.pid}/cmdline").read_bytes().split(b"\0")
        assert b"--workers-live" in command and len(processes_of(c)) == 2
        with tangram_hpc.connect(c.access) as client:
            assert client.submit("echo again", once="one").result(60).text == "1\n"
            assert client.submit("echo 2").result(60).text == "2\n"
    err = capfd.readouterr().err
    (line,) = (line for line in err.splitlines() if "the broker of" in line)
    assert line == (f"tangram: the broker of {c.job} was killed by SIGKILL "
                    f"({c.folder / 'broker.log'}); it is started again (1 of 3 times within 10 "
                    "minutes)")
    assert second.poll() == 0
    with pytest.raises(AccessError, match="has ended"):
        read_access(c.access)


def test_a_broker_that_crashes_too_often_is_not_started_again(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(cpus=1, home=tmp_path, grace_s=1) as c:
        c._restarts.count = 1
        first = broker_of(c)
        first.kill()
        second = next_broker(c, first)
        second.kill()
        until(lambda: c._broker_over, "the cluster gives up")
        assert broker_of(c) is second
        until(lambda: all(child.poll() is not None for child in processes_of(c)),
              "the workers end, and are not started again")
    err = capfd.readouterr().err
    assert err.count("it is started again") == err.count("; it is not started again") == 1, err


def test_a_broker_that_ended_in_order_is_not_started_again(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(cpus=1, home=tmp_path) as c:
        broker = broker_of(c)
        os.kill(broker.pid, signal.SIGTERM)
        until(lambda: c._broker_over, "the cluster has seen it")
        assert broker_of(c) is broker and broker.poll() == 0
    assert "the broker of" not in capfd.readouterr().err


@pytest.mark.parametrize("killed_before_s", [0.0, 0.05, 0.3])
def test_a_cluster_that_is_closed_while_its_broker_is_started_again_leaves_nothing(
        tmp_path: Path, killed_before_s: float) -> None:
    c = LocalCluster(cpus=1, home=tmp_path, grace_s=1).start()
    first = broker_of(c)
    first.kill()
    time.sleep(killed_before_s)
    c.close()
    assert processes_of(c) == []
    job = c.job.encode()
    left = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if job in cmdline(pid)]
    assert left == []


def cmdline(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


RANK = """
import sys, tangram_hpc
client = tangram_hpc.connect()
future = client.submit("sleep 60")
print("up", flush=True)
sys.stdin.readline()
future.result(60)
"""


@pytest.mark.parametrize("rank", ["3", ""], ids=["a rank", "no rank"])
def test_a_rank_that_loses_its_broker_for_good_ends_with_one_line(tmp_path: Path, rank: str
                                                                  ) -> None:
    """A program that is no rank keeps its traceback."""
    with LocalCluster(cpus=1, home=tmp_path, grace_s=1) as c:
        environ = os.environ | {"TANGRAM_ACCESS": str(c.access)}
        environ |= {"RANK": rank, "WORLD_SIZE": "4"} if rank else {}
        trainer = subprocess.Popen([sys.executable, "-c", RANK], env=environ, text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        assert trainer.stdout is not None and trainer.stdout.readline() == "up\n"
        kill_broker(c)
        _, told = trainer.communicate("\n", timeout=60)
    assert trainer.returncode == 1 and f"job {c.job}: " in told, told
    assert (told.count("\n") == 1, "Traceback" in told) == (bool(rank), not rank), told
    assert told.startswith("tangram: error: rank 3: ") == bool(rank), told


def test_a_broker_that_is_killed_for_good_stays_dead(tmp_path: Path) -> None:
    """What tests of lost nodes rely on."""
    with LocalCluster(cpus=1, home=tmp_path, grace_s=0.5) as c:
        future = c.submit(["sleep", "60"])
        kill_broker(c)
        assert isinstance(future.exception(DEADLINE_S), tangram_hpc.BrokerUnreachable)
