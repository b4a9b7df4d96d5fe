"""SQLite, PostgreSQL and MariaDB give identical answers, and importers side by side are safe in
each of them. The servers are real; they run as an ordinary user, without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.books_rig import BEGAN, NAMES, contents, histories, mariadb, postgres, write_journal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from sqlalchemy import delete, select

from tangram_hpc.accounting.books import schema
from tangram_hpc.accounting.books.importing import import_jobs
from tangram_hpc.accounting.books.query import stored_jobs, stored_records, stored_roll_up
from tangram_hpc.accounting.books.schema import Books, open_books
from tangram_hpc.accounting.fields import as_json
from tangram_hpc.accounting.roll_up import BY
from tangram_hpc.accounting.selection import Selection
from tangram_hpc.domain import event as ev
from tangram_hpc.errors import InvalidInput, TangramError

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
NOW = BEGAN + 10**15


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """An SQLite file, a PostgreSQL and a MariaDB. An ordinary user must be able to enter the
    servers' folder, and a socket's path is short."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="books")))
        folder.chmod(0o755)
        yield ["", stack.enter_context(postgres(folder / "p")),
               stack.enter_context(mariadb(folder / "m"))]


def empty(books: Books) -> None:
    with books.writing("test") as connection:
        for table in (schema.actions, schema.jobs):
            connection.execute(delete(table))


def answers(books: Books, wanted: Selection) -> object:
    with books.reading() as connection:
        found = stored_jobs(connection, wanted)
        return ([job.row for job in found], [job.actions for job in found],
                [as_json(r) for job in found
                 for r in stored_records(connection, job, wanted, duplicates=True)],
                [[row.to_json() for row in stored_roll_up(connection, found, wanted, by)]
                 for by in BY])


@settings(max_examples=40, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=histories(), second=histories(), cut=st.floats(0, 1), since=st.sampled_from(
    [0, BEGAN + 10**9]), names=st.sampled_from([(), NAMES[:1], NAMES[2:3], NAMES[3:4], NAMES[5:]]))
def test_three_databases_give_identical_answers(
        urls: list[str], tmp_path_factory: pytest.TempPathFactory, first: list[ev.Event],
        second: list[ev.Event], cut: float, since: int, names: tuple[str, ...]) -> None:
    home = tmp_path_factory.mktemp("home")
    journal = write_journal(home / "jobs/4711@c", first)
    write_journal(home / "jobs/größe", second)
    data = journal.read_bytes()
    wanted = Selection(names=frozenset(names), since=since, until=BEGAN + 10**14)
    all_rows, all_answers = [], []
    for url in urls:
        with open_books(url, home) as books:
            empty(books)
            for content in (data[: round(len(data) * cut)], data, data):
                journal.write_bytes(content)
                os.utime(journal, ns=(BEGAN, BEGAN))
                import_jobs(books, home, NOW, lambda line: None)
            all_rows.append(contents(books))
            all_answers.append((answers(books, Selection()), answers(books, wanted)))
    assert all_rows[0] == all_rows[1] == all_rows[2] and all_rows[0][0]
    assert all_answers[0] == all_answers[1] == all_answers[2]


def test_importers_side_by_side_are_safe_in_each_database(urls: list[str], tmp_path: Path) -> None:
    from test_books import short_history

    for job in range(4):
        write_journal(tmp_path / f"jobs/47{job}", short_history(400, BEGAN + job))
    rows = []
    for url in urls:
        with open_books(url, tmp_path) as books:
            empty(books)
        environ = {"TANGRAM_HOME": str(tmp_path), "PATH": os.environ["PATH"],
                   "HOME": str(tmp_path), "TANGRAM_BOOKS": url}
        runs = [subprocess.Popen([sys.executable, "-m", "tangram_hpc", "books"], env=environ,
                                 stdout=subprocess.DEVNULL) for _ in range(4)]
        assert [run.wait(300) for run in runs] == [0] * 4, url
        with open_books(url, tmp_path) as books:
            rows.append(contents(books))
    assert rows[0] == rows[1] == rows[2] and len(rows[0][1]) == 1600


def test_tables_are_made_once_and_a_later_version_is_refused(
        urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in urls:
        with open_books(url, tmp_path) as books, books.writing("test") as connection:
            schema.metadata.drop_all(connection)
        command = [sys.executable, "-m", "tangram_hpc", "books"]
        environ = {"TANGRAM_HOME": str(tmp_path), "PATH": os.environ["PATH"], "TANGRAM_BOOKS": url,
                   "HOME": str(tmp_path)}
        runs = [subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
                for _ in range(3)]
        assert [run.wait(300) for run in runs] == [0] * 3, url
        with monkeypatch.context() as newer:
            newer.setattr(schema, "SCHEMA", schema.SCHEMA + 1)
            newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, lambda connection: None))
            open_books(url, tmp_path).engine.dispose()
        with pytest.raises(InvalidInput, match="a later release made them"):
            open_books(url, tmp_path)
        monkeypatch.undo()
        monkeypatch.setattr(schema, "SCHEMA", schema.SCHEMA + 1)
        with open_books(url, tmp_path) as books, books.writing("test") as connection:
            schema.metadata.drop_all(connection)
        monkeypatch.undo()


