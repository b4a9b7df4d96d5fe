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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.cluster_parts import broker_of, kill_broker, processes_of

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.client.future import Future
from tangram_hpc.errors import BrokerUnreachable, TangramError
from tangram_hpc.resources import process_tree
from tangram_hpc.storage.access import read_access

JOB = "mine"
SERVE_BROKER = "tangram_hpc.app.broker_process.serve_broker"  # where a test stops a broker


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


# ---- stopped between the check and the write ----------------------------------------------------

STOPS = """
import importlib, os, signal, sys
from pathlib import Path
module, name, now, flag = sys.argv[1], sys.argv[2].split("."), sys.argv[3], Path(sys.argv[4])
owner = importlib.import_module(module)
for part in name[:-1]:
    owner = getattr(owner, part)
real = getattr(owner, name[-1])
def stops(*args, **kwargs):
    if flag.exists() and eval(now):
        flag.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(*args, **kwargs)
setattr(owner, name[-1], stops)
from tangram_hpc.cli import main
sys.exit(main(["broker", "--job", "mine", "--bind", "none"]))
"""


class Rivals:
    """Brokers of one job on a file system without locks.

    The first one stops before a write: when it calls `name` of `module`, the flag exists, and `now`
    is true of its arguments `args`.
    """

    def __init__(self, home: Path, module: str, name: str, now: str = "True") -> None:
        self.home, self.folder = home, home / "jobs" / JOB
        self.access, self.flag = self.folder / "access.json", home / "flag"
        self.environ = {**os.environ, "TANGRAM_HOME": str(home), "TANGRAM_GRACE_S": "2",
                        "TANGRAM_ACCESS": str(self.access), "TANGRAM_CPUS": "1",
                        "TANGRAM_MEM_MIB": "512"}
        self.children: list[subprocess.Popen[str]] = []
        self.program = [sys.executable, "-c", STOPS, module, name, now, str(self.flag)]

    def first(self, stops_at_once: bool = False) -> subprocess.Popen[str]:
        if stops_at_once:
            self.flag.touch()
        child = self.run(self.program)
        if not stops_at_once:
            until(lambda: serves(self.access) == child.pid, "the first broker")
        return child

    def next(self) -> subprocess.Popen[str]:
        (self.folder / "lock").unlink(missing_ok=True)
        child = self.run([sys.executable, "-m", "tangram_hpc", "broker", "--job", JOB, "--bind",
                          "none"])
        until(lambda: serves(self.access) == child.pid, "the next broker")
        return child

    def worker(self, name: str) -> subprocess.Popen[str]:
        return self.run([sys.executable, "-m", "tangram_hpc", "worker", "--name", name])

    def run(self, command: list[str]) -> subprocess.Popen[str]:
        self.children.append(subprocess.Popen(command, text=True, env=self.environ,
                                              stderr=subprocess.PIPE))
        return self.children[-1]

    def ask(self, line: str) -> str:
        """The result of the action `name`, as a new client is told it."""
        with tangram_hpc.connect(self.access) as client:
            return str(client.submit(line, trusted=True, once="name").result(60).text)

    def await_stop(self, child: subprocess.Popen[str]) -> None:
        until(lambda: not self.flag.exists() and process_tree.state(child.pid) == "T", "its stop")

    def goes_on(self, child: subprocess.Popen[str]) -> None:
        """Continues the broker that was stopped; it ends and says who serves now."""
        os.kill(child.pid, signal.SIGCONT)
        _, said = child.communicate(timeout=60)
        assert child.returncode == 1 and "another broker serves it now" in said, said


def told_by_nobody_else(asked: Future, text: str) -> bool:
    """Whether the client of the old broker, which may have waited for it beyond its grace, was told
    nothing else than the clients of the next one."""
    error = asked.exception(60)
    return isinstance(error, BrokerUnreachable) or asked.result().text == text


@pytest.fixture
def rivals(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rivals]:
    rivals = Rivals(tmp_path, *request.param)
    yield rivals
    for child in reversed(rivals.children):
        child.kill()
        child.communicate()


