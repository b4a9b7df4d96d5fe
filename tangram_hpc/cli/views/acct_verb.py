"""`tangram acct`: prints a row for each action of a job, with sacct's column names.

The rows are folded from the job's journal, so that they are available during the job and after it.
No broker is asked. With `-X` the rows are jobs, with `--held` allocations; with `--comment` a
summary becomes the Comment of the Slurm job.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Union

from ..helpers import ids, row_choice
from ..helpers.printable import printable

if TYPE_CHECKING:
    from ...accounting.fields import Field
    from ...accounting.job_row import JobRow
    from ...accounting.record import ActionRecord

    Row = Union[ActionRecord, JobRow]  # noqa: UP007


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "acct", help="print the resources that each action of a job used",
        description="Prints a row for each action, or for each job, with the options and columns "
                    "that sacct has for the same.")
    p.add_argument("-j", "--jobs", type=ids.jobs, default=[], metavar="ID[,ID...]",
                   help="ids of jobs, or of actions such as 4711.2.17 (default: the last job; with "
                        "-S, -E, -a or -u: all jobs)")
    p.add_argument("-X", "--allocations", action="store_true",
                   help="print one row for each job instead of its actions")
    p.add_argument("--sacct", action="store_true",
                   help="print the row of the job above those of its actions, and all figures as "
                        "sacct writes them, for programs that read sacct")
    row_choice.add(p)
    p.add_argument("-o", "--format", default="",
                   help="columns to print, such as JobID%%20,State,MaxRSS")
    p.add_argument("-b", "--brief", action="store_true", help="print JobID, State and ExitCode")
    p.add_argument("-l", "--long", action="store_true", help="print all columns")
    p.add_argument("-p", "--parsable", action="store_true",
                   help="separate the columns by |, and end each row with one")
    p.add_argument("-P", "--parsable2", action="store_true", help="separate the columns by |")
    p.add_argument("--delimiter", default="|", metavar="TEXT",
                   help="what separates the columns with -p and -P (default: |)")
    p.add_argument("-n", "--noheader", action="store_true", help="print no header")
    p.add_argument("--json", action="store_true",
                   help='print one JSON object, {"actions": [...]}; with -X {"jobs": [...]}')
    p.add_argument("--held", action="store_true",
                   help="print a row per allocation instead: the core-hours that it held and used")
    p.add_argument("--comment", action="store_true",
                   help="write a summary into the Comment of the Slurm job, and print it")
    p.add_argument("-e", "--helpformat", action="store_true",
                   help="list the columns that --format knows")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Folds the journals and prints the rows; returns the exit status."""
    from ...accounting.fields import FIELDS, as_json
    from ...accounting.record import fold
    from ...accounting.summary import summary
    from ...errors import InvalidInput
    from ...storage.journal_segments import read_journals
    from ...storage.rundir import job_dir

    if args.helpformat:
        for f in FIELDS:
            print(f"{f.name:<14} {f.about}")
        return 0
    columns, keep = _columns(args), row_choice.chooser(args)
    named = args.jobs or _jobs_in_question(args)
    if args.held or args.comment:
        if len({one.job for one in named}) > 1:
            raise InvalidInput("--jobs: --held and --comment take one job only; name one")
        job = named[0].job
        return _held(job, args.json) if args.held else _comment(
            job, summary(fold(read_journals(job_dir(os.environ, job)))))
    jobs = _folded(named, bool(args.jobs) or len(named) == 1, args.allocations or args.sacct)
    if args.json:
        return _print_json([as_json(r) for records, _ in jobs for r in records if keep(r)],
                           [row for _, row in jobs if row is not None and keep(row)]
                           if args.allocations else None)
    _print_rows(args, columns, _rows(args, jobs, keep))
    return 0


def _rows(args: argparse.Namespace, jobs: Sequence[tuple[list[ActionRecord], JobRow | None]],
          keep: Callable[[Row], bool]) -> list[Row]:
    """Returns the rows to print. With `--sacct` a job has a row if one of its actions has, or if it
    had no actions.
    """
    rows: list[Row] = []
    for records, row in jobs:
        kept = [] if args.allocations else [record for record in records if keep(record)]
        if row is not None and (keep(row) if args.allocations else kept or not records):
            rows.append(row)
        rows += kept
    return rows


def _columns(args: argparse.Namespace) -> list[tuple[Field, int]]:
    from ...accounting.fields import BRIEF, DEFAULT, FIELDS, OF_JOBS, choose_fields

    usual = OF_JOBS if args.allocations else os.environ.get("TANGRAM_ACCT_FORMAT") or DEFAULT
    if args.brief:
        usual = BRIEF
    if args.long:
        usual = ",".join(f.name for f in FIELDS)
    return choose_fields(args.format or usual)


def _jobs_in_question(args: argparse.Namespace) -> list[ids.Named]:
    """Returns the jobs when none is named: all that are known if a time or a user is, else the
    last one.

    Raises:
        InvalidInput: no job has run here.
    """
    from ...storage.rundir import known_jobs, last_job

    last = last_job(os.environ)
    every = args.starttime or args.endtime or args.user or args.allusers
    return [ids.Named(job) for job in (known_jobs(os.environ) if every else [last])]


