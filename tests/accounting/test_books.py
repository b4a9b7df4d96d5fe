"""The books: what is imported equals the journals, nothing is lost or doubled, and every cut of an
import or of a journal is made good by the next import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.books_rig import BEGAN, contents, histories, write_journal
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import make_url

from tangram_hpc.accounting.books import importing, query, schema
from tangram_hpc.accounting.books.importing import import_jobs
from tangram_hpc.accounting.books.query import stored_jobs, stored_records, stored_roll_up
from tangram_hpc.accounting.books.schema import Books, open_books
from tangram_hpc.accounting.fields import as_json
from tangram_hpc.accounting.held_usage import HeldUsage
from tangram_hpc.accounting.job_row import fold_with_job
from tangram_hpc.accounting.record import fold
from tangram_hpc.accounting.roll_up import BY, RollUp
from tangram_hpc.accounting.selection import Selection
from tangram_hpc.accounting.starts import without_gaps
from tangram_hpc.cli.helpers.acct_jobs import from_books
from tangram_hpc.config.settings import load_config
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.slurm import JobSpan
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput, TangramError

NOW = BEGAN + 10**15
few = settings(max_examples=12, deadline=None, derandomize=True)


@contextmanager
def a_home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def imported(books: Books, home: Path, now_ns: int = NOW) -> list[str]:
    said: list[str] = []
    import_jobs(books, home, now_ns, said.append)
    return said


def short_history(actions: int = 3, at: int = BEGAN) -> list[ev.Event]:
    """One action after the other on one node."""
    events: list[ev.Event] = [
        ev.BrokerStarted(at, "4711", "elastic", "none", "me"),
        ev.ClientJoined(at, 1, "uid", "rank-0", 0, 1, "socket")]
    for n in range(1, actions + 1):
        events += [ev.ActionSubmitted(at + n, Action(mint(1, n), "grade", degrees=(0,))),
                   ev.LeaseGranted(at + n, n, mint(1, n), 0, 1, ()),
                   ev.LeaseFinished(at + n + 1, n, Outcome(ActionState.COMPLETED), True)]
    return events


@settings(max_examples=40, deadline=None, derandomize=True)
@given(events=histories())
def test_attempts_add_up_and_never_use_more_than_was_held(events: list[ev.Event]) -> None:
    folded, held = fold(events), HeldUsage()
    for event in without_gaps(events):
        held.add(event)
    held.close()
    attempts = [a for record in folded.records.values() for a in record.attempts]
    over = [a for a in attempts if a.outcome is not None and a.start_ns]
    lent_ns = sum(a.cpu_held_ns for a in over)
    running_ns = sum(replace(a, end_ns=folded.last_ns).cpu_held_ns
                     for a in folded.records.values() if not a.end_ns)
    assert lent_ns + running_ns == folded.usage.lent_ns
    assert sum(a.outcome.cpu_ns for a in over if a.outcome) == folded.usage.burnt_ns <= lent_ns
    assert folded.usage.lent_ns <= sum(r.used_ns for r in held.rows.values()) <= sum(
        r.held_ns for r in held.rows.values())
    for record in folded.records.values():
        assert record.attempt == len(record.earlier) + bool(record.start_ns)
        assert not record.grants or record.state is not ActionState.PENDING


@few
@given(events=histories(), since=st.sampled_from([0, BEGAN + 10**9]),
       states=st.sampled_from([frozenset(), frozenset({"FAILED", "PENDING", "NODE_FAIL"})]))
def test_books_answer_as_the_journal_does(events: list[ev.Event], since: int,
                                          states: frozenset[str]) -> None:
    wanted = Selection(states=states, since=since)
    with a_home() as home, open_books("", home) as books:
        write_journal(home / "jobs" / "4711@c", events)
        imported(books, home)
        folded, row = fold_with_job(events, False, NOW)
        mine = sorted((a.action.id, n, as_json(a)["state"], as_json(a)) for r in
                      folded.records.values() for n, a in enumerate(r.attempts)
                      if wanted.wants(a, folded.last_ns))
        with books.reading() as connection:
            (job,) = stored_jobs(connection, Selection())
            theirs = list(stored_records(connection, job, wanted, duplicates=True))
            assert job.row == row and job.actions == len(folded.records)
            assert sorted(map(str, (as_json(a) for a in theirs))) == sorted(
                str(a) for *_, a in mine)
            assert [a.submit_ns for a in theirs] == sorted(a.submit_ns for a in theirs)
            for by in BY:
                total = RollUp(by)
                for r in folded.records.values():
                    for a in r.attempts:
                        if wanted.wants(a, folded.last_ns):
                            total.add_attempt(a)
                found = stored_roll_up(connection, [job], wanted, by)
                assert [r.to_json() for r in found] == [r.to_json() for r in total.rows()]
                assert sum(r.attempts for r in found) == len(mine)


@few
@given(events=histories(), cut=st.floats(0, 1), each=st.integers(1, 4))
def test_a_journal_that_was_cut_at_any_byte_is_imported_when_it_goes_on(
        events: list[ev.Event], cut: float, each: int) -> None:
    with a_home() as home, a_home() as other, open_books("", home) as books, open_books(
            "", other) as at_once:
        whole = write_journal(home / "jobs" / "4711", events, each)
        data = whole.read_bytes()
        shutil.copytree(home / "jobs", other / "jobs")
        whole.write_bytes(data[: round(len(data) * cut)])
        imported(books, home)
        whole.write_bytes(data)
        shutil.copystat(other / "jobs/4711/journal", whole)
        imported(books, home)
        imported(at_once, other)
        once = contents(books)
        assert once == contents(at_once)
        assert imported(books, home) == [] and contents(books) == once
        whole.touch()  # it is read again
        assert imported(books, home) == [] and contents(books)[1] == once[1]


def test_a_torn_end_is_told_once(tmp_path: Path) -> None:
    journal = write_journal(tmp_path / "jobs/4711", short_history(), 2)
    journal.write_bytes(journal.read_bytes()[:-7])
    with open_books("", tmp_path) as books:
        (line,) = imported(books, tmp_path)
        assert "job 4711: the last record of its journal was cut off" in line
        assert imported(books, tmp_path) == []
        with books.reading() as connection:
            (job,) = stored_jobs(connection, Selection())
            assert job.actions == 3 and job.row.state == "FAILED"


def test_rows_stay_when_journals_are_damaged_shorter_or_gone(tmp_path: Path) -> None:
    folder = tmp_path / "jobs/4711"
    journal = write_journal(folder, short_history(8), 1)
    data = journal.read_bytes()
    with open_books("", tmp_path) as books:
        imported(books, tmp_path)
        rows = contents(books)
        write_journal(tmp_path / "jobs/senseless", [ev.BrokerStarted(1, "s", "", ""),
                                                    ev.LeaseGranted(2, 1, mint(1, 1), 1, 1, ())])
        assert any("do not fit together" in said for said in imported(books, tmp_path))
        shutil.rmtree(tmp_path / "jobs/senseless")
        journal.write_bytes(data[: len(data) // 2])
        assert any("shorter than what the books have read" in s for s in imported(books, tmp_path))
        journal.write_bytes(data[:99] + bytes([data[99] ^ 1]) + data[100:])
        assert any("damaged" in said for said in imported(books, tmp_path))
        shutil.rmtree(folder)
        assert imported(books, tmp_path) == []
        assert contents(books) == rows
        # another job of the same id is another job
        write_journal(folder, short_history(1, BEGAN + 10**12))
        imported(books, tmp_path)
        assert len(contents(books)[0]) == 2 and len(contents(books)[1]) == 9


def test_a_folder_that_was_moved_away_is_the_same_job(tmp_path: Path) -> None:
    write_journal(tmp_path / "jobs/4711@c", short_history())
    with open_books("", tmp_path) as books:
        imported(books, tmp_path)
        once = contents(books)
        (tmp_path / "jobs/4711@c").rename(tmp_path / "jobs/4711@c~1")
        imported(books, tmp_path)
        assert contents(books) == once


def test_a_job_that_runs_is_brought_up_to_date(tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Its broker is killed without a word in the journal."""
    write_journal(tmp_path / "jobs/4711", short_history(2))
    alive = True
    monkeypatch.setattr(importing, "is_served", lambda folder: alive)
    with open_books("", tmp_path) as books:
        for now in (NOW, NOW + 7):
            imported(books, tmp_path, now)
            with books.reading() as connection:
                (job,) = stored_jobs(connection, Selection())
                assert (job.row.state, job.row.end_ns) == ("RUNNING", now)
        write_journal(tmp_path / "jobs/4711", short_history(4)[8:])
        imported(books, tmp_path)
        alive = False
        imported(books, tmp_path)
        with books.reading() as connection:
            (job,) = stored_jobs(connection, Selection())
            assert (job.row.state, job.actions) == ("FAILED", 4)
            assert job.row.end_ns == BEGAN + 5


