"""What is asked of Slurm's accounting about the ends of jobs, and what becomes of its answers.

A program in the place of sacct plays the history (`tests/slurm/test_slurm_held_time.py` asks the
real one).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.books_rig import BEGAN, write_journal

from tangram_hpc.accounting.books.importing import import_jobs
from tangram_hpc.accounting.books.query import stored_jobs
from tangram_hpc.accounting.books.schema import open_books
from tangram_hpc.accounting.selection import Selection
from tangram_hpc.cli.helpers.accounted_spans import ask_spans
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.slurm import JobSpan
from tangram_hpc.storage.identity import JobStart, write_starts

SECOND = 10**9
# It answers from `rows`; it is away for the jobs in `away`; and it tells how many jobs were asked.
SACCT = """#!{python} -IS
import json, pathlib, sys
here = pathlib.Path(__file__).parent
jobs = sys.argv[sys.argv.index("-j") + 1].split(",")
names = sys.argv[sys.argv.index("-o") + 1].split(",")
with open(here / "asked", "a") as asked:
    print(len(jobs), file=asked)
if set(jobs) & set(json.loads((here / "away").read_text())):
    sys.exit("sacct: error: slurm_persist_conn_open: Connection refused")
for row in json.loads((here / "rows").read_text()):
    print("|".join(str(row[name]) for name in names))
"""


class Accounting:
    """A program `sacct` in a folder, and what it answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "sacct").write_text(SACCT.replace("{python}", sys.executable))
        (folder / "sacct").chmod(0o755)
        self.set([])

    def set(self, rows: Sequence[tuple[str, str, int, int, int] |
                                 tuple[str, str, int, int, int, str]],
            away: list[str] | None = None) -> None:
        """Sets the rows; those without a state are of jobs that are COMPLETED."""
        names = ("JobIDRaw", "JobID", "Submit", "Start", "End", "State")
        (self.folder / "rows").write_text(json.dumps(
            [dict(zip(names, (*row, "COMPLETED")[:6], strict=True)) for row in rows]))
        (self.folder / "away").write_text(json.dumps(away or []))

    def asked(self) -> list[int]:
        """How many jobs each call asked about."""
        return list(map(int, (self.folder / "asked").read_text().split()))


@pytest.fixture
def accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Accounting:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return Accounting(tmp_path / "bin")


def a_job(home: Path, job: str, submitted: int = 7) -> Path:
    folder = home / "jobs" / job
    folder.mkdir(parents=True)
    write_starts(folder, [JobStart("c", job, submitted, 0)])
    return folder


def test_elements_of_arrays_and_components_are_found_by_the_ids_of_the_broker(
        tmp_path: Path, accounting: Accounting) -> None:
    """The last element of an array has the array's own id as its raw id."""
    accounting.set([("127", "123_4", 7, 10, 20), ("123", "123_5", 7, 11, 21),
                    ("200", "200+0", 7, 12, 22), ("201", "200+1", 7, 13, 23)])
    element, last, het = (a_job(tmp_path, job) for job in ("127", "123", "200"))
    spans = {folder: [(span.job, span.start_ns // SECOND, span.end_ns // SECOND)
                      for span in found or ()]
             for folder, found in ask_spans([element, last, het]).items()}
    assert spans == {element: [("127", 10, 20)], last: [("123", 11, 21)],
                     het: [("200+0", 12, 22), ("200+1", 13, 23)]}


def test_a_job_that_has_lost_nodes_held_nodes_until_its_end(
        tmp_path: Path, accounting: Accounting) -> None:
    """Accounting has a row for each size that the job had, with the time of the loss as its submit
    time; rows of a later job with the same id are no part of it."""
    accounting.set([("9", "9", 7, 10, 20, "RESIZING"), ("9", "9", 20, 20, 30, "RESIZING"),
                    ("9", "9", 30, 30, 40, "COMPLETED"), ("9", "9", 90, 90, 99, "COMPLETED")])
    folder = a_job(tmp_path, "9")
    assert ask_spans([folder])[folder] == [JobSpan("9", 7, 10 * SECOND, 40 * SECOND)]


def test_many_jobs_are_asked_in_pieces_and_again_after_a_piece_without_an_answer(
        tmp_path: Path, accounting: Accounting) -> None:
    jobs = [str(number) for number in range(1000, 2201)]
    folders = [a_job(tmp_path, job) for job in jobs]
    rows = [(job, job, 7, 10, 20) for job in jobs]
    accounting.set(rows, away=["1600"])
    found = ask_spans(folders)
    assert accounting.asked() == [500, 500]
    assert [found[folder] for folder in folders] == [
        [JobSpan(job, 7, 10 * SECOND, 20 * SECOND)] for job in jobs[:500]] + [None] * 701
    accounting.set(rows)
    assert all(ask_spans(folders).values()) and accounting.asked()[2:] == [500, 500, 201]


def test_books_ask_again_about_a_job_until_accounting_has_answered(
        tmp_path: Path, accounting: Accounting) -> None:
    write_journal(a_job(tmp_path, "4711"), [
        ev.BrokerStarted(BEGAN, "4711", "elastic", "none", "me"),
        ev.BrokerStopped(BEGAN + SECOND, "done")])
    began = BEGAN // SECOND
    rows = [("4711", "4711", 7, began, began + 60)]
    with open_books("", tmp_path) as books:
        def import_one() -> tuple[int, int]:
            report = import_jobs(books, tmp_path, BEGAN * 2, pytest.fail, ask_spans)
            with books.reading() as connection:
                (job,) = stored_jobs(connection, Selection())
            return report.read, job.row.end_ns

        accounting.set(rows, away=["4711"])
        assert [import_one(), import_one()] == [(1, BEGAN + SECOND)] * 2
        accounting.set(rows)
        end = BEGAN + 60 * SECOND
        assert [import_one(), import_one()] == [(1, end), (0, end)]