@pytest.mark.parametrize("rivals", [(SERVE_BROKER, "write_access")], indirect=True)
def test_an_access_file_that_is_written_late_leads_nobody_to_its_broker(rivals: Rivals) -> None:
    old = rivals.first(stops_at_once=True)
    rivals.await_stop(old)
    new = rivals.next()
    over = threading.Event()
    found: set[tuple[int, int]] = set()

    def look() -> None:
        while not over.wait(0.0005):
            access = read_access(rivals.access)
            found.add((access.epoch, len(access.addresses)))

    looks = threading.Thread(target=look)
    looks.start()
    try:
        rivals.goes_on(old)
        assert serves(rivals.access) == new.pid or not read_access(rivals.access).addresses
        with tangram_hpc.connect(rivals.access) as client:
            assert client.welcome is not None and client.welcome.epoch == 2
        until(lambda: serves(rivals.access) == new.pid, "the file to be written again")
    finally:
        over.set()
        looks.join()
    assert found <= {(1, 0), (2, 1)}, "somebody was led to the first broker"


@pytest.mark.parametrize("rivals", [(SERVE_BROKER, "mark_ended")], indirect=True)
def test_a_broker_that_ends_late_does_not_end_the_job_for_others(rivals: Rivals) -> None:
    old = rivals.first()
    with tangram_hpc.connect(rivals.access) as client:
        rivals.flag.touch()
        client.shutdown_broker()
        rivals.await_stop(old)
    new = rivals.next()
    os.kill(old.pid, signal.SIGCONT)
    assert old.wait(60) == 0
    with tangram_hpc.connect(rivals.access) as client:
        assert client.welcome is not None and client.welcome.epoch == 2
    until(lambda: serves(rivals.access) == new.pid, "the file to be written again")


@pytest.mark.long
@pytest.mark.parametrize("rivals", [(
    "tangram_hpc.storage.journal", "FileJournal.commit", "args[0]._pending")],
                         indirect=True)
def test_events_that_are_written_late_count_for_no_later_broker(rivals: Rivals) -> None:
    """The old broker has checked, and writes that a client has submitted an action."""
    old = rivals.first()
    rivals.worker("w1")
    with tangram_hpc.connect(rivals.access) as client:
        assert client.submit("true", trusted=True).result(60).ok
        rivals.flag.touch()
        asked = client.submit("echo old", trusted=True, once="name")
        rivals.await_stop(old)
        new = rivals.next()
        rivals.worker("w2")
        assert rivals.ask("echo new") == "new\n"
        rivals.goes_on(old)
        assert told_by_nobody_else(asked, "new\n")
    new.kill()
    new.wait()
    rivals.next()
    assert rivals.ask("echo third") == "new\n"


@pytest.mark.long
@pytest.mark.parametrize("rivals", [(
    "tangram_hpc.storage.spool", "FileSpool.commit", "args[0]._pending")],
                         indirect=True)
def test_a_result_that_is_kept_late_is_not_the_result_of_its_name(rivals: Rivals) -> None:
    """The old broker has checked, and keeps the result of an action whose node was lost then, so
    that the action has run again."""
    old = rivals.first()
    worker = rivals.worker("w1")
    go = rivals.home / "go"
    with tangram_hpc.connect(rivals.access) as client:
        asked = client.submit(f"while [ ! -e {go} ]; do sleep 0.05; done; echo old", trusted=True,
                              once="name")
        until(lambda: client.ask("info")["actions"].get("RUNNING"), "the action to run")
        rivals.flag.touch()
        go.touch()
        rivals.await_stop(old)
        worker.kill()
        new = rivals.next()
        rivals.worker("w2")
        assert rivals.ask("echo new") == "old\n", "the same action ran again"
        rivals.goes_on(old)
        assert told_by_nobody_else(asked, "old\n")
    new.kill()
    new.wait()
    rivals.next()
    assert rivals.ask("echo third") == "old\n"


@pytest.mark.long
@pytest.mark.parametrize("rivals", [(
    "tangram_hpc.broker.peers", "Peers.deliver", "'ActionResult' in str(args[1])")], indirect=True)
def test_an_answer_that_is_sent_late_is_what_the_next_broker_says_too(rivals: Rivals) -> None:
    """The old broker has committed the end of an action and checked, and tells its client."""
    old = rivals.first()
    rivals.worker("w1")
    go = rivals.home / "go"
    with tangram_hpc.connect(rivals.access) as client:
        asked = client.submit(f"while [ ! -e {go} ]; do sleep 0.05; done; date +%N", trusted=True,
                              once="name")
        until(lambda: client.ask("info")["actions"].get("RUNNING"), "the action to run")
        rivals.flag.touch()
        go.touch()
        rivals.await_stop(old)
        rivals.next()
        told = rivals.ask("echo new")
        rivals.goes_on(old)
        assert told != "new\n" and asked.result(60).text == told


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
            lock, granted_at = asyncio.run(take)
            assert not granted_at
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
