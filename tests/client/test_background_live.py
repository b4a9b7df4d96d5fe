"""Processes that a client starts detached and polls, in a whole job: `background="run"`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cluster_parts import until

from tangram_hpc import InfeasibleRequest, InvalidInput, LocalCluster, SessionLost
from tangram_hpc.accounting.record import ActionRecord, fold
from tangram_hpc.client.session import Session
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms
from tangram_hpc.storage.journal_segments import read_journals

POLL_S = 0.25
BURN = "import time\nwhile time.process_time() < 0.3:\n    pass\n"
LOOP = "(setsid sh -c 'while :; do :; done' >/dev/null 2>&1 &)"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home")) as made:
        yield made


def background_records(folder: Path) -> list[ActionRecord]:
    return [record for record in fold(read_journals(folder)).records.values()
            if record.action.kind is Kind.BACKGROUND]


def of_session(cluster: LocalCluster, session: Session) -> list[ActionRecord]:
    return [record for record in background_records(cluster.folder)
            if record.action.session == session.spec.id]


def in_foreground(session: Session) -> float:
    began = time.monotonic()
    session.exec(["python3", "burn.py"]).result().check()
    return time.monotonic() - began


def detached(session: Session, name: str, patience_s: float = 120.0) -> float:
    """How long a job takes that is started detached and polled, in seconds."""
    began = time.monotonic()
    session.exec(f"nohup sh -c 'python3 burn.py; touch {name}' >/dev/null 2>&1 &").result().check()
    while session.exec(["test", "-e", name]).result().exit_code:
        assert time.monotonic() - began < patience_s, "it never ends"
        time.sleep(POLL_S)
    return time.monotonic() - began


def test_a_detached_job_that_is_polled_takes_little_longer_than_in_the_foreground(
        cluster: LocalCluster) -> None:
    with cluster.client.session(background="run", files={"burn.py": BURN}, trusted=True) as s:
        in_foreground(s)
        times = [(in_foreground(s), detached(s, f"done{n}")) for n in range(2)]
        told = cluster.client.ask("info")
    best, polled = min(one for one, _ in times), min(other for _, other in times)
    assert polled < 4 * best + 4 * POLL_S, times
    assert told["nodes"] == 1
    records = of_session(cluster, s)
    assert records and {r.action.name for r in records} == {"background"}
    assert sum(r.outcome.cpu_ns for r in records if r.outcome) > 200_000_000
    assert all(r.cpus == 1 and r.cpu_held_ns > 0 for r in records)


def test_a_sleeping_background_process_holds_no_core_and_its_session_ends_idle(
        cluster: LocalCluster) -> None:
    with cluster.client.session(background="run", trusted=True, idle_s=1.5) as s:
        s.exec("(sleep 1000 >/dev/null 2>&1 &)").result().check()
        until(lambda: all(r.end_ns for r in of_session(cluster, s)), "its leases end")
        assert "idle" in s.closed.result(60)
    held = sum(r.cpu_held_ns for r in of_session(cluster, s))
    assert held < 1_000_000_000, "a process that sleeps held a core"


def test_a_session_whose_background_processes_run_is_not_idle(cluster: LocalCluster) -> None:
    with cluster.client.session(background="run", trusted=True, idle_s=0.5) as s:
        s.exec(LOOP).result().check()
        time.sleep(2.0)
        assert s.exec(["true"]).result().exit_code == 0
    until(lambda: of_session(cluster, s)[-1].state is ActionState.CANCELLED, "it is cancelled")
    (*earlier, last) = of_session(cluster, s)
    assert last.outcome is not None
    assert last.end_ns and "closed by its client" in last.outcome.reason
    assert all(r.state in (ActionState.PREEMPTED, ActionState.COMPLETED) for r in earlier)


def test_a_background_job_ends_although_other_actions_keep_all_cores_busy(
        cluster: LocalCluster) -> None:
    stop = threading.Event()
    ran: list[int] = []

    def load() -> None:
        while not stop.is_set():
            cluster.client.submit(["sleep", "0.2"], trusted=True).result()
            ran.append(1)

    with cluster.client.session(background="run", files={"burn.py": BURN}, trusted=True) as s:
        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            alone = in_foreground(s)
            detached(s, "done")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert len(ran) > 4 and alone > 0


@pytest.mark.parametrize("count, seconds", [
    (6, 4.0), pytest.param(20, 20.0, marks=pytest.mark.long)])
def test_background_processes_of_many_sessions_share_two_cores(
        cluster: LocalCluster, count: int, seconds: float) -> None:
    sessions = [cluster.client.session(background="run", trusted=True) for _ in range(count)]
    for future in [s.exec(LOOP) for s in sessions]:
        future.result().check()
    time.sleep(seconds)
    began = time.monotonic()
    cluster.client.submit(["true"], trusted=True).result().check()
    waited = time.monotonic() - began
    for s in sessions:
        s.close()
    for s in sessions:
        s.closed.result(60)
    held = [sum(r.cpu_held_ns for r in of_session(cluster, s)) for s in sessions]
    assert min(held) > 0.3 * sum(held) / count, held
    assert waited < seconds, "an action waits for a slice, and not for all of them"
    assert sum(held) <= 2 * 1.1 * 1e9 * (seconds + 60)


def test_a_background_action_is_cancelled_by_its_id(cluster: LocalCluster) -> None:
    with cluster.client.session(background="run", trusted=True) as s:
        s.exec(LOOP).result().check()
        until(lambda: any(r.state is ActionState.RUNNING for r in of_session(cluster, s)),
              "its background action runs")
        (running,) = [r for r in of_session(cluster, s) if r.state not in (
            ActionState.PREEMPTED, ActionState.COMPLETED)]
        connection = cluster.client._connection
        with connection._lock:
            connection._put(ms.Cancel((running.action.id,)))
        until(lambda: of_session(cluster, s)[-1].state is ActionState.CANCELLED, "it is cancelled")
        found = s.exec("ps -eo args | grep -c '[w]hile :' || true").result()
        assert s.exec(["true"]).result().exit_code == 0 and found.exit_code == 0
        count = len(of_session(cluster, s))
        time.sleep(0.5)
        assert len(of_session(cluster, s)) == count, "nothing is left that could run"


def test_wrong_background_arguments_are_refused_naming_the_field(cluster: LocalCluster) -> None:
    with pytest.raises(InvalidInput, match="background: 'go' is not one of stop, share, end, run"):
        cluster.client.session(background="go")
    with pytest.raises(InvalidInput, match="background_cpus: 0 is not a whole number"):
        cluster.client.session(background="run", background_cpus=0)
    with cluster.client.session(background="run", background_cpus=(1, 2), trusted=True) as s:
        assert s.spec.background_cpus == (1, 2)
        with s.fork(background="stop") as copy:
            assert copy.spec.background_cpus == (1,)
    for wrong, why in ({"background_cpus": (1, 2)}, 'pass background="run"'), (
            {"background": "run", "background_cpus": 64}, "the largest node has 2"):
        with pytest.raises(InfeasibleRequest, match=why):
            cluster.client.session(trusted=True, **wrong).opened.result(60)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("part", ["broker", "worker"])
def test_the_death_of_broker_or_worker_leaves_no_background_process(
        tmp_path: Path, part: str) -> None:
    cluster = LocalCluster(cpus=2, home=tmp_path, job="cut").start()
    try:
        s = cluster.client.session(background="run", trusted=True)
        s.exec(LOOP).result().check()
        until(lambda: any(r.state is ActionState.RUNNING for r in of_session(cluster, s)),
              "its background action runs")
        os.kill(cluster._children[part == "worker"].pid, signal.SIGKILL)
        if part == "worker":
            with pytest.raises(SessionLost):
                s.exec(["true"]).result()
            until(lambda: of_session(cluster, s)[-1].state is ActionState.NODE_FAIL,
                  "its background action fails with its node")
        else:
            cluster._children[0].wait(30)
    finally:
        cluster.close()
    if part == "broker":
        with LocalCluster(cpus=2, home=tmp_path, job="cut") as again:
            assert again.submit(["true"], trusted=True).result().exit_code == 0
    records = background_records(cluster.folder)
    assert records and all(r.end_ns for r in records)
    assert records[-1].state is ActionState.NODE_FAIL
