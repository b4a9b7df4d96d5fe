"""Finds the jobs that `tangram acct` is asked about, in journals or in the books.

Both give the same: for each job its row, and its actions one after the other. A journal is read
only if its job can have rows that are wanted: the first record says who ran the job and since when,
and the file's time says when it was last written.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import ids

if TYPE_CHECKING:
    from ...accounting.books.importing import AskSpans
    from ...accounting.books.query import StoredJob
    from ...accounting.books.schema import Books
    from ...accounting.job_row import JobRow
    from ...accounting.record import ActionRecord
    from ...accounting.selection import Selection
    from ...errors import InvalidInput

_SKEW_NS = 600 * 10**9  # clocks of the broker's node and of the file server differ by less


@dataclass(frozen=True)
class AcctJob:
    """One job of those in question.

    Attributes:
        row: its row; None if it was not asked for.
        empty: whether it had no actions.
        attempts: returns its actions that are wanted; with `duplicates`, every attempt of them.
    """

    row: JobRow | None
    empty: bool
    attempts: Callable[[], Iterator[ActionRecord]]


def jobs_in_question(every: bool) -> list[ids.Named]:
    """Returns the jobs when none is named: all that are known, or the last one.

    Raises:
        InvalidInput: no job has run here.
    """
    from ...storage.rundir import known_jobs, last_job

    last = last_job(os.environ)
    return [ids.Named(job) for job in (known_jobs(os.environ) if every else [last])]


def say_closed() -> list[str]:
    """Tells in a line each of which folders of this user cannot be read, whose jobs are therefore
    left out; returns the names of these jobs.
    """
    from ...storage.job_folders import closed_folders
    from ...storage.rundir import tangram_home

    closed = closed_folders(tangram_home(os.environ))
    for folder, why in closed.items():
        print(f"tangram: acct: job {folder.name}: its folder {folder} cannot be read ({why})",
              file=sys.stderr)
    return [folder.name for folder in closed]


def from_journals(named: Sequence[ids.Named], with_row: bool, duplicates: bool,
                  selection: Selection, ask_spans: AskSpans = lambda folders: {},
                  left_out: list[str] | None = None) -> Iterator[AcctJob]:
    """Yields the jobs that are named, each once. A journal without an event is of no job yet.

    Args:
        named: jobs, or actions of jobs.
        with_row: whether the rows of jobs are wanted, which costs more.
        duplicates: whether every attempt of an action is wanted.
        selection: which rows are wanted.
        ask_spans: asks Slurm's accounting for the times of jobs; called once, if their rows are
            wanted.
        left_out: gets the names of the jobs whose journals cannot be read; a line on stderr says
            why for each. Jobs that cannot have wanted rows are not read then. None: a journal that
            cannot be read is an error.

    Raises:
        InvalidInput: a job, or an action of a job, is not known.
    """
    from ...accounting.job_row import fold_with_job
    from ...accounting.record import fold
    from ...errors import InvalidInput
    from ...storage.job_folders import is_served
    from ...storage.journal_segments import read_journals
    from ...storage.rundir import job_dir

    if left_out is None:
        for one in named:  # an error about one of them comes before anything is printed
            next(read_journals(job_dir(os.environ, one.job)), None)
        if len({one.job for one in named}) > 1:
            _refuse_unknown_actions(named)
    folders = {one.job: job_dir(os.environ, one.job) for one in named}
    spans = ask_spans(list(folders.values())) if with_row else {}
    for job, folder in folders.items():
        now_ns = time.time_ns()
        try:
            if left_out is not None and _has_no_rows(folder, selection):
                continue
            served, events, row = is_served(folder), read_journals(folder), None
            if with_row:
                folded, row = fold_with_job(events, served, now_ns, spans.get(folder) or ())
            else:
                folded = fold(events, served)
        except InvalidInput as error:
            if left_out is None:
                raise
            print(f"tangram: acct: {error}", file=sys.stderr)
            left_out.append(job)
            continue
        chosen = _chosen([one for one in named if one.job == job])
        for number in sorted(chosen - folded.records.keys()):
            raise _unknown_action(job, number)
        if not (folded.job or folded.records):
            continue  # its broker has written nothing yet, or was killed before
        yield AcctJob(row, not folded.records, _attempts(
            [r for number, r in folded.records.items() if not chosen or number in chosen],
            selection, now_ns if served else folded.last_ns, duplicates))


def _refuse_unknown_actions(named: Sequence[ids.Named]) -> None:
    """Raises InvalidInput for an action that its job did not have. The jobs are folded one after
    the other as their rows are printed, which is too late to find that out. O(events) for each job
    of which actions are named.
    """
    from ...domain.event import ActionSubmitted
    from ...storage.journal_segments import read_journals
    from ...storage.rundir import job_dir

    for job in dict.fromkeys(one.job for one in named):
        if chosen := _chosen([one for one in named if one.job == job]):
            for event in read_journals(job_dir(os.environ, job)):
                if isinstance(event, ActionSubmitted):
                    chosen.discard(event.action.id)
            for number in sorted(chosen):
                raise _unknown_action(job, number)


def _unknown_action(job: str, number: int) -> InvalidInput:
    from ...domain.ids import show
    from ...errors import InvalidInput

    return InvalidInput(f"--jobs: job {job} had no action {show(number)}; `tangram acct "
                        f"-j {job}` prints all of its actions")


def from_books(books: Books, named: Sequence[ids.Named], duplicates: bool, selection: Selection
               ) -> Generator[AcctJob, None, None]:
    """Yields the jobs that are named, or all, from the books; see `from_journals`.

    Raises:
        InvalidInput: the books do not have a job, or an action of a job, that is named.
    """
    from ...accounting.books.query import known_actions, stored_jobs, stored_records
    from ...domain.ids import show
    from ...errors import InvalidInput

    with books.reading() as connection:
        found = stored_jobs(connection, selection, {one.job for one in named})
        for name in dict.fromkeys(one.job for one in named):
            chosen = _chosen([one for one in named if one.job == name])
            of_name = [job for job in found if name in (job.name, job.row.job)]
            if chosen and of_name:
                for number in sorted(chosen - known_actions(connection, of_name, chosen)):
                    raise InvalidInput(f"--jobs: job {name} had no action {show(number)}; `tangram "
                                       f"acct --books -j {name}` prints all of its actions")
        connection.rollback()  # no transaction is open while rows are printed
        for job in found:
            chosen = _chosen([one for one in named if one.job in (job.name, job.row.job)])

            def attempts(job: StoredJob = job, chosen: set[int] = chosen
                         ) -> Iterator[ActionRecord]:
                return stored_records(connection, job, selection, chosen, duplicates)

            yield AcctJob(job.row, not job.actions, attempts)


def _attempts(records: list[ActionRecord], selection: Selection, end_ns: int, duplicates: bool
              ) -> Callable[[], Iterator[ActionRecord]]:
    def found() -> Iterator[ActionRecord]:
        for record in records:
            for attempt in record.attempts if duplicates else (record,):
                if selection.wants(attempt, end_ns):
                    yield attempt

    return found


def _chosen(named: Sequence[ids.Named]) -> set[int]:
    """Returns the ids of the actions that are named; empty if a whole job is."""
    return {one.number for one in named} if all(one.action for one in named) else set()


def _has_no_rows(folder: Path, selection: Selection) -> bool:
    """Returns whether a job can have no wanted rows. Reads at most the beginning of its journal."""
    from ...domain.event import BrokerStarted
    from ...storage.job_folders import is_served
    from ...storage.journal import first_events
    from ...storage.journal_segments import journals

    if not (selection.users or selection.since or selection.until):
        return False
    paths = journals(folder)
    if not paths:
        return False
    start = next((event for event in first_events(paths[0]) if isinstance(event, BrokerStarted)),
                 None)
    if start is None:
        return False
    try:
        end_ns = max(path.stat().st_mtime_ns for path in paths) + _SKEW_NS
    except OSError:
        return True  # it is removed at this moment
    if end_ns < selection.since and is_served(folder):
        end_ns = selection.since
    return not selection.may_hold(start.user, start.at, end_ns)
