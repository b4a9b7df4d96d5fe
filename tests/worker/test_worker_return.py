"""A worker that loses the link to a live broker rejoins as a new node; a worker whose broker has
ended exits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.forked_verb import tangram
from helpers.tcp_relay import Relay

import tangram_hpc
from tangram_hpc.errors import BrokerUnreachable
from tangram_hpc.storage.access import NAME, WORKER_NAME, mark_ended
from tangram_hpc.transport.socket import dial as dialling
from tangram_hpc.transport.socket.tcp_options import tune


def until(true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 60
    while not (value := true()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)
    return value


def with_environment(text: str) -> list[str]:
    """The processes whose environment has this text, by their folders in /proc."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or may not be read
            if text.encode() in environ.read_bytes():
                found.append(str(environ.parent))
    return found


@pytest.fixture
def started(short_folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `tangram` commands with a home of their own."""
    env = {**os.environ, "TANGRAM_HOME": str(short_folder / "t"), "TMPDIR": str(short_folder),
           "TANGRAM_GRACE_S": "5"}
    runs = []

    def start(*words: str) -> subprocess.Popen[str]:
        runs.append(subprocess.Popen([sys.executable, "-m", "tangram_hpc", *words], env=env,
                                     stderr=subprocess.PIPE, text=True))
        return runs[-1]

    yield start
    for run in reversed(runs):
        run.kill()
        run.communicate()
    # the fork server and the probes of a killed worker use its scratch folder a little longer
    until(lambda: not with_environment(str(short_folder)), "none of their processes is left")


def test_a_worker_joins_the_job_that_it_is_told(
        started: Callable[..., subprocess.Popen[str]], short_folder: Path) -> None:
    jobs = short_folder / "t" / "jobs"
    started("broker", "--job", "local-a", "--bind", "none")
    started("broker", "--job", "local-b", "--bind", "none")
    until(lambda: all((jobs / job / "access.json").exists() for job in ("local-a", "local-b")),
          "two brokers")
    started("worker", "-j", "local-b", "--name", "n", "--cpus", "1")
    with tangram_hpc.connect(jobs / "local-b" / "access.json") as client:
        until(lambda: client.ask("info")["nodes"], "the worker")
    with tangram_hpc.connect(jobs / "local-a" / "access.json") as client:
        assert not client.ask("info")["nodes"]


def test_a_worker_takes_one_way_to_a_broker(
        started: Callable[..., subprocess.Popen[str]]) -> None:
    _, said = started("worker", "-j", "local-b", "--access", "access.json").communicate(timeout=60)
    assert said == "tangram: error: worker: --job and --access both name a broker; give one of " \
                   "them\n"


def test_a_worker_that_starts_after_the_end_of_its_own_job_has_not_failed(
        short_folder: Path) -> None:
    """As when a trainer ends at once. A satellite, a job of its own, came too late."""
    for name in (NAME, WORKER_NAME):
        file = short_folder / "jobs" / "7" / name
        file.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        file.touch(0o600)
    mark_ended(file.with_name(NAME), "7", "noon")
    env = {**os.environ, "TANGRAM_HOME": str(short_folder), "SLURMD_NODENAME": "n"}
    own = tangram("worker", env=env | {"SLURM_JOB_ID": "7"})
    assert (own.returncode, own.stderr) == (
        0, "tangram: the broker of job 7 ended at noon, before the worker on n had started\n")
    other = tangram("worker", env=env | {"SLURM_JOB_ID": "8", "TANGRAM_JOB": "7"})
    assert other.returncode == 2 and "job 7 has ended at noon; start a new one" in other.stderr


def test_a_worker_rejoins_after_a_lost_link_and_exits_when_its_broker_ended(
        started: Callable[..., subprocess.Popen[str]], short_folder: Path) -> None:
    broker = started("broker", "--job", "local-way", "--bind", "127.0.0.1")
    path = short_folder / "t" / "jobs" / "local-way" / "access.json"
    until(path.exists, "a broker")
    known = json.loads(path.with_name("worker.json").read_text())
    tcp = next(a for a in known["addresses"] if a.startswith("tcp:"))
    relay = Relay("127.0.0.1", int(tcp.rpartition(":")[2]))
    detour = short_folder / "detour.json"
    detour.write_text(json.dumps({**known, "addresses": [f"tcp:127.0.0.1:{relay.port}"]}))
    detour.chmod(0o600)
    worker = started("worker", "--access", str(detour), "--name", "n", "--cpus", "1")
    with tangram_hpc.connect(path) as client:
        def up() -> list[str]:
            return [n["state"] for n in client.ask("nodes")["nodes"]]

        until(lambda: up() == ["UP"], "the worker to join")
        go = short_folder / "go"  # however slow this machine is: it still runs when the way is cut
        cut = client.submit(f"until [ -e {go} ]; do sleep 0.05; done; echo over", trusted=True)
        until(lambda: client.ask("info")["actions"].get("RUNNING"), "it to run")
        relay.shut()
        until(lambda: sorted(up())[-1:] == ["UP"] and len(up()) == 2, "the worker to be back")
        go.touch()
        result = cut.result(60)
        assert result.text == "over\n" and cut.details.attempt == 2
    broker.send_signal(signal.SIGKILL)
    assert worker.wait(60) == 1
    assert worker.stderr is not None
    said = worker.stderr.read().splitlines()
    assert said[0] == "tangram: job local-way: the broker does not take this worker back (node 1 " \
        "was given up while its worker was away); the worker joins again"
    assert "the broker is gone" in said[-1], said


def test_dialling_distinguishes_a_refused_connection_from_no_answer(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "HANDSHAKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(BrokerUnreachable) as told:
            dialling.dial([f"tcp:127.0.0.1:{port}", "unix:/nowhere"], b"k", "j")
        assert not told.value.refused
    with pytest.raises(BrokerUnreachable) as told:
        dialling.dial([f"tcp:127.0.0.1:{port}", "unix:/nowhere"], b"k", "j")
    assert told.value.refused


def test_tcp_connections_detect_a_dead_host_within_30_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as sock:
            tune(sock)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
