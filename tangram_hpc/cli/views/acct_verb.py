"""`tangram acct`: prints a row for each action of a job, with sacct's column names.

The rows are folded from the job's journal, so that they are available during the job and after it,
or read from the books, which hold many jobs. No broker is asked, but Slurm's accounting is, once,
when rows are about jobs that have ended: only it knows when Slurm ended them. With `-X` the rows
are jobs, with `--by` groups of actions, with `--held` allocations, with `--savings` other ways
to run the same actions; with `--comment` a summary becomes the Comment of the Slurm job.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..helpers import acct_jobs, acct_table, ids, row_choice
from ..helpers.next_verb import hint
from ..helpers.printable import printable
from ..helpers.table import fit

if TYPE_CHECKING:
    from ...accounting.books.importing import AskSpans
    from ...accounting.fields import Field
    from ...accounting.roll_up import RollUpRow
    from ...accounting.selection import Selection
    from ..helpers.acct_jobs import AcctJob

_BY = ("name", "trajectory", "session", "service", "endpoint", "user", "tenant", "hour",
       "bucket")


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser(
        "acct", help="print the resources that each action of a job used",
        description="Prints a row for each action, or for each job, with the options and columns "
                    "that sacct has for the same.")
    p.add_argument("-j", "--jobs", type=ids.jobs, default=[], metavar="ID[,ID...]",
                   help="ids of jobs, or of actions such as 4711.2.17 (default: the last job; with "
                        "-S, -E, -a, -A or -u: all jobs)")
    p.add_argument("--books", action="store_true",
                   help="read the books, into which changed journals are imported first, and not "
                        "the journals (default: all of your jobs)")
    p.add_argument("-X", "--allocations", action="store_true",
                   help="print one row for each job instead of its actions")
    p.add_argument("--savings", action="store_true",
                   help="print what the same actions would have held and needed otherwise, "
                        "simulated from the records of each job: with reservations, first come "
                        "first served, with GPUs for each service alone, and on a smaller "
                        "allocation")
    p.add_argument("--by", choices=_BY, metavar="|".join(_BY),
                   help="print a row for each group of actions, with counts, times and hours")
    p.add_argument("-D", "--duplicates", action="store_true",
                   help="print a row for each attempt of an action, and not only the last")
    p.add_argument("--sacct", action="store_true",
                   help="print the row of the job above those of its actions, and all figures as "
                        "sacct writes them, for programs that read sacct")
    row_choice.add(p)
    acct_table.add(p)
    p.add_argument("--json", action="store_true",
                   help='print one JSON object, {"actions": [...]}; with -X {"jobs": [...]}, with '
                        '--by {"by": ..., "groups": [...]}, with --savings {"savings": [...]}')
    p.add_argument("--held", action="store_true",
                   help="print a row per allocation instead: the core-hours that it held and used")
    p.add_argument("--comment", action="store_true",
                   help="write a summary into the Comment of the Slurm job, and print it")
    p.add_argument("-e", "--helpformat", action="store_true",
                   help="list the columns that --format knows, with --by those of groups, and with "
                        "--savings those of savings")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Reads journals or books, and prints the rows; returns the exit status."""
    from ...accounting.fields import FIELDS
    from ...accounting.roll_up import ROLL_UP_FIELDS
    from ...errors import InvalidInput

    if args.savings:
        return _savings(args)
    if args.helpformat:
        for f in ROLL_UP_FIELDS if args.by else FIELDS:
            print(f"{f.name:<14} {f.about}")
        return 0
    if args.by and (args.allocations or args.sacct or args.duplicates):
        raise InvalidInput("--by: it adds up the attempts of all actions, and takes no -X, -D or "
                           "--sacct")
    columns, selection = _columns(args), row_choice.selection(args)
    if args.held or args.comment:
        _refuse_what_does_not_apply(args)
        return _of_one_job(args)
    if args.books:
        return _print_books(args, columns, selection)
    every = bool(args.starttime or args.endtime or args.user or args.accounts
                 or args.allusers)
    named = args.jobs or acct_jobs.jobs_in_question(every)
    left_out = acct_jobs.say_closed() if every and not args.jobs else []
    tolerant = not args.jobs and len(named) != 1
    jobs = acct_jobs.from_journals(named, args.allocations or args.sacct,
                                   args.duplicates or args.by, selection, _ask_spans(args),
                                   left_out if tolerant else None)
    if args.by:
        _print_groups(args, columns, _roll_up(args.by, jobs))
    else:
        _print_jobs(args, columns, jobs, selection)
    return 1 if left_out else 0


