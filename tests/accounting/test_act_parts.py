"""The ACT of an action is split into wait, restore, set-up, run and return: the parts add up, in
records, in groups and in the books; journals without a measured set-up are read as before.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from helpers.builders import World
from helpers.recorded_job import BEGAN_NS, write_job
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc import LocalCluster
from tangram_hpc.accounting.act_parts import ActParts, act_parts
from tangram_hpc.accounting.books.importing import import_jobs
from tangram_hpc.accounting.books.schema import open_books
from tangram_hpc.accounting.fields import FIELDS, as_json
from tangram_hpc.accounting.record import ActionRecord, fold
from tangram_hpc.accounting.roll_up import RollUp
from tangram_hpc.cli import main
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState

MS = 10**6
TEXTS = {f.name: f.text for f in FIELDS}
amounts = st.integers(0, 10**15)


@settings(deadline=None, derandomize=True)
@given(amounts, amounts, amounts, st.integers(-1, 10**15), amounts)
def test_the_parts_always_add_up_to_the_act(act: int, planned: int, restore: int, setup: int,
                                            run: int) -> None:
    parts = act_parts(act, planned, restore, setup, run)
    assert sum(parts) == act and min(parts) >= 0
    if run + restore + max(0, setup) + planned <= act:
        assert parts[:4] == (planned, restore, max(0, setup), run)


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 100), st.integers(0, 60), st.integers(0, 60), st.integers(-1, 60),
       st.integers(0, 60))
def test_groups_add_up_the_same_parts(act: int, planned: int, restore: int, setup: int, run: int
                                      ) -> None:
    total = RollUp("name")
    for _ in range(2):
        total.add("4711", "me", True, ["COMPLETED", 7, 7 + act, planned, restore, setup, run, 0, 0,
                                       0, "build"])
    [row] = total.rows()
    assert row.parts_ns == [2 * part for part in act_parts(act, planned, restore, setup, run)]


def test_what_the_node_measured_is_not_shortened_by_a_wait_that_counts_the_same_time() -> None:
    assert act_parts(100, 60, 0, 10, 50) == ActParts(40, 0, 10, 50, 0)


def ended(outcome: Outcome) -> ActionRecord:
    """The record of an action that waited 10 ms and held its CPU for 100 ms."""
    w = World()
    w.node(cpus=1)
    action = w.submit(1)
    submitted = w.now
    w.now += 10 * MS
    w.plan()
    w.happen(ev.LeaseFinished(submitted + 110 * MS, w.lease_of(action), outcome, True))
    return fold([ev.BrokerStarted(0, "77", "elastic", "none", "me"), *w.events]).records[action]


def test_a_record_tells_its_parts_in_columns_and_in_json() -> None:
    one = ended(Outcome(ActionState.COMPLETED, exec_ns=69 * MS, setup_ns=25 * MS))
    assert (TEXTS["Setup"](one), TEXTS["Return"](one)) == ("00:00:00.025", "00:00:00.005")
    told = as_json(one)
    assert sum(told[f"{part}_ns"] for part in ("planned", "restore", "setup", "exec", "return")) \
        == told["end_ns"] - told["submit_ns"]


def test_the_outcome_of_an_earlier_release_has_no_set_up() -> None:
    new = msgspec.msgpack.encode(Outcome(ActionState.COMPLETED, exec_ns=70 * MS, setup_ns=5))
    fields = msgspec.msgpack.decode(new)
    before = Outcome.__struct_fields__.index("setup_ns")
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(fields[:before]), type=Outcome)
    assert old.setup_ns == -1
    one = ended(old)
    assert TEXTS["Setup"](one) == TEXTS["Return"](one) == ""
    told = as_json(one)
    assert told["setup_ns"] is told["return_ns"] is None
    assert one.parts == pytest.approx((10 * MS, 0, 0, 70 * MS, 30 * MS), abs=100)
    # an earlier release reads what this one writes: it ignores the field at the end
    later = msgspec.msgpack.encode([*fields, "a field of a later release"])
    assert msgspec.msgpack.decode(later, type=Outcome).setup_ns == 5


@pytest.mark.parametrize("version, missing", [
    (2, ("restore_ns", "setup_ns")), (1, ("tenant", "restore_ns", "setup_ns")),
    # interrupted migrations, in a database that commits each column by itself
    (2, ("setup_ns",)), (2, ()), (1, ("setup_ns",)), (1, ()), (3, ())])
def test_books_of_earlier_versions_get_the_parts(version: int, missing: tuple[str, ...],
                                                 tmp_path: Path) -> None:
    events: list[ev.Event] = [ev.BrokerStarted(BEGAN_NS, "4711", "elastic", "none", "me")]
    for n, key, restore in ((1, "service:judge", 30 * MS), (2, "cpu", 0)):
        events += [
            ev.ActionSubmitted(BEGAN_NS, Action(mint(1, n), "grade", degrees=(0,), key=key)),
            ev.LeaseGranted(BEGAN_NS, n, mint(1, n), 0, 1, ()),
            ev.LeaseFinished(BEGAN_NS + 100 * MS, n, Outcome(
                ActionState.COMPLETED, exec_ns=MS, restore_ns=restore, setup_ns=2 * MS), True)]
    write_job(tmp_path, [*events, ev.BrokerStopped(BEGAN_NS + 200 * MS, "over")])
    said: list[str] = []
    query = "SELECT restore_ns, setup_ns FROM tangram_actions ORDER BY action"
    with open_books("", tmp_path) as books:
        import_jobs(books, tmp_path, BEGAN_NS + 10**9, said.append)
        with books.writing("test") as connection:
            assert connection.exec_driver_sql(query).fetchall() == [
                (30 * MS, 2 * MS), (0, 2 * MS)]
            for column in missing:
                connection.exec_driver_sql(f"ALTER TABLE tangram_actions DROP COLUMN {column}")
            if "restore_ns" not in missing and version < 3:
                connection.exec_driver_sql("UPDATE tangram_actions SET restore_ns = 0")
            connection.exec_driver_sql("ALTER TABLE tangram_jobs DROP COLUMN account")
            connection.exec_driver_sql(f"UPDATE tangram_books SET version = {version}")
    with open_books("", tmp_path) as books, books.reading() as connection:
        assert connection.exec_driver_sql("SELECT account FROM tangram_jobs").fetchall() == [("",)]
        assert not said
        setup = -1 if "setup_ns" in missing else 2 * MS
        assert connection.exec_driver_sql(query).fetchall() == [(30 * MS, setup), (0, setup)]
        assert connection.exec_driver_sql("SELECT DISTINCT tenant FROM tangram_actions").fetchall(
            ) == [("default",)]


def test_a_real_run_is_split_alike_by_acct_and_by_the_client(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
        ) -> None:
    monkeypatch.setenv("TANGRAM_HOME", str(tmp_path))
    with LocalCluster(cpus=1, home=tmp_path, job="4711") as client:
        for _ in range(5):  # one after the other: no part of a prefetched one is counted twice
            client.submit(["sleep", "0.02"], trusted=True).result(60)
        client.submit(abs, -1).result(60)
        figures = client.metrics(prefix="")
    assert figures["tools/system_s"] == pytest.approx(
        figures["tools/setup_s"] + figures["tools/return_s"])
    capsys.readouterr()
    assert main(["acct", "-j", "4711", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["actions"]
    assert len(rows) == 6 and all(row["setup_ns"] >= 0 for row in rows)
    assert main(["acct", "-j", "4711", "--by", "user", "--json"]) == 0
    [group] = json.loads(capsys.readouterr().out)["groups"]
    parts = sum(group[f"{part}_mean_ns"] for part in ("wait", "restore", "setup", "run", "return"))
    assert parts == pytest.approx(group["act_mean_ns"], abs=5)  # each is rounded down
    assert group["setup_mean_ns"] == sum(row["setup_ns"] for row in rows) // 6
    # the first command waited for a sandbox, and those after it found one
    assert group["setup_mean_ns"] / 1e9 == pytest.approx(figures["tools/setup_s"], abs=1e-6)
