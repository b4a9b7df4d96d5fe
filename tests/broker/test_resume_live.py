"""A real broker that is killed during a run, and a run that continues: `LocalCluster(job=...)`."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.cluster_parts import broker_of, kill_broker, processes_of
from helpers.forked_verb import tangram

from tangram_hpc import (
    BrokerUnreachable,
    InfeasibleRequest,
    InvalidInput,
    LocalCluster,
    Profile,
)
from tangram_hpc.accounting.record import fold
from tangram_hpc.client.future import Future
from tangram_hpc.domain import event as ev
from tangram_hpc.storage.journal import FileJournal
from tangram_hpc.storage.journal_segments import journals, read_journals

CPUS, COUNT = 2, 16


def submit_all(c: LocalCluster, effects: Path) -> dict[str, Future]:
    def noted(path: str, name: str) -> str:
        """What an action leaves in the world when it ends: one line, written atomically."""
        time.sleep(0.1)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, f"{name}\n".encode())
        os.close(fd)
        return name.upper()

    noted.__module__ = "__main__"  # shipped whole: runners do not see the tests
    futures = {}
    for n in range(COUNT):
        name = f"step1/{n}"
        if n % 2:
            futures[name] = c.submit(noted, str(effects), name, once=name)
        else:
            futures[name] = c.submit(f"sleep 0.1; echo {name} >> {effects}; echo {name}",
                                     trusted=True, once=name)
    return futures


def value(future: Future) -> str:
    found = future.result(timeout=60)
    return found if isinstance(found, str) else found.text


def test_a_run_continues_after_its_broker_was_killed(tmp_path: Path) -> None:
    effects, home = tmp_path / "effects", tmp_path / "home"
    first = LocalCluster(cpus=CPUS, mem_mib=1024, home=home, job="cut").start()
    try:
        plain = first.submit(["sleep", "300"], cpus=1)
        session = first.session(trusted=True)
        inside = session.exec(["sleep", "300"], once="inside")
        futures = submit_all(first, effects)
        inside.cancel()
        known = {}
        for name in list(futures)[:5]:
            known[name] = value(futures[name])
        kill_broker(first)
    finally:
        first.close()
    for child in processes_of(first):
        assert child.poll() is not None
    assert isinstance(plain.exception(0), BrokerUnreachable)
    before = Counter(effects.read_text().split())

    with LocalCluster(cpus=CPUS, mem_mib=1024, home=home, job="cut") as again:
        deadline = time.monotonic() + 60  # the queue goes on although nobody has asked
        while set(effects.read_text().split()) != set(futures):
            assert time.monotonic() < deadline, again.ask("pending")
            time.sleep(0.05)
        futures = submit_all(again, effects)
        told = {name: value(future) for name, future in futures.items()}
        assert told == {n: n.upper() if int(n.split("/")[1]) % 2 else f"{n}\n" for n in told}
        assert {n: told[n] for n in known} == known
        counted = Counter(effects.read_text().split())
        for name in known:
            assert counted[name] == before[name] == 1
        twice = [name for name, count in counted.items() if count > 1]
        assert len(twice) <= CPUS and max(counted.values()) <= 2  # they ran when it was killed
        rows = list(fold(read_journals(again.folder)).records.values())
        ended = Counter(r.action.once for r in rows if r.state.value == "COMPLETED")
        assert ended == Counter(dict.fromkeys(futures, 1))
        lost = [r for r in rows if r.action.once in ("", "inside")]
        assert len(lost) == 2
        assert {r.state.value for r in lost} <= {"NODE_FAIL", "CANCELLED"} and all(
            r.end_ns for r in lost)
        assert again.forget("step1/0", prefix="step1/1") == 8
        assert again.submit("echo other", once="step1/1", name="sh").result(30).text == "other\n"
        with pytest.raises(InvalidInput, match="each action has a name of its own"):
            again.map(str, [1], once="x")
        with pytest.raises(InvalidInput, match="at most 200 bytes"):
            again.submit(["true"], once="x" * 201)
    assert len(journals(again.folder)) == 2
    assert not (again.folder / "once").exists()  # it ended in order: nothing is kept


def test_actions_longer_than_the_allocation_wait_and_sigusr1_drains_the_broker(
        tmp_path: Path) -> None:
    """An allocation of 900 s lends for less than 900 s. SIGUSR1 ends lending and no running
    action."""
    with LocalCluster(cpus=2, mem_mib=512, home=tmp_path, end="+900", end_margin_s=100) as c:
        (node,) = c.ask("nodes")["nodes"]
        assert node["state"] == "UP" and 0 < node["ends_at_ns"] / 1e9 - time.time() <= 900
        late = c.submit(["true"], profile=Profile(890 * 10**9))
        assert c.submit(["true"], timeout=5).result(60).ok
        (waits,) = c.ask("pending")["pending"]
        assert waits["reason"] == "AllocationEnds"
        told = tangram("explain", late.id, check=True,
                       env={**os.environ, "TANGRAM_ACCESS": str(c.access)}).stdout
        assert "AllocationEnds: it is expected to need" in told, told
        session = c.session(trusted=True)
        go = tmp_path / "go"
        runs = session.exec(f"until [ -e {go} ]; do sleep 0.05; done; echo done")
        until(lambda: "RUNNING" in c.ask("info")["actions"])
        os.kill(broker_of(c).pid, signal.SIGUSR1)
        until(lambda: c.ask("nodes")["nodes"][0]["state"] == "DRAINING")
        waits = c.submit(["true"])
        until(lambda: {w["reason"] for w in c.ask("pending")["pending"]} == {"AllocationEnds"})
        go.touch()
        assert runs.result(60).text == "done\n"
        assert "the job is about to end" in session.closed.result(60)
        until(lambda: c.ask("nodes")["nodes"][0]["state"] == "DRAINED")
        assert not waits.done() and not late.done()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_kept_result_of_other_work_is_refused(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, mem_mib=1024, home=tmp_path) as c:
        assert c.submit(abs, -1, once="a").result(timeout=60) == 1
        assert c.submit(["echo", "b"], once="b").result(timeout=60).text == "b\n"
        with pytest.raises(InfeasibleRequest, match="has ended, of function, not of exec echo;"):
            c.submit(["echo", "b"], once="a").result(timeout=60)
        with pytest.raises(InfeasibleRequest, match="has ended, of exec, not of function abs;"):
            c.submit(abs, -1, once="b").result(timeout=60)


def test_a_named_action_is_refused_when_the_spool_is_full(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, mem_mib=512, home=tmp_path, once_mib=1) as c:
        data = os.urandom(60_000)
        futures = [c.submit(["cat"], stdin=data, once=f"n{n}") for n in range(20)]
        ends = []
        for future in futures:
            try:
                ends.append(future.result(60).ok)
            except InfeasibleRequest as error:
                assert "once_mib" in str(error)
                ends.append(False)
        assert ends[0] and not ends[-1]
        c.forget(prefix="n")
        assert c.submit(["true"], once="again").result(30).ok


def test_a_broker_refuses_an_unusable_journal_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "j"
    folder.mkdir(parents=True)
    for journal, word in ((b"something else", "not a journal"), (None, "cannot apply it")):
        if journal is not None:
            (folder / "journal").write_bytes(journal)
        else:
            (folder / "journal").unlink()
            wrong = FileJournal(folder / "journal", "none", lambda call: call())
            wrong.append([ev.SessionReady(1, 5), ev.NodeLost(1, 7, "of no node")])
            wrong.close()
        told = tangram("broker", "--job", "j", env={**os.environ, "TANGRAM_HOME": str(tmp_path)})
        assert told.returncode == 2 and told.stderr.count("\n") == 1, told.stderr
        assert word in told.stderr and str(folder) in told.stderr
        assert not (folder / "access.json").exists()
