"""Folds the journals of jobs into the books.

Of each job the books keep a mark: the sizes and times of its journals when they were read. A job
whose mark is the same is not read again. The rows of any other job are replaced in one transaction:
an import that is cut off has changed nothing, and a second import of the same journals writes the
same rows. Rows are never lost: where the journals have become shorter than what was read of them
before, or are damaged, the rows stay as they are and a line says so. A job whose folder is gone
stays too.

Memory is that of the actions that are open: an action whose client has acknowledged the result will
never change, so it is written and dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from ...domain import event as ev
from ...domain.slurm import JobSpan
from ...domain.states import ENDED
from ...errors import InvalidInput
from ...storage.job_folders import closed_folders, is_served, paths_of_jobs
from ...storage.journal import torn_bytes
from ...storage.journal_segments import JobJournal, journals
from ..flat import COLUMNS, storable
from ..job_row import JobFold, JobRow
from ..record import ActionRecord
from ..starts import without_gaps
from .schema import FILE, Books, ValueRefused, actions, jobs
from .stored_record import pack_record

_ROWS = 3  # part of each mark; a release that folds to other rows has another number
_BATCH = 2000  # actions that are written together
_VALUES = [column.value for column in COLUMNS]
_NAMES = [column.name for column in actions.columns]


@dataclass
class ImportReport:
    """What an import did.

    Attributes:
        read: jobs that were read.
        unchanged: jobs that were as the books have them.
        rows: rows of actions that were written.
        lost: the names of the jobs that could not be read, one for each folder.
    """

    read: int = 0
    unchanged: int = 0
    rows: int = 0
    lost: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """How many jobs could not be read."""
        return len(self.lost)

    def to_json(self) -> dict[str, int]:
        """Returns the counts by their names."""
        return {"read": self.read, "unchanged": self.unchanged, "failed": self.failed,
                "rows": self.rows}


# Takes folders of jobs, and returns what Slurm's accounting says of them (`accounted_spans`).
AskSpans = Callable[[Sequence[Path]], Mapping[Path, Sequence[JobSpan] | None]]


def import_jobs(books: Books, home: Path, now_ns: int, say: Callable[[str], None],
                ask_spans: AskSpans = lambda folders: {}) -> ImportReport:
    """Imports all jobs below `$TANGRAM_HOME` that have changed.

    A job that has just ended, and whose end Slurm's accounting does not have yet, is imported with
    the end of its broker, and once more by the next import. So is every job about which accounting
    did not answer.

    Args:
        books: the database.
        home: `$TANGRAM_HOME`.
        now_ns: the present time.
        say: takes a line for the person about each job that is not whole.
        ask_spans: asks Slurm's accounting about the jobs that have changed; called at most once.

    Raises:
        InvalidInput: the folder of all jobs cannot be read.
    """
    report, marks, changed = ImportReport(), _marks(books), list[tuple[Path, bool, str]]()
    for folder, why_closed in closed_folders(home).items():
        report.lost.append(_name(folder))
        say(f"job {folder.name}: its folder {folder} cannot be read ({why_closed}). The books keep "
            "what they have of it")
    for folder in _folders(home):
        served = is_served(folder)
        mark = _mark(folder, served)
        if mark is None:
            continue  # it was removed at this moment
        if mark in marks:
            report.unchanged += 1
            if served:
                _still_runs(books, mark, now_ns)
            continue
        changed.append((folder, served, mark))
    told = ask_spans([folder for folder, served, _ in changed if not served]) if changed else {}
    for folder, served, mark in changed:
        spans = told.get(folder, ())
        try:
            rows = _import_job(books, folder, "" if spans is None else mark, served, now_ns,
                               spans or ())
        # events of a repaired journal may lack those they build on
        except (InvalidInput, ValueRefused, LookupError, AssertionError) as error:
            report.lost.append(_name(folder))
            why = error if isinstance(error, InvalidInput | ValueRefused) else (
                f"job {folder.name}: the events of its journal do not fit together ({error!r})")
            say(f"{why}. The books keep what they have of job {folder.name}")
            continue
        if rows is None:
            continue
        report.read += 1
        report.rows += rows
        if not served and (torn := _torn(folder)):
            say(f"job {folder.name}: the last record of its journal was cut off; its {torn} bytes "
                "are left out")
    if books.engine.url.database == str(home / FILE):  # other books have jobs of other homes too
        _end_removed(books, home)
    return report


def _folders(home: Path) -> Iterator[Path]:
    """Yields the folders of all jobs, those that were moved to `~N` too."""
    for folder in paths_of_jobs(home):
        if not folder.name.startswith(".") and not folder.is_symlink() and journals(folder):
            yield folder


def _torn(folder: Path) -> int:
    """Returns how many bytes at the end of a job's journals are no whole record; 0 if the folder
    has just gone.
    """
    with suppress(InvalidInput):
        for path in journals(folder)[-1:]:
            return torn_bytes(path)
    return 0


def _marks(books: Books) -> set[str]:
    with books.reading() as connection:
        return set(connection.execute(select(jobs.c.mark)).scalars())


def _mark(folder: Path, served: bool) -> str | None:
    """Returns how far the journals of a job reach now; None if one is gone.

    Whether its broker lives is part of it: the end of a broker that is killed is in no journal.
    """
    try:
        found = [(path.name, path.stat()) for path in journals(folder)]
    except OSError:
        return None
    if not found:
        return None
    every = hashlib.sha256(repr((_ROWS, _name(folder), served, [
        (name, about.st_size, about.st_mtime_ns) for name, about in found])).encode())
    name, about = found[-1]
    return f"{name}:{about.st_size}:{every.hexdigest()[:32]}"


def _still_runs(books: Books, mark: str, now_ns: int) -> None:
    with books.writing("marks") as connection:
        connection.execute(update(jobs).where(jobs.c.mark == mark, jobs.c.state == "RUNNING")
                           .values(end_ns=now_ns))


def _end_removed(books: Books, home: Path) -> None:
    """Ends the jobs that ran when they were imported, and whose folders have been removed since."""
    running = select(jobs.c.name).where(jobs.c.state == "RUNNING")
    with books.reading() as connection:
        names = set(connection.execute(running).scalars())
    # one whose journals we may not see at the moment is not gone
    gone = names - {_name(folder) for folder in paths_of_jobs(home)
                    if not folder.is_symlink()} if names else names
    if gone:
        with books.writing("marks") as connection:
            connection.execute(update(jobs).where(
                jobs.c.name.in_(sorted(gone)), jobs.c.state == "RUNNING").values(
                state="FAILED", reason="its folder was removed while it ran", mark="",
                end_ns=jobs.c.last_ns))


def _name(folder: Path) -> str:
    """Returns the name by which the books know a job: that of its folder without `~N`."""
    return storable(folder.name.partition("~")[0].encode(errors="surrogateescape").decode(
        errors="replace"))


def _import_job(books: Books, folder: Path, mark: str, served: bool, now_ns: int,
                spans: Sequence[JobSpan]) -> int | None:
    """Replaces the rows of a job, and returns how many there are now; None if its journals have no
    event yet, so that there is no job.

    Raises:
        InvalidInput: the journals cannot be read, or have become shorter.
    """
    name = _name(folder)
    with books.writing(f"job {name}") as connection:
        events = without_gaps(JobJournal(folder).events())
        first = next(events, None)
        if first is None:
            return None
        fold = JobFold(spans)
        job_id, before_ns = _job_id(connection, name, first.at)
        connection.execute(delete(actions).where(actions.c.job_id == job_id))
        number = 0
        for batch in _batches(_settled(fold, chain([first], events))):
            number += _write(connection, job_id, batch)
        row = fold.close(served, now_ns)
        for batch in _batches(iter(fold.records.records.values())):
            number += _write(connection, job_id, batch)
        last_ns = fold.records.last_ns
        if last_ns < before_ns:
            raise InvalidInput(f"job {folder.name}: its journals are shorter than what the books "
                               "have read of them")
        count = connection.execute(select(func.count()).where(
            actions.c.job_id == job_id, actions.c.last == 1)).scalar_one()
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(
            mark=mark, last_ns=last_ns, actions=count, **_job_columns(row)))
        return number


def _job_id(connection: Connection, name: str, began_ns: int) -> tuple[int, int]:
    """Returns the number of a job in the books, which gets one if it has none, and the time of the
    last event that was read of it before.
    """
    known = connection.execute(select(jobs.c.id, jobs.c.last_ns).where(
        jobs.c.name == name, jobs.c.began_ns == began_ns)).first()
    if known is not None:
        return known.id, known.last_ns
    empty = {column.name: 0 if column.type.python_type is int else "" for column in jobs.columns
             if column.name != "id"}
    made = connection.execute(insert(jobs).values(empty | {"name": name, "began_ns": began_ns}))
    key = made.inserted_primary_key
    assert key is not None
    return key[0], 0


def _settled(fold: JobFold, events: Iterator[ev.Event]) -> Iterator[ActionRecord]:
    """Folds the events, and yields and drops the records that will not change any more."""
    records = fold.records.records
    for event in events:
        fold.add(event)
        if type(event) is ev.ActionAcknowledged:
            for action in event.actions:
                record = records.get(action)
                if record is not None and record.state in ENDED:
                    del records[action]
                    yield record


def _batches(records: Iterator[ActionRecord]) -> Iterator[list[ActionRecord]]:
    batch: list[ActionRecord] = []
    for record in records:
        batch.append(record)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _write(connection: Connection, job_id: int, records: list[ActionRecord]) -> int:
    """Writes all attempts of some records, and returns their number."""
    rows = [(job_id, record.action.id, run, int(attempt.last),
             *[value(attempt) for value in _VALUES], pack_record(attempt))
            for record in records for run, attempt in enumerate(record.attempts, 1)]
    # SQLAlchemy's own handling of the parameters would take as long as all of the rest
    statement = insert(actions).compile(dialect=connection.dialect)
    given: Any = rows if statement.positional else [dict(zip(_NAMES, row, strict=True))
                                                    for row in rows]
    try:
        with connection.begin_nested():
            connection.exec_driver_sql(str(statement), given)
    except IntegrityError:
        _replace(connection, [dict(zip(_NAMES, row, strict=True)) for row in rows])
    return len(rows)


def _replace(connection: Connection, rows: list[dict[str, Any]]) -> None:
    """Writes rows one by one. A client that submits an id again after it has acknowledged its
    result has two actions of that id; the later one counts, as in a fold of the whole journal.
    """
    for row in rows:
        if row["run"] == 1:
            connection.execute(delete(actions).where(
                actions.c.job_id == row["job_id"], actions.c.action == row["action"]))
        connection.execute(insert(actions), row)


def _job_columns(row: JobRow) -> dict[str, object]:
    return {"job": storable(row.job), "user_name": storable(row.user), "state": row.state,
            "reason": storable(row.reason), "start_ns": row.start_ns, "end_ns": row.end_ns,
            "node_names": storable(",".join(row.nodes)),
            "partition_names": storable(",".join(row.partitions)), "cpus": row.cpus,
            "mem_mib": row.mem_mib, "gpus": row.gpus, "held_ns": row.held_ns, "cpu_ns": row.cpu_ns,
            "account": storable(row.account)}
