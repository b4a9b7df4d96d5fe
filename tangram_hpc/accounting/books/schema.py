"""The tables of the books, and the way to a database that has them.

A database says in the table `tangram_books` which version its tables have. `open_books` makes
tables that are missing, brings those of an earlier version to this one, and refuses those of a
later one. Texts compare byte by byte in every database, so that the same question has the same
answer. A user's password never stands in a setting: PostgreSQL's driver reads `~/.pgpass`, and
MariaDB's `~/.my.cnf`.

What one job wrote is replaced in one transaction, and a lock with the job's name is held meanwhile
(`Books.writing`), so importers may run side by side. SQLite keeps its rollback journal: its
write-ahead log does not work on the shared file systems where home folders are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DataError, OperationalError, SQLAlchemyError

from ...domain.tenant import DEFAULT_TENANT
from ...errors import InvalidInput, TangramError, how_to_install
from ..flat import COLUMNS
from .stored_record import unpack_record

SCHEMA = 4
FILE = "books.sqlite"
_DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql",
            "mariadb": "mariadb+pymysql"}
_WAIT_S = 600  # a journal of a million actions is imported within this time
_LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL's SQLSTATE
_BINARY = "utf8mb4_nopad_bin"
_TEXT = Text().with_variant(mysql.MEDIUMTEXT(collation=_BINARY), "mysql", "mariadb")
_NAME = String(255).with_variant(mysql.VARCHAR(255, collation=_BINARY), "mysql", "mariadb")
_BYTES = LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")

metadata = MetaData()
versions = Table("tangram_books", metadata, Column("version", Integer, nullable=False))
# One row for each job. `name` and `began_ns` identify it: the name of its folder without `~N`, and
# the time of its journal's first event. `mark` says how far its journals were read.
jobs = Table(
    "tangram_jobs", metadata,
    Column("id", Integer, primary_key=True),
    Column("name", _NAME, nullable=False),
    Column("began_ns", BigInteger, nullable=False),
    Column("mark", _TEXT, nullable=False),
    Column("last_ns", BigInteger, nullable=False),
    Column("actions", BigInteger, nullable=False),
    Column("job", _NAME, nullable=False),
    Column("user_name", _NAME, nullable=False),
    Column("state", _NAME, nullable=False),
    Column("reason", _TEXT, nullable=False),
    Column("start_ns", BigInteger, nullable=False),
    Column("end_ns", BigInteger, nullable=False),
    Column("node_names", _TEXT, nullable=False),
    Column("partition_names", _TEXT, nullable=False),
    Column("cpus", BigInteger, nullable=False),
    Column("mem_mib", BigInteger, nullable=False),
    Column("gpus", BigInteger, nullable=False),
    Column("held_ns", BigInteger, nullable=False),
    Column("cpu_ns", BigInteger, nullable=False),
    Column("account", _NAME, nullable=False),
    UniqueConstraint("name", "began_ns"),
)
# One row for each attempt of an action. `run` counts them from 1, and `last` is 1 for the last one.
actions = Table(
    "tangram_actions", metadata,
    Column("job_id", Integer, ForeignKey(jobs.c.id), primary_key=True, autoincrement=False),
    Column("action", BigInteger, primary_key=True, autoincrement=False),
    Column("run", Integer, primary_key=True, autoincrement=False),
    Column("last", Integer, nullable=False),
    *(Column(c.name, BigInteger if c.kind is int else _TEXT, nullable=False) for c in COLUMNS),
    Column("record", _BYTES, nullable=False),
    sqlite_with_rowid=False,
)


def _add_columns(connection: Connection, values: dict[str, str], table: Table = actions) -> None:
    """Adds columns to a table, each with the SQL of its value in the rows that are there.

    A migration that was interrupted may have added some of them already: MariaDB commits each
    ALTER by itself.
    """
    there = {column["name"] for column in inspect(connection).get_columns(table.name)}
    for name, value in values.items():
        if name not in there:
            kind = table.c[name].type.compile(dialect=connection.dialect)
            connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {name} {kind} "
                                       f"NOT NULL DEFAULT {value}")


def _add_tenants(connection: Connection) -> None:
    """Adds the column of tenants, which jobs of earlier releases did not have."""
    _add_columns(connection, {"tenant": f"'{DEFAULT_TENANT}'"})


def _add_parts(connection: Connection) -> None:
    """Adds the columns of restore and set-up. Earlier releases did not measure the set-up; the
    restore of a service is in the record.
    """
    a = actions.c
    _add_columns(connection, {"restore_ns": "0", "setup_ns": "-1"})
    for job in connection.execute(select(jobs.c.id)).scalars().all():
        calls = select(a.action, a.run, a.record).where(a.job_id == job, a.service != "")
        for action, run, record in connection.execute(calls).all():
            outcome = unpack_record(record, "", "").outcome
            if outcome is not None and outcome.restore_ns:
                connection.execute(update(actions).where(
                    a.job_id == job, a.action == action, a.run == run).values(
                    restore_ns=outcome.restore_ns))


def _add_accounts(connection: Connection) -> None:
    """Adds the column of Slurm accounts. Journals of earlier releases do not name any."""
    _add_columns(connection, {"account": "''"}, jobs)


# entry N brings tables of version N + 1 to version N + 2
MIGRATIONS: tuple[Callable[[Connection], None], ...] = (
    _add_tenants, _add_parts, _add_accounts)


class ValueRefused(TangramError):
    """The database refuses a value, such as a number that is too large for its column."""


class Books:
    """A database with the tables of this module; use it as a context manager.

    Attributes:
        name: its URL without a password and without options, for messages.
        engine: SQLAlchemy's engine.
    """

    def __init__(self, url: URL) -> None:
        self.name = url.set(query={}).render_as_string(hide_password=True)
        self.engine = _engine(url)

    def __enter__(self) -> Books:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Opens a transaction whose queries all see the same state.

        While it is open, nobody can write to an SQLite file: end it before anything is printed.
        """
        with self._told(), self.engine.connect() as connection:
            if self.engine.dialect.name != "sqlite":
                connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection

    @contextmanager
    def writing(self, what: str) -> Iterator[Connection]:
        """Opens a transaction, alone among all that write `what`; an exception undoes it."""
        with self._told(), self.engine.connect() as connection:
            connection.execution_options(tangram_write=True)
            with _alone(connection, what), connection.begin():
                yield connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Makes one line of what the database or its driver says."""
        try:
            yield
        except (SQLAlchemyError, OverflowError) as error:
            said = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            kind = ValueRefused if isinstance(error, DataError | OverflowError) else TangramError
            raise kind(f"books {self.name}: {said}") from error


@contextmanager
def _alone(connection: Connection, what: str) -> Iterator[None]:
    """Waits until no other transaction writes `what`. SQLite has one writer at a time anyway."""
    number = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "big", signed=True)
    kind, got = connection.dialect.name, True
    if kind == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_WAIT_S}s'")
        try:
            connection.exec_driver_sql("SELECT pg_advisory_lock(%s)", (number,))
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", "") != _LOCK_NOT_AVAILABLE:
                raise
            got = False
    elif kind in ("mysql", "mariadb"):
        got = connection.exec_driver_sql("SELECT GET_LOCK(%s, %s)", (
            f"tangram-books{number}", _WAIT_S)).scalar() == 1
    if not got:
        raise TangramError(f"books: another import of {what} has taken {_WAIT_S} s; try again")
    connection.rollback()  # the lock stays, and the transaction begins after it
    try:
        yield
    finally:
        if kind == "postgresql":
            connection.exec_driver_sql("SELECT pg_advisory_unlock(%s)", (number,))
        elif kind in ("mysql", "mariadb"):
            connection.exec_driver_sql("SELECT RELEASE_LOCK(%s)", (f"tangram-books{number}",))
        connection.rollback()


def open_books(setting: str, home: Path) -> Books:
    """Returns the books, whose tables have this release's version.

    Args:
        setting: a URL such as `postgresql://host/database`; empty for an SQLite file.
        home: `$TANGRAM_HOME`, where that file is.

    Raises:
        InvalidInput: the URL is wrong, its driver is missing, or a later release made the tables.
        TangramError: the database cannot be reached.
    """
    try:
        url = make_url(setting) if setting else URL.create("sqlite", database=str(home / FILE))
        url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
        if not setting:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if url.get_backend_name() == "sqlite":
            if url.database in (None, "", ":memory:"):
                raise InvalidInput(f"setting `books`: {setting} names no file; write "
                                   "sqlite:////PATH/books.sqlite")
            Path(url.database).touch(mode=0o600)
        books = Books(url)
    except ModuleNotFoundError as error:
        remedy = (how_to_install("books") if url.drivername in _DRIVERS.values() else
                  "write postgresql://, mariadb:// or mysql://, whose drivers the extra `books` "
                  "installs, or sqlite:///")
        raise InvalidInput(f"setting `books`: {error.name} is not installed: {remedy}") from None
    except (SQLAlchemyError, ValueError) as error:
        raise InvalidInput(f"setting `books`: {error}") from None
    except OSError as error:
        raise InvalidInput(f"books {url.database}: {error.strerror}") from None
    _prepare(books)
    return books


def _engine(url: URL) -> Engine:
    kind, options = url.get_backend_name(), dict[str, Any]()
    if kind == "sqlite":
        options["connect_args"] = {"timeout": _WAIT_S}
    else:
        # repeatable reads would lock the gaps between jobs while rows are inserted
        options["isolation_level"] = "READ COMMITTED"
        own = Path("~/.my.cnf").expanduser()
        if kind in ("mysql", "mariadb") and own.is_file():
            options["connect_args"] = {"read_default_file": str(own)}
    engine = create_engine(url, **options)
    if kind == "sqlite":
        # The driver begins no transaction before a query, and none that writes at once.
        event.listen(engine, "connect", _begin_by_hand)
        event.listen(engine, "begin", _begin)
    return engine


def _begin_by_hand(connection: Any, _: object) -> None:
    connection.isolation_level = None


def _begin(connection: Connection) -> None:
    write = connection.get_execution_options().get("tangram_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _prepare(books: Books) -> None:
    """Makes or migrates the tables, unless they have this version."""
    with books.reading() as connection:
        if _version(connection) == SCHEMA:
            return
    with books.writing("schema") as connection:
        version = _version(connection)
        if version > SCHEMA:
            raise InvalidInput(f"books {books.name}: a later release made them (version {version}, "
                               f"this release knows {SCHEMA}); use that release")
        if not version:
            metadata.create_all(connection)
            connection.execute(insert(versions).values(version=SCHEMA))
            return
        for migrate in MIGRATIONS[version - 1 : SCHEMA - 1]:
            migrate(connection)
        connection.execute(update(versions).values(version=SCHEMA))


def _version(connection: Connection) -> int:
    """Returns the version of a database's tables; 0 if there are none."""
    if not inspect(connection).has_table(versions.name):
        return 0
    return connection.execute(select(versions.c.version)).scalar() or 0
