"""A session whose node is drained at its allocation's end, and that goes on on another node: real
broker, two real workers, real files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tangram_hpc import LocalCluster
from tangram_hpc.accounting.record import fold
from tangram_hpc.backends.journal import read_journals
from tangram_hpc.domain import event as ev
from tangram_hpc.errors import SessionLost

pytestmark = pytest.mark.long  # it waits for the end of an allocation


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.05)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_session_moves_with_its_files(tmp_path: Path, trusted: bool) -> None:
    # a third of what is left is the margin: drained some ten seconds after it joined
    cluster = LocalCluster(cpus=2, mem_mib=1024, home=tmp_path / "home", end="+18")
    with cluster as c:
        (first,) = c.ask("nodes")["nodes"]
        with c.session(trusted=trusted, movable=True, mem=64, files={"in/a": "one\n"}) as s, \
                c.session(trusted=trusted, mem=64) as stays:
            old = s.node
            assert s.exec("echo two > b; ln -s in/a link; echo $((40 + 2)) > $TMPDIR/t; "
                          "sleep 300 & echo $! > pid").result(60).ok
            held = s.exec("until [ -e go ]; do sleep 0.05; done; echo held")
            late = s.exec("cat in/a b link $TMPDIR/t")
            until(lambda: c.ask("nodes")["nodes"][0]["state"] == "DRAINING")
            del c._environ["TANGRAM_END"]  # the next node's allocation has no end that is known
            c._spawn("worker", "--access", str(c.access), "--name", "second")
            until(lambda: [n["state"] for n in c.ask("nodes")["nodes"]][1:] == ["UP"])
            s.write("go", "")
            assert held.result(60).text == "held\n"
            assert late.result(60).text == "one\ntwo\none\n42\n"
            assert s.node == "second" != old and not s.closed.done()
            assert s.exec("cat b; ls").result(60).text == "two\nb\ngo\nin\nlink\npid\n"
            with pytest.raises(SessionLost):
                stays.exec(["true"]).result(60)
            assert "its allocation ends" in stays.closed.result(60)
            states = {n["name"]: (n["state"], n["sessions"]) for n in c.ask("nodes")["nodes"]}
            assert states == {first["name"]: ("DRAINED", 0), "second": ("UP", 1)}
        until(lambda: c.ask("info")["sessions"] == 0)
    facts = list(read_journals(cluster.folder))
    assert [type(f) for f in facts if isinstance(f, ev.SessionMoving | ev.SessionPacked)] == [
        ev.SessionMoving, ev.SessionPacked]
    rows = fold(facts).records.values()
    assert {r.node.name for r in rows if r.node and r.action.session == s.spec.id} == {
        old, "second"}
