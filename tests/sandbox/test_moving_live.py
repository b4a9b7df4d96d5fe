"""A session whose node is drained at its allocation's end, and that goes on on another node: real
broker, two real workers, real files."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.cluster_parts import environ_of, start_worker

from tangram_hpc import LocalCluster, SessionLost
from tangram_hpc.accounting.record import fold
from tangram_hpc.domain import event as ev
from tangram_hpc.storage.journal_segments import read_journals

pytestmark = pytest.mark.long  # it waits for the end of an allocation


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.05)


HELD_S = 25  # longer than until the first node is drained and the second has joined


def test_movable_sessions_move_with_their_files(tmp_path: Path) -> None:
    # a third of what is left is the margin: drained some twelve seconds after it joined
    cluster = LocalCluster(cpus=2, mem_mib=1024, home=tmp_path / "home", end="+18")
    with cluster as c:
        (first,) = c.ask("nodes")["nodes"]
        with ExitStack() as stack:
            moves = [stack.enter_context(c.session(trusted=trusted, movable=True, mem=64,
                                                   files={"in/a": "one\n"}))
                     for trusted in (True, False)]
            stays = stack.enter_context(c.session(trusted=True, mem=64))
            del environ_of(c)["TANGRAM_END"]  # the next node's allocation has no end that is known
            start_worker(c, "second")
            made = [s.exec("echo two > b; ln -s in/a link; echo $((40 + 2)) > $TMPDIR/t; "
                           "sleep 300 & echo $! > pid") for s in moves]
            assert all(each.result(60).ok for each in made)
            held = [s.exec(["sleep", str(HELD_S)]) for s in moves]
            late = [s.exec("cat in/a b link $TMPDIR/t") for s in moves]
            assert {s.node for s in moves} == {first["name"]}
            until(lambda: [n["state"] for n in c.ask("nodes")["nodes"]] == ["DRAINING", "UP"])
            assert not any(each.done() for each in held)
            for s, runs, next_one in zip(moves, held, late, strict=True):
                assert runs.result(60).ok and next_one.result(60).text == "one\ntwo\none\n42\n"
                assert s.node == "second" and not s.closed.done()
                assert s.exec("cat b; ls").result(60).text == "two\nb\nin\nlink\npid\n"
                assert s.wait_s < HELD_S / 2
            with pytest.raises(SessionLost):
                stays.exec(["true"]).result(60)
            assert "its allocation ends" in stays.closed.result(60)
            assert {n["name"]: (n["state"], n["sessions"]) for n in c.ask("nodes")["nodes"]} == {
                first["name"]: ("DRAINED", 0), "second": ("UP", 2)}
        until(lambda: c.ask("info")["sessions"] == 0)
    facts = list(read_journals(cluster.folder))
    for session in moves:
        told = [type(f) for f in facts if getattr(f, "session", 0) == session.spec.id
                and isinstance(f, ev.SessionMoving | ev.SessionPacked | ev.SessionPlaced)]
        assert told == [ev.SessionPlaced, ev.SessionMoving, ev.SessionPacked, ev.SessionPlaced]
        nodes = [r.node.name for r in fold(facts).records.values()
                 if r.node and r.action.session == session.spec.id]
        assert nodes[0] == first["name"] and nodes[-1] == "second"