def _refuse_what_does_not_apply(args: argparse.Namespace) -> None:
    """Raises InvalidInput for an option that chooses rows, beside `--held` or `--comment`, which
    are about a whole job. Its figures would be taken for those of the rows that were meant.
    """
    from ...errors import InvalidInput

    for option in ("allocations", "by", "duplicates", "sacct", "starttime", "endtime", "state",
                   "nodelist", "partition", "name", "user", "accounts", "allusers"):
        if getattr(args, option):
            raise InvalidInput(f"--{'held' if args.held else 'comment'}: it is about one whole "
                               f"job, which -j names, and takes no --{option}")


def _savings(args: argparse.Namespace) -> int:
    """Does `--savings`."""
    from ...errors import InvalidInput
    from ..helpers.job_savings import SAVINGS_FIELDS, columns, print_savings

    if args.helpformat:
        for f in SAVINGS_FIELDS:
            print(f"{f.name:<14} {f.about}")
        return 0
    for option in ("by", "duplicates", "sacct", "books", "held", "comment", "starttime", "endtime",
                   "state", "nodelist", "partition", "name", "user", "accounts", "allusers",
                   "brief", "long"):
        if getattr(args, option):
            raise InvalidInput(f"--savings: it simulates whole jobs from their journals, and takes "
                               f"no --{option}")
    if any(one.action for one in args.jobs):
        raise InvalidInput("--savings: it is about whole jobs; name jobs without an action")
    named = args.jobs or acct_jobs.jobs_in_question(every=False)
    return print_savings(args, list(dict.fromkeys(one.job for one in named)),
                         columns(args.format))


def _ask_spans(args: argparse.Namespace) -> AskSpans:
    """Returns what asks Slurm's accounting. Nothing does for a program that called us as sacct: it
    may find us under that name, and Slurm's accounting would be ourselves.
    """
    from ..helpers.accounted_spans import ask_spans

    return (lambda folders: {}) if args.sacct else ask_spans


def _print_books(args: argparse.Namespace, columns: list[tuple[Field, int]], selection: Selection
                 ) -> int:
    """Imports what has changed, and prints the rows from the books; returns 1 if a job in question
    could not be imported.
    """
    from dataclasses import replace

    from ...accounting.books.query import stored_jobs, stored_roll_up
    from ...config.user_name import user_name
    from ..helpers.current_books import current_books

    with current_books() as (books, done):
        asked = {one.job for one in args.jobs}
        lost = [name for name in done.lost
                if not asked or asked & {name, name.partition("@")[0]}]
        if not (args.user or args.accounts or args.allusers or args.jobs):
            selection = replace(selection, users=frozenset({user_name()}))
        if args.by and not any(one.action for one in args.jobs):
            with books.reading() as connection:
                found = stored_jobs(connection, selection, {one.job for one in args.jobs})
                groups = stored_roll_up(connection, found, selection, args.by)
            _print_groups(args, columns, groups)
            return 1 if lost else 0
        with contextlib.closing(acct_jobs.from_books(
                books, args.jobs, args.duplicates or args.by, selection)) as jobs:
            if args.by:
                _print_groups(args, columns, _roll_up(args.by, jobs))
            else:
                _print_jobs(args, columns, jobs, selection)
    return 1 if lost else 0


def _roll_up(by: str, jobs: Iterable[AcctJob]) -> list[RollUpRow]:
    """Returns the groups of actions; one job after the other is read and forgotten."""
    from ...accounting.roll_up import RollUp

    total = RollUp(by)
    for job in jobs:
        for attempt in job.attempts():
            total.add_attempt(attempt)
    return total.rows()


def _print_groups(args: argparse.Namespace, columns: list[tuple[Field, int]],
                  groups: list[RollUpRow]) -> None:
    if args.json:
        acct_table.print_json("groups", (row.to_json() for row in groups), {"by": args.by})
    else:
        acct_table.print_rows(args, columns, groups)