def as_of_version(books: Books, version: int) -> None:
    """Takes away what later releases added to the tables; `tests/accounting/test_act_parts.py`
    does the same in SQLite with a migration that was cut off.
    """
    later = ("tenant", "restore_ns", "setup_ns")[{1: 0, 2: 1, 3: 3}[version]:]
    with books.writing("test") as connection:
        for column in later:
            connection.exec_driver_sql(f"ALTER TABLE tangram_actions DROP COLUMN {column}")
        connection.exec_driver_sql("ALTER TABLE tangram_jobs DROP COLUMN account")
        connection.exec_driver_sql(f"UPDATE tangram_books SET version = {version}")


@pytest.mark.parametrize("version", [1, 2, 3])
def test_tables_of_earlier_versions_are_migrated_alike_in_each_database(
        urls: list[str], tmp_path: Path, version: int) -> None:
    from test_books import short_history

    restored = short_history(50, BEGAN)
    for number, event in enumerate(restored):
        if isinstance(event, ev.ActionSubmitted):
            restored[number] = structs.replace(event, action=structs.replace(
                event.action, key="service:größe"))
        elif isinstance(event, ev.LeaseFinished):
            restored[number] = structs.replace(event, outcome=structs.replace(
                event.outcome, restore_ns=30 + event.lease, setup_ns=2))
    write_journal(tmp_path / "jobs/4711", restored)
    write_journal(tmp_path / "jobs/4712", short_history(50, BEGAN + 1))
    rows, told = [], []
    for url in urls:
        with open_books(url, tmp_path) as books:
            empty(books)
            import_jobs(books, tmp_path, NOW, lambda line: None)
            as_of_version(books, version)
        command = [sys.executable, "-m", "tangram_hpc", "books"]
        environ = {"TANGRAM_HOME": str(tmp_path), "PATH": os.environ["PATH"], "TANGRAM_BOOKS": url,
                   "HOME": str(tmp_path)}
        runs = [subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
                for _ in range(3)]  # each finds the earlier version, and one of them migrates it
        assert [run.wait(300) for run in runs] == [0] * 3, url
        with open_books(url, tmp_path) as books:
            rows.append(contents(books))
            told.append(answers(books, Selection()))
            with books.reading() as connection:
                assert connection.execute(select(schema.versions.c.version)).scalars().all() == [4]
                found = connection.execute(select(
                    schema.actions.c.restore_ns, schema.actions.c.setup_ns,
                    schema.actions.c.tenant)).fetchall()
            assert sorted({each.restore_ns for each in found}) == [0, *range(31, 81)], url
            setups = {2, -1} if version == 3 else {-1}
            assert {(each.setup_ns, each.tenant) for each in found} == {
                (setup, "default") for setup in setups}, url
    assert rows[0] == rows[1] == rows[2] and len(rows[0][1]) == 100
    assert told[0] == told[1] == told[2]


def test_an_importer_does_not_wait_for_ever(urls: list[str], tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    for url in urls:
        with open_books(url, tmp_path):
            monkeypatch.setattr(schema, "_WAIT_S", 1)
        with open_books(url, tmp_path) as books, open_books(url, tmp_path) as other:
            with books.writing("job 1"), pytest.raises(
                    TangramError, match=r"has taken 1 s|locked"), other.writing("job 1"):
                pass
            with other.writing("job 1"):
                pass
        monkeypatch.undo()


def test_a_number_that_is_too_large_is_refused_by_each_database(urls: list[str], tmp_path: Path
                                                                ) -> None:
    for url in urls:
        with (open_books(url, tmp_path) as books, pytest.raises(schema.ValueRefused),
              books.writing("test") as connection):
            connection.execute(schema.jobs.insert().values(
                {c.name: 2**63 if c.name == "held_ns" else 1 if c.type.python_type is int else ""
                 for c in schema.jobs.columns}))


def test_a_server_that_is_gone_is_told_in_one_line(tmp_path: Path) -> None:
    for url in (f"postgresql://u@/d?host={tmp_path}", "mariadb://u@127.0.0.1:1/d"):
        with pytest.raises(TangramError) as error:
            open_books(url, tmp_path)
        assert str(error.value).startswith("books ") and "\n" not in str(error.value)
