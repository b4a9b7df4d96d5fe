"""Answers questions about actions and jobs from the books.

The database chooses the rows, by the same rules as `Selection` does for rows of a journal. Rows are
read job by job and in portions, so memory does not grow with the books. A job's actions come in the
order of their submission. Sums and percentiles are computed here and not by the database, so that
every database and every journal gives the same figures.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, func, or_, select

from ...errors import InvalidInput
from ..job_row import JobRow
from ..record import ActionRecord
from ..roll_up import RollUp, RollUpRow, columns_for
from ..selection import Selection
from .schema import actions, jobs
from .stored_record import unpack_record

_PORTION = 2000  # rows that are fetched together


@dataclass(frozen=True)
class StoredJob:
    """A job in the books.

    Attributes:
        id: its number there.
        name: the name of its folder: `ID`, or `ID@CLUSTER`.
        actions: how many actions it had.
        row: its row.
    """

    id: int
    name: str
    actions: int
    row: JobRow


def stored_jobs(connection: Connection, selection: Selection, names: Collection[str] = ()
                ) -> list[StoredJob]:
    """Returns the jobs that may have rows that are wanted, those that began first at the front.

    Args:
        connection: from `Books.reading`.
        selection: what is wanted; only users, accounts and times are looked at.
        names: ids of jobs as `ID` or `ID@CLUSTER`; empty for all.

    Raises:
        InvalidInput: the books do not have one of these jobs.
    """
    query = select(jobs).where(jobs.c.end_ns >= selection.since).order_by(jobs.c.start_ns,
                                                                         jobs.c.id)
    if selection.until:
        query = query.where(jobs.c.start_ns < selection.until)
    if selection.users:
        query = query.where(jobs.c.user_name.in_(sorted(selection.users)))
    if selection.accounts:
        query = query.where(jobs.c.account.in_(sorted(selection.accounts)))
    if names:
        named = or_(jobs.c.job.in_(sorted(names)), jobs.c.name.in_(sorted(names)))
        known = {name for row in connection.execute(select(jobs.c.job, jobs.c.name).where(named))
                 for name in row}
        for name in sorted(set(names) - known):
            raise InvalidInput(f"--jobs: the books have no job {name}; `tangram acct --books -a "
                               "-X` prints those that they have")
        query = query.where(named)
    return [StoredJob(r.id, r.name, r.actions, JobRow(
        r.job, r.user_name, r.state, r.reason, r.start_ns, r.end_ns, _words(r.node_names),
        _words(r.partition_names), r.cpus, r.mem_mib, r.gpus, r.held_ns, r.cpu_ns,
        r.account))
        for r in connection.execute(query)]


def stored_records(connection: Connection, job: StoredJob, selection: Selection,
                   chosen: Collection[int] = (), duplicates: bool = False
                   ) -> Iterator[ActionRecord]:
    """Yields the actions of a job that are wanted; with `duplicates`, every attempt.

    No transaction is open while a record is handed out: printing may stop for hours, as in `less`,
    and nobody can write to an SQLite file that is read. So the order of the rows is read first, at
    16 bytes a row. A row that a new import has removed since then is left out.

    Args:
        connection: from `Books.reading`; its transaction is ended.
        job: the job.
        selection: what is wanted.
        chosen: ids of actions; empty for all.
        duplicates: whether earlier attempts are wanted too.
    """
    a, ids, runs = actions.c, array("q"), array("q")
    query = select(a.action, a.run).where(*_wanted(job, selection, chosen)).order_by(
        a.submit_ns, a.action, a.run)
    if not duplicates:
        query = query.where(a.last == 1)
    for action, run in connection.execute(query, execution_options={"yield_per": _PORTION}):
        ids.append(action)
        runs.append(run)
    connection.rollback()
    for at in range(0, len(ids), _PORTION):
        portion = ids[at : at + _PORTION]
        rows = connection.execute(select(a.action, a.run, a.last, a.record).where(
            a.job_id == job.id, a.action.in_(sorted(set(portion))))).all()
        connection.rollback()
        found = {(r.action, r.run): r for r in rows}
        for key in zip(portion, runs[at : at + _PORTION], strict=True):
            if key in found:
                record = unpack_record(found[key].record, job.row.job, job.row.user)
                record.last, record.account = found[key].last == 1, job.row.account
                yield record


def known_actions(connection: Connection, found: list[StoredJob], chosen: Collection[int]
                  ) -> set[int]:
    """Returns those of the ids `chosen` that actions of the jobs have."""
    return set(connection.execute(select(actions.c.action).where(
        actions.c.job_id.in_([job.id for job in found]),
        actions.c.action.in_(sorted(chosen)))).scalars())


def stored_roll_up(connection: Connection, found: list[StoredJob], selection: Selection, by: str
                   ) -> list[RollUpRow]:
    """Returns the rows of a `RollUp` of all attempts that are wanted. It reads the columns that it
    needs, and no records.
    """
    total = RollUp(by)
    columns = [actions.c[name] for name in columns_for(by)]
    for job in found:
        query = select(actions.c.last, *columns).where(*_wanted(job, selection))
        for last, *values in connection.execute(query, execution_options={"yield_per": _PORTION}):
            total.add(job.row.job, job.row.user, last == 1, values)
    return total.rows()


def books_size(connection: Connection) -> tuple[int, int, int]:
    """Returns how many jobs, actions and attempts the books have."""
    many, total = connection.execute(
        select(func.count(), func.coalesce(func.sum(jobs.c.actions), 0)).select_from(jobs)).one()
    rows = connection.execute(select(func.count()).select_from(actions)).scalar_one()
    return many, int(total), rows


def _wanted(job: StoredJob, s: Selection, chosen: Collection[int] = ()
            ) -> list[ColumnElement[bool]]:
    """Returns the conditions of `Selection.wants`, which must stay the same as these."""
    a = actions.c
    found = [a.job_id == job.id]
    for column, values in ((a.state, s.states), (a.name, s.names), (a.node, s.nodes),
                           (a.partition_name, s.partitions), (a.action, chosen)):
        if values:
            found.append(column.in_(sorted(values)))
    if s.since:
        ended = a.end_ns >= s.since
        found.append(or_(ended, a.end_ns == 0) if job.row.end_ns >= s.since
                     else and_(ended, a.end_ns > 0))
    if s.until:
        found.append(a.submit_ns < s.until)
    return found


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()
