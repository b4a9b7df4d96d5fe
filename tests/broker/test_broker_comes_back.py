"""A real broker that is killed under sessions, shells, terminals, snapshots and running actions."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cluster_parts import broker_of, processes_of, until

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.accounting.record import fold
from tangram_hpc.client.terminals.pty import Pty
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import AccessError
from tangram_hpc.storage.access import read_access
from tangram_hpc.storage.journal_segments import read_journals

WAIT_S = 60.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=4, mem_mib=2000, workers=2, home=tmp_path) as cluster:
        yield cluster


def kill_once(cluster: LocalCluster) -> None:
    """Kills the broker, and waits until its successor serves."""
    before = broker_of(cluster).pid
    broker_of(cluster).kill()

    def serves() -> bool:
        try:
            return read_access(cluster.access).pid != before
        except AccessError:
            return False

    until(serves, "the next broker serves")


def test_everything_that_runs_goes_on(cluster: LocalCluster, tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    with cluster.session(trusted=True, name="one") as session, session.shell() as shell:
        session.exec("echo kept > file").result(WAIT_S)
        shell.run("cd /tmp; X=7").result(WAIT_S)
        inside = session.exec(f"sleep 3; echo inside >> {effects}; cat file")
        plain = [cluster.submit(f"sleep 3; echo plain{n} >> {effects}; echo {n}", trusted=True)
                 for n in range(3)]
        waiting = [cluster.submit(["sh", "-c", f"echo w{n}"], cpus=4) for n in range(4)]
        until(lambda: cluster.ask("info")["actions"].get("RUNNING", 0) >= 3, "they run")
        kill_once(cluster)
        assert inside.result(WAIT_S).text == "kept\n"
        assert [future.result(WAIT_S).text for future in plain] == ["0\n", "1\n", "2\n"]
        assert [future.result(WAIT_S).text for future in waiting] == [
            f"w{n}\n" for n in range(4)]
        assert shell.run("echo $X; pwd").result(WAIT_S).text == "7\n/tmp\n"
        assert session.exec("cat file").result(WAIT_S).text == "kept\n"
    assert sorted(effects.read_text().split()) == ["inside", "plain0", "plain1", "plain2"]
    rows = list(fold(read_journals(cluster.folder)).records.values())
    others = [row.state for row in rows if row.state is not ActionState.COMPLETED]
    assert others in ([], [ActionState.CANCELLED]), "only the shell may have been ended"
    assert max(row.attempt for row in rows) == 1


def test_snapshots_shared_sessions_and_functions_go_on(cluster: LocalCluster) -> None:
    session = cluster.session(trusted=True, name="shared", shared=True)
    session.exec("echo snap > file").result(WAIT_S)
    name = session.snapshot().result(WAIT_S)
    with tangram_hpc.connect(cluster.access) as other:
        attached = other.attach(session.handle())
        kill_once(cluster)
        assert attached.exec("cat file").result(WAIT_S).text == "snap\n"
        assert sum(cluster.map(abs, range(-20, 0))) == 210
        with cluster.session(trusted=True, snapshot=name) as begun:
            assert begun.exec("cat file").result(WAIT_S).text == "snap\n"
    session.close()


def reads(terminal: Pty, text: bytes) -> None:
    """Reads until this text has come, however late and in however many pieces."""
    found = b""
    while text not in found:
        piece = bytes(terminal.read(WAIT_S))
        assert piece, f"it ended after {found!r}"
        found += piece


def test_a_terminal_goes_on(cluster: LocalCluster) -> None:
    with cluster.session(trusted=True) as session, session.pty(["cat"]) as terminal:
        terminal.write(b"before\n")
        reads(terminal, b"before")
        kill_once(cluster)
        cluster.submit("true").result(WAIT_S)  # this client is back
        terminal.write(b"after\n")
        reads(terminal, b"after")
        terminal.write(b"\x04")
        assert terminal.wait(WAIT_S) == 0


def test_a_worker_that_dies_with_the_broker_is_lost_and_its_actions_run_again(
        tmp_path: Path) -> None:
    with LocalCluster(cpus=1, mem_mib=1000, workers=2, home=tmp_path, grace_s=4) as cluster:
        futures = [cluster.submit("sleep 2; hostname") for _ in range(2)]
        until(lambda: cluster.ask("info")["actions"].get("RUNNING", 0) == 2, "both run")
        processes_of(cluster)[2].send_signal(signal.SIGKILL)
        began = time.monotonic()
        kill_once(cluster)
        assert all(future.result(WAIT_S).ok for future in futures)
        assert time.monotonic() - began > 3  # it was waited for
        assert sorted(node["state"] for node in cluster.ask("nodes")["nodes"])[-1] == "UP"