def test_the_end_of_a_job_comes_from_slurm_when_accounting_has_it(tmp_path: Path) -> None:
    """The job is imported once more as soon as accounting has its end, and never again."""
    folder = tmp_path / "jobs/4711"
    write_journal(folder, short_history())
    spans: list[JobSpan] | None = None
    with open_books("", tmp_path) as books:
        def import_one() -> tuple[int, int]:
            report = import_jobs(books, tmp_path, NOW, pytest.fail,
                                 lambda asked: dict.fromkeys(asked, spans))
            with books.reading() as connection:
                (job,) = stored_jobs(connection, Selection())
            return report.read, job.row.end_ns

        early = [import_one(), import_one()]
        end = (BEGAN // 10**9 + 60) * 10**9
        spans = [JobSpan("4711", 1, BEGAN, end)]
        assert early[0] == early[1] != (1, end) and early[0][0] == 1
        assert [import_one(), import_one()] == [(1, end), (0, end)]


def test_an_id_that_is_submitted_again_has_its_later_action(tmp_path: Path) -> None:
    events = short_history(2)
    again = [ev.ActionAcknowledged(BEGAN + 9, (mint(1, 1), mint(1, 2))),
             ev.ActionSubmitted(BEGAN + 10, Action(mint(1, 1), "again", degrees=(0,)))]
    write_journal(tmp_path / "jobs/4711", [*events, *again])
    with open_books("", tmp_path) as books:
        assert imported(books, tmp_path) == []
        with books.reading() as connection:
            (job,) = stored_jobs(connection, Selection())
            found = list(stored_records(connection, job, Selection()))
            assert [r.action.name for r in found] == ["grade", "again"] and job.actions == 2


def test_an_import_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                              ) -> None:
    write_journal(tmp_path / "jobs/4711", short_history(9))
    with open_books("", tmp_path) as books:
        packed, count = importing.pack_record, 0

        def pack(record: Any) -> bytes:
            nonlocal count
            count += 1
            if count > 5:
                raise OverflowError("too large")
            return packed(record)

        monkeypatch.setattr(importing, "pack_record", pack)
        (line,) = imported(books, tmp_path)
        assert line.startswith("books sqlite") and "too large. The books keep" in line
        assert contents(books) == ([], [])
        monkeypatch.setattr(importing, "pack_record", packed)
        imported(books, tmp_path)
        assert len(contents(books)[1]) == 9