def _folded(named: Sequence[ids.Named], strict: bool, with_job: bool
            ) -> list[tuple[list[ActionRecord], JobRow | None]]:
    """Returns the requested records of each job, each once, and the row of the job.

    Args:
        strict: whether a journal that cannot be read is an error; else one line tells of it.
        with_job: whether the row is wanted, which costs a second fold; it is None otherwise.

    Raises:
        InvalidInput: a job, or an action of a job, is not known.
    """
    import time

    from ...accounting.job_row import fold_with_job
    from ...accounting.record import fold
    from ...errors import InvalidInput
    from ...storage.job_folders import is_served
    from ...storage.journal_segments import read_journals
    from ...storage.rundir import job_dir

    jobs = []
    for job in dict.fromkeys(one.job for one in named):
        folder = job_dir(os.environ, job)
        try:
            events = read_journals(folder)
            folded, row = (fold_with_job(events, is_served(folder), time.time_ns()) if with_job
                           else (fold(events), None))
        except InvalidInput as error:
            if strict:
                raise
            print(f"tangram: acct: {error}", file=sys.stderr)
            continue
        records, of_job = folded.records, [one for one in named if one.job == job]
        for one in of_job:
            if one.action and one.number not in records:
                raise InvalidInput(f"--jobs: job {job} had no action {one.action}; `tangram acct "
                                   f"-j {job}` prints all of its actions")
        chosen = None if any(not one.action for one in of_job) else {o.number for o in of_job}
        jobs.append(([r for number, r in records.items() if chosen is None or number in chosen],
                     row))
    return jobs


def _print_json(actions: list[dict[str, Any]], jobs: list[JobRow] | None) -> int:
    from dataclasses import asdict

    print(json.dumps({"actions": actions} if jobs is None else
                     {"jobs": [asdict(row) for row in jobs]}))
    return 0


def _print_rows(args: argparse.Namespace, columns: list[tuple[Field, int]],
                rows: Sequence[Row]) -> None:
    """Prints the rows as a table, or with a delimiter."""
    from ...accounting.fields import as_sacct
    from ...accounting.job_row import JobRow, text_of_job

    def text(field: Field, row: Row) -> str:
        found = text_of_job(field, row) if isinstance(row, JobRow) else field.text(row)
        return as_sacct(field, found) if args.sacct else found

    if args.parsable or args.parsable2:
        cut, end = args.delimiter, args.delimiter if args.parsable else ""
        escaped = "".join(f"\\x{ord(letter):02x}" for letter in cut)
        if not args.noheader:
            print(cut.join(f.name for f, _ in columns) + end)
        for row in rows:
            cells = (printable(text(f, row)) for f, _ in columns)
            print(cut.join(cell.replace(cut, escaped) for cell in cells) + end)
        return
    columns = [(f, _whole(f, w, [text(f, row) for row in rows])) for f, w in columns]
    if not args.noheader:
        print(" ".join(_fit(f.name, w) for f, w in columns))
        print(" ".join("-" * abs(w) for _, w in columns))
    for row in rows:
        print(" ".join(_fit(text(f, row), w) for f, w in columns))


def _held(job: str, as_json: bool) -> int:
    """Prints the allocations; NCPUS is the number of CPUs that an allocation lends."""
    from dataclasses import asdict

    from ...accounting.held_usage import held, total
    from ...storage.journal_segments import read_journals
    from ...storage.rundir import job_dir

    rows = held(read_journals(job_dir(os.environ, job)))
    held_ns, used_ns = total(rows)
    if as_json:
        print(json.dumps({
            "allocations": [asdict(r) | {"held_ns": r.held_ns} for r in rows],
            "held_core_h": held_ns / 3600e9, "used_core_h": used_ns / 3600e9}))
        return 0
    print(f"{'JobID':<12} {'Name':<12} {'NodeList':<20} {'NCPUS':>6} {'Held s':>8} "
          f"{'Held core-h':>11} {'Used core-h':>11} {'Used':>5}  Why it ended")
    for r in rows:
        share = f"{r.used_ns / r.held_ns:.0%}" if r.held_ns else "-"
        print(f"{r.job or '-':<12} {r.name or ('own' if r.own else ''):<12} "
              f"{_fit(','.join(r.nodes), -20)} {r.cpus:>6} "
              f"{r.span_ns / 1e9:>8.1f} {r.held_ns / 3600e9:>11.3f} "
              f"{r.used_ns / 3600e9:>11.3f} {share:>5}  {printable(r.why)}")
    print(f"{'all':<12} {'':<12} {'':<20} {'':>6} {'':>8} {held_ns / 3600e9:>11.3f} "
          f"{used_ns / 3600e9:>11.3f} {used_ns / max(1, held_ns):>5.0%}")
    return 0


def _comment(job: str, line: str) -> int:
    """Writes the Comment of the Slurm job, as the broker does when it ends.

    This also works after the job has ended.
    """
    from ...config.settings import load_config
    from ...errors import InvalidInput, TangramError
    from ...ports import SlurmRejected, SlurmTransient
    from ...slurm.choice import make_adapter

    if not job.isdecimal():
        raise InvalidInput(f"--jobs: {job!r} is not a Slurm job, so it has no Comment; name the "
                           "number of a Slurm job")
    adapter = make_adapter(load_config(os.environ).slurm, os.environ)

    async def put() -> None:
        try:
            await adapter.comment(int(job), line)
        finally:
            await adapter.close()

    try:
        asyncio.run(put())
    except (SlurmRejected, SlurmTransient) as failed:
        raise TangramError(f"job {job}: {failed}") from None
    print(line)
    return 0


def _whole(field: Field, width: int, texts: Sequence[str]) -> int:
    """Returns the width of a column. JobID is as wide as its longest value unless a width was
    requested.

    The id of an embedded run is long, and cutting it would remove the part that tells actions
    apart.
    """
    if field.name != "JobID" or width != field.width:
        return width
    return max([width, *map(len, texts)])


def _fit(text: str, width: int) -> str:
    """Fits a text into a column as sacct does: right aligned, or left aligned for a negative
    width. A text that was cut ends with `+`.
    """
    text, size = printable(text), abs(width)
    if len(text) > size:
        text = text[: size - 1] + "+"
    return text.ljust(size) if width < 0 else text.rjust(size)