def _print_jobs(args: argparse.Namespace, columns: list[tuple[Field, int]],
                jobs: Iterable[AcctJob], selection: Selection) -> None:
    from dataclasses import asdict

    from ...accounting.fields import as_json

    if args.json and args.allocations:
        acct_table.print_json("jobs", (asdict(job.row) for job in jobs
                                       if job.row is not None and selection.wants_job(job.row)))
    elif args.json:
        acct_table.print_json("actions", (as_json(r) for job in jobs for r in job.attempts()))
    else:
        acct_table.print_rows(args, columns, _rows(args, jobs, selection))
        if not (args.parsable or args.parsable2 or args.noheader):
            hint("`--by name` adds up classes of actions; `tangram report` draws them")


def _rows(args: argparse.Namespace, jobs: Iterable[AcctJob], selection: Selection
          ) -> Iterator[Any]:
    """Yields the rows to print. With `--sacct` a job has a row if one of its actions has, or if it
    had no actions.
    """
    for job in jobs:
        if args.allocations:
            if job.row is not None and selection.wants_job(job.row):
                yield job.row
        elif args.sacct:
            kept = list(job.attempts())
            if kept or job.empty:
                yield job.row
            yield from kept
        else:
            yield from job.attempts()


def _columns(args: argparse.Namespace) -> list[tuple[Field, int]]:
    from ...accounting.fields import BRIEF, DEFAULT, FIELDS, OF_JOBS, choose_fields
    from ...accounting.roll_up import ROLL_UP_DEFAULT, ROLL_UP_FIELDS

    if args.by:
        return choose_fields(args.format or ROLL_UP_DEFAULT, ROLL_UP_FIELDS)
    if args.format or args.brief or args.long or args.allocations:
        usual = BRIEF if args.brief else OF_JOBS
        if args.long:
            usual = ",".join(f.name for f in FIELDS)
        return choose_fields(args.format or usual)
    return choose_fields(os.environ.get("TANGRAM_ACCT_FORMAT") or DEFAULT,
                         source="TANGRAM_ACCT_FORMAT")


def _of_one_job(args: argparse.Namespace) -> int:
    """Does `--held` and `--comment`."""
    from ...accounting.record import fold
    from ...accounting.summary import summary
    from ...errors import InvalidInput
    from ...storage.journal_segments import read_journals
    from ...storage.rundir import job_dir

    if args.books:
        raise InvalidInput("--books: --held and --comment read the journal of one job")
    named = args.jobs or acct_jobs.jobs_in_question(every=False)
    if len({one.job for one in named}) > 1:
        raise InvalidInput("--jobs: --held and --comment take one job only; name one")
    job = named[0].job
    return _held(job, args.json) if args.held else _comment(
        job, summary(fold(read_journals(job_dir(os.environ, job)))))


def _held(job: str, as_json: bool) -> int:
    """Prints the allocations; NCPUS is the number of CPUs that an allocation lends."""
    from dataclasses import asdict

    from ...accounting.held_usage import held, total
    from ...storage.journal_segments import read_journals
    from ...storage.rundir import job_dir
    from ..helpers.accounted_spans import ask_spans

    folder = job_dir(os.environ, job)
    rows = held(read_journals(folder), ask_spans([folder]).get(folder) or ())
    held_ns, used_ns = total(rows)
    if as_json:
        print(json.dumps({
            "allocations": [{name: value for name, value in asdict(r).items() if "gpu" not in name}
                            | {"held_ns": r.held_ns} for r in rows],  # GPUs: `tangram report`
            "held_core_h": held_ns / 3600e9, "used_core_h": used_ns / 3600e9}))
        return 0
    print(f"{'JobID':<12} {'Name':<12} {'NodeList':<20} {'NCPUS':>6} {'Held s':>8} "
          f"{'Held core-h':>11} {'Used core-h':>11} {'Used':>5}  Why it ended")
    for r in rows:
        share = f"{r.used_ns / r.held_ns:.0%}" if r.held_ns else "-"
        print(f"{r.job or '-':<12} {r.name or ('own' if r.own else ''):<12} "
              f"{fit(','.join(r.nodes), -20)} {r.cpus:>6} "
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