def test_a_value_that_is_refused_stops_no_other_job(tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("4711", "4712", "4713"):
        write_journal(tmp_path / "jobs" / name, short_history())
    columns = importing._job_columns
    said: list[str] = []
    with open_books("", tmp_path) as books:
        monkeypatch.setattr(importing, "_job_columns", lambda row: columns(row) | {
            "held_ns": 2**63 if not said else 1})
        report = import_jobs(books, tmp_path, NOW, said.append)
        assert (report.failed, report.read, len(said)) == (1, 2, 1)
        assert len(contents(books)[0]) == 2


def test_jobs_whose_journals_look_the_same_are_both_imported(tmp_path: Path) -> None:
    with open_books("", tmp_path) as books:
        for name in ("4711", "4712"):
            journal = write_journal(tmp_path / "jobs" / name, short_history())
            os.utime(journal, ns=(BEGAN, BEGAN))
            imported(books, tmp_path)
        assert len(contents(books)[0]) == 2


def test_a_job_that_ran_and_whose_folder_is_gone_has_failed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    write_journal(home / "jobs/4711", short_history())
    monkeypatch.setattr(importing, "is_served", lambda folder: True)
    url = f"sqlite:///{tmp_path}/shared.sqlite"
    with open_books("", home) as own, open_books(url, home) as shared:
        for books in (own, shared):
            imported(books, home)
        (home / "jobs/4711").rename(tmp_path / "away")
        for books, at, state in ((own, home, "FAILED"), (shared, other, "RUNNING")):
            imported(books, at)
            with books.reading() as connection:
                (job,) = stored_jobs(connection, Selection())
                assert job.row.state == state
                assert state == "RUNNING" or job.row.end_ns == BEGAN + 4
        (tmp_path / "away").rename(home / "jobs/4711")
        imported(own, home)
        with own.reading() as connection:
            assert stored_jobs(connection, Selection())[0].row.state == "RUNNING"


def test_rows_that_are_printed_slowly_block_no_importer(tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_WAIT_S", 0.1)
    monkeypatch.setattr(query, "_PORTION", 2)
    write_journal(tmp_path / "jobs/4711", short_history(5))
    with open_books("", tmp_path) as books, closing(
            from_books(books, [], False, Selection())) as found:
        imported(books, tmp_path)
        rows = next(found).attempts()
        began = [next(rows)]
        write_journal(tmp_path / "jobs/4712", short_history(5))
        (tmp_path / "jobs/4711/journal").touch()
        assert imported(books, tmp_path) == [] and len(contents(books)[1]) == 10
        assert [r.action.id for r in (*began, *rows)] == [mint(1, n) for n in range(1, 6)]


def test_importers_side_by_side_write_every_row_once(tmp_path: Path) -> None:
    for job in range(3):
        write_journal(tmp_path / f"jobs/47{job}", short_history(300, BEGAN + job))
    command = [sys.executable, "-m", "tangram_hpc", "books", "--json"]
    environ = {"TANGRAM_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    runs = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
            for _ in range(2)]
    assert [run.wait(120) for run in runs] == [0, 0]
    with open_books("", tmp_path) as books:
        every, rows = contents(books)
        assert (len(every), len(rows)) == (3, 900)
        assert imported(books, tmp_path) == [] and contents(books) == (every, rows)


def test_tables_of_another_version_are_migrated_or_refused(tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch
                                                           ) -> None:
    write_journal(tmp_path / "jobs/4711", short_history())
    with open_books("", tmp_path) as books:
        imported(books, tmp_path)
        rows = contents(books)
    monkeypatch.setattr(schema, "SCHEMA", schema.SCHEMA + 1)
    with monkeypatch.context() as broken:
        broken.setattr(schema, "MIGRATIONS", (
            *schema.MIGRATIONS,
            lambda c: c.exec_driver_sql("CREATE TABLE made (x INTEGER)") and c.exec_driver_sql(
                "nonsense")))
        with pytest.raises(TangramError, match="nonsense"):
            open_books("", tmp_path)
    monkeypatch.setattr(schema, "MIGRATIONS", (
        *schema.MIGRATIONS, lambda c: c.exec_driver_sql("CREATE TABLE made (x INTEGER)")))
    with open_books("", tmp_path) as books:  # the first try was undone
        assert contents(books) == rows
    monkeypatch.undo()
    with pytest.raises(InvalidInput, match=r"a later release made them \(version 5") as error:
        open_books("", tmp_path)
    assert "\n" not in str(error.value)


def test_books_of_version_1_get_the_column_of_tenants(tmp_path: Path) -> None:
    write_journal(tmp_path / "jobs/4711", short_history())
    with open_books("", tmp_path) as books:
        imported(books, tmp_path)
        rows = contents(books)
        with books.writing("test") as connection:
            for column in ("tenant", "restore_ns", "setup_ns"):
                connection.exec_driver_sql(f"ALTER TABLE tangram_actions DROP COLUMN {column}")
            connection.exec_driver_sql("UPDATE tangram_books SET version = 1")
    with open_books("", tmp_path) as books, books.reading() as connection:
        told = connection.exec_driver_sql("SELECT DISTINCT tenant FROM tangram_actions").fetchall()
        assert told == [("default",)] and contents(books) == rows


def test_wrong_databases_are_told_in_one_line(tmp_path: Path) -> None:
    for setting, told in (("nonsense", "setting `books`"), ("oracle://x/y", "write postgresql://"),
                          (f"sqlite:///{tmp_path}/no/such", f"^books {tmp_path}/no/such: "),
                          ("sqlite://", "names no file"), ("sqlite:///:memory:", "names no file"),
                          (f"postgresql://u@/d?host={tmp_path}", "books postgresql")):
        with pytest.raises(TangramError, match=told) as error:
            open_books(setting, tmp_path)
        assert "\n" not in str(error.value)


def test_a_password_in_the_setting_is_refused(tmp_path: Path) -> None:
    for url in ("postgresql://u:geheim@host/d", "mariadb://host/d?user=u&password=geheim",
                "postgresql://u:a/geheim@h/d", "mariadb://h/d?passwd=geheim",
                "postgresql://h/d?PASSWORD=geheim", "postgresql://h/d?a=b&sslpassword=geheim",
                "postgresql://h/d?pass%77ord=geheim"):
        with pytest.raises(InvalidInput, match="must have no password") as error:
            load_config({"HOME": str(tmp_path), "TANGRAM_BOOKS": url})
        assert "geheim" not in str(error.value) and "pgpass" in str(error.value)
    for url in ("postgresql://u@host:5432/d?passfile=/home/u/.pgpass", "sqlite:////tmp/b"):
        assert load_config({"HOME": str(tmp_path), "TANGRAM_BOOKS": url}).books == url
    with Books(make_url("mariadb+pymysql://h/d?secret=geheim")) as books:
        assert books.name == "mariadb+pymysql://h/d"
