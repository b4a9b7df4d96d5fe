"""`tangram acct`: prints a row for each action of a job, with sacct's column names.

The rows are folded from the job's journal, so that they are available during the job and after it.
No broker is asked. With `--held` the rows are allocations; with `--comment` a summary becomes the
Comment of the Slurm job.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .helpers import ids
from .helpers.printable import printable

if TYPE_CHECKING:
    from ..accounting.record import ActionRecord


def add(verbs: Any) -> None:
    """Adds this verb to the command line."""
    p = verbs.add_parser("acct", help="print the resources that each action of a job used")
    p.add_argument("-j", "--jobs", type=ids.jobs, default=[], metavar="ID[,ID...]",
                   help="ids of jobs, or of actions such as 4711.2.17 (default: the last job)")
    p.add_argument("-o", "--format", default="",
                   help="columns to print, such as JobID%%20,State,MaxRSS")
    p.add_argument("-P", "--parsable2", action="store_true", help="separate the columns by |")
    p.add_argument("-n", "--noheader", action="store_true", help="print no header")
    p.add_argument("-s", "--state", default="",
                   help="print only actions in these states, separated by commas")
    p.add_argument("--json", action="store_true", help='print one JSON object, {"actions": [...]}')
    p.add_argument("--held", action="store_true",
                   help="print a row per allocation instead: the core-hours that it held and used")
    p.add_argument("--comment", action="store_true",
                   help="write a summary into the Comment of the Slurm job, and print it")
    p.add_argument("-e", "--helpformat", action="store_true",
                   help="list the columns that --format knows")
    p.set_defaults(go=go)


def go(args: argparse.Namespace) -> int:
    """Folds the journal and prints the rows; returns the exit status."""
    from ..accounting.fields import DEFAULT, FIELDS, as_json, choose_fields
    from ..accounting.record import fold
    from ..accounting.summary import summary
    from ..domain.states import ActionState
    from ..errors import InvalidInput
    from ..storage.journal_segments import read_journals
    from ..storage.rundir import job_dir, last_job

    if args.helpformat:
        for f in FIELDS:
            print(f"{f.name:<14} {f.about}")
        return 0
    wanted = {s.strip().upper() for s in args.state.split(",") if s.strip()}
    for state in sorted(wanted - {s.value for s in ActionState}):
        raise InvalidInput(f"--state: {state!r} is not the state of an action; choose from "
                           f"{', '.join(s.value for s in ActionState)}")
    columns = choose_fields(args.format or os.environ.get("TANGRAM_ACCT_FORMAT") or DEFAULT)
    named = args.jobs or [ids.Named(last_job(os.environ))]
    if args.held or args.comment:
        if len({one.job for one in named}) > 1:
            raise InvalidInput("--jobs: --held and --comment take one job only; name one")
        job = named[0].job
        return _held(job, args.json) if args.held else _comment(
            job, summary(fold(read_journals(job_dir(os.environ, job)))))
    rows = [r for r in _rows(named) if not wanted or r.state.value in wanted]
    if args.json:
        print(json.dumps({"actions": [as_json(r) for r in rows]}))
        return 0
    if args.parsable2:
        if not args.noheader:
            print("|".join(f.name for f, _ in columns))
        for r in rows:
            print("|".join(printable(f.text(r)).replace("|", "\\x7c") for f, _ in columns))
        return 0
    columns = [(f, _whole(f, w, rows)) for f, w in columns]
    if not args.noheader:
        print(" ".join(_fit(f.name, w) for f, w in columns))
        print(" ".join("-" * abs(w) for _, w in columns))
    for r in rows:
        print(" ".join(_fit(f.text(r), w) for f, w in columns))
    return 0


def _rows(named: Sequence[ids.Named]) -> list[ActionRecord]:
    """Returns the records of the requested actions, job by job, each once.

    Raises:
        InvalidInput: a job, or an action of a job, is not known.
    """
    from ..accounting.record import fold
    from ..errors import InvalidInput
    from ..storage.journal_segments import read_journals
    from ..storage.rundir import job_dir

    rows = []
    for job in dict.fromkeys(one.job for one in named):
        records = fold(read_journals(job_dir(os.environ, job))).records
        of_job = [one for one in named if one.job == job]
        for one in of_job:
            if one.action and one.number not in records:
                raise InvalidInput(f"--jobs: job {job} had no action {one.action}; `tangram acct "
                                   f"-j {job}` prints all of its actions")
        chosen = None if any(not one.action for one in of_job) else {o.number for o in of_job}
        rows += [r for number, r in records.items() if chosen is None or number in chosen]
    return rows


def _held(job: str, as_json: bool) -> int:
    """Prints the allocations; NCPUS is the number of CPUs that an allocation lends."""
    from dataclasses import asdict

    from ..accounting.held_usage import held, total
    from ..storage.journal_segments import read_journals
    from ..storage.rundir import job_dir

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
    from ..config.settings import load_config
    from ..errors import InvalidInput, TangramError
    from ..ports import SlurmRejected, SlurmTransient
    from ..slurm.choice import make_adapter

    if not job.isdigit():
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


def _whole(field: Any, width: int, rows: Sequence[Any]) -> int:
    """Returns the width of a column. JobID is as wide as its longest value unless a width was
    requested.

    The id of an embedded run is long, and cutting it would remove the part that tells actions
    apart.
    """
    if field.name != "JobID" or width != field.width:
        return width
    return max([width, *(len(field.text(r)) for r in rows)])


def _fit(text: str, width: int) -> str:
    """Fits a text into a column as sacct does: right aligned, or left aligned for a negative
    width. A text that was cut ends with `+`.
    """
    text, size = printable(text), abs(width)
    if len(text) > size:
        text = text[: size - 1] + "+"
    return text.ljust(size) if width < 0 else text.rjust(size)
