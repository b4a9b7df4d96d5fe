"""Two brokers never serve one job, and a broker that died never blocks the next one.

Brokers are real processes on one host. A file system whose locks do not reach another node is
simulated by removing the lock file between the two starts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.cluster_parts import broker_of, kill_broker, processes_of

from tangram_hpc import LocalCluster
from tangram_hpc.errors import BrokerUnreachable, TangramError

JOB = "mine"


def until(true: Callable[[], object], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.02)


def cluster(home: Path) -> LocalCluster:
    return LocalCluster(cpus=1, mem_mib=512, home=home, job=JOB, grace_s=2)


def broker(home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tangram_hpc", "broker", "--job", JOB, "--bind", "none"], text=True,
        env={**os.environ, "TANGRAM_HOME": str(home)}, stderr=subprocess.PIPE)


def serves(access: Path) -> int:
    """The pid of the broker that clients would find."""
    return json.loads(access.read_text()).get("pid", 0) if access.exists() else 0


def test_a_second_broker_of_a_job_refuses_to_start_and_names_the_first(tmp_path: Path) -> None:
    """The message is one line with host, pid and time. The first broker serves on, and no client is
    led to the second one."""
    with cluster(tmp_path) as first:
        pid = broker_of(first).pid
        second = broker(tmp_path)
        try:
            until(lambda: second.poll() is not None or serves(first.access) == second.pid,
                  "the second to refuse or to serve")
            assert serves(first.access) == pid, "clients find the second broker"
            _, said = second.communicate(timeout=60)
        finally:
            second.kill()
        assert second.returncode == 1 and said.count("\n") == 1, said
        assert f"host {socket.gethostname()}, pid {pid}, since 20" in said
        assert "tangram shutdown" in said and str(first.folder) in said
        with pytest.raises(BrokerUnreachable, match=f"another broker serves it.*pid {pid}"):
            cluster(tmp_path).start()
        assert first.submit("echo here", trusted=True, once="a").result(60).text == "here\n"


def test_a_stopped_broker_that_was_superseded_ends_without_answering(tmp_path: Path) -> None:
    """When it continues, it ends with one line and does not give a named action a second result."""
    first = cluster(tmp_path).start()
    old = broker_of(first)
    try:
        os.kill(old.pid, signal.SIGSTOP)
        asked = first.submit("echo the old one", trusted=True, once="name")
        (first.folder / "lock").unlink(missing_ok=True)
        with cluster(tmp_path) as second:
            assert second.submit("echo new", trusted=True, once="name").result(60).text == "new\n"
            written = {p: p.stat().st_size for p in first.folder.glob("journal*")}
            latest = max(written)
            os.kill(old.pid, signal.SIGCONT)
            with pytest.raises(Exception) as ended:
                asked.result(60)
            assert isinstance(ended.value, TangramError), ended.value
            assert old.wait(60) == 1
            sizes = {p: p.stat().st_size for p in written if p != latest}
            assert sizes == {p: size for p, size in written.items() if p != latest}
            said = (first.folder / "broker.log").read_text()
            assert f"another broker serves it now (host {socket.gethostname()}, " \
                   f"pid {broker_of(second).pid}, since 20" in said, said
            assert serves(second.access) == broker_of(second).pid  # no tombstone of the old one
            assert second.submit("echo b", trusted=True, once="name").result(60).text == "new\n"
    finally:
        os.kill(old.pid, signal.SIGCONT) if old.poll() is None else None
        first.close()


def test_an_idle_broker_ends_when_it_is_superseded(tmp_path: Path) -> None:
    """Without working locks, and without any message from a client or worker."""
    first, second = broker(tmp_path), None
    folder = tmp_path / "jobs" / JOB
    try:
        until(lambda: serves(folder / "access.json") == first.pid, "the first")
        (folder / "lock").unlink(missing_ok=True)
        second = broker(tmp_path)
        until(lambda: serves(folder / "access.json") == second.pid, "the second")
        until(lambda: first.poll() is not None, "the first to end", 30)
        _, said = first.communicate(timeout=60)
        assert first.returncode == 1 and "another broker serves it now" in said, said
        assert second.poll() is None and serves(folder / "access.json") == second.pid
    finally:
        for each in (first, second):
            if each is not None:
                each.kill()
                each.communicate()


def test_a_broker_that_was_killed_does_not_block_the_next(tmp_path: Path) -> None:
    """The kernel releases its lock, and the next broker resumes the job."""
    for n in range(2):
        one = cluster(tmp_path).start()
        try:
            assert one.submit(f"echo {n}", trusted=True, once="name").result(60).text == "0\n"
            kill_broker(one)
            for child in processes_of(one):
                child.kill()
                child.wait(30)
        finally:
            one.close()


HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("alive", [False, True])
def test_a_lock_of_another_host_blocks_only_while_its_heartbeat_is_fresh(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool) -> None:
    """A file server may keep the lock of a node without power for minutes, or for ever."""
    from tangram_hpc.app import folder as taking

    monkeypatch.setattr(taking, "SILENT_S", 1.0)
    folder = tmp_path / "jobs" / JOB
    folder.mkdir(parents=True)
    epoch = folder / "epoch-1"
    epoch.write_text(json.dumps({"host": "a-node-elsewhere", "pid": 5, "restarts": -1,
                                 "since": "2026-01-01T00:00:00", "word": "x"}))
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder / "lock")],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            os.utime(epoch)

    beats = threading.Thread(target=beat)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        take = taking.take_folder({"TANGRAM_HOME": str(tmp_path)}, JOB)
        if alive:
            beats.start()
            with pytest.raises(TangramError, match="host a-node-elsewhere, pid 5, since 2026-01"):
                asyncio.run(take)
            assert epoch.exists()
        else:
            lock = asyncio.run(take)
            assert not lock.superseded(now=True) and not epoch.exists()
    finally:
        over.set()
        holder.kill()
        holder.communicate()
        if alive:
            beats.join()


def test_removing_old_run_folders_spares_a_running_job(tmp_path: Path) -> None:
    """The oldest folders of runs without Slurm are removed when another run begins."""
    with LocalCluster(cpus=1, home=tmp_path) as first:
        for number in range(60):  # made in the same tick of the kernel's clock, without this age
            (folder := tmp_path / "jobs" / f"local-2026-{number}").mkdir()
            os.utime(folder, (number + 2, number + 2))
        os.utime(first.folder, (1, 1))
        with LocalCluster(cpus=1, home=tmp_path) as second:
            assert second.submit(["true"]).result(60).ok
        assert not (tmp_path / "jobs" / "local-2026-0").exists()
        assert (tmp_path / "jobs" / "local-2026-59").exists()
        assert first.folder.exists() and first.submit(["true"]).result(60).ok
