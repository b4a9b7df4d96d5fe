"""What the actions of a job would have needed otherwise, for `tangram report` and for
`tangram acct --savings`, which prints it as a table.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...accounting.fields import Field, choose_fields, duration
from .printable import printable

if TYPE_CHECKING:
    from ...accounting.job_row import JobRow
    from ...accounting.record import Fold
    from ...domain.event import Event
    from ...simulator.savings.run_witness import RunWitness
    from ...simulator.savings.savings import Alternative, Savings


def compare(folded: Fold, row: JobRow, witness: RunWitness, progress: Callable[[str], None],
            static_cpus: int = 0, actions_max: int | None = None) -> tuple[Savings | None, str]:
    """Simulates the alternatives of a job; returns None and the reason if that is impossible.

    Args:
        folded: the records of its actions.
        row: the job.
        witness: what was there meanwhile; it has taken the same events.
        progress: called with what is simulated next.
        static_cpus: CPUs of a reservation; 0 for what the actions need.
        actions_max: so many actions are simulated at most; None for the usual number.
    """
    from ...errors import InvalidInput
    from ...simulator.savings.recorded_run import recorded_run
    from ...simulator.savings.savings import SIMULATED_MAX, savings

    if row.state == "RUNNING":
        return None, "the job still runs"
    try:
        run = recorded_run(folded, witness, actions_max or SIMULATED_MAX)
        if run is None:
            return None, "no action of the job can be simulated"
        return savings(run, folded, static_cpus, progress), ""
    except InvalidInput as error:
        return None, str(error)


def say_progress(verb: str, text: str) -> None:
    """Tells on stderr what is simulated next."""
    print(f"tangram: {verb}: {printable(text)}", file=sys.stderr)


class SavingsRow(NamedTuple):
    """One way to run the actions of a job, and by which fraction its mean ACT differs from that of
    the simulated run as it was; None where there is nothing to compare.
    """

    job: str
    way: Alternative
    act_growth: float | None


def _time(seconds: float | None) -> str:
    return "" if seconds is None else duration(round(seconds * 1e9))


def _hours(hours: float | None) -> str:
    return "" if hours is None else f"{hours:.3f}"


SAVINGS_FIELDS = (
    Field("JobID", 12, lambda r: r.job, "the job"),
    Field("Way", 9, lambda r: r.way.way, "how the same actions run"),
    Field("Policy", 11, lambda r: r.way.policy, "the placer"),
    Field("NCPUS", 7, lambda r: str(r.way.cpus), "CPUs held at one time, at most"),
    Field("NGPUS", 6, lambda r: str(r.way.gpus), "GPUs held at one time, at most"),
    Field("ACTMean", 13, lambda r: _time(r.way.mean_act_s), "mean time from submission to result"),
    Field("ACTChange", 9, lambda r: "" if r.act_growth is None else f"{r.act_growth:+.0%}",
          "ACTMean against that of `as run`"),
    Field("Step", 13, lambda r: _time(r.way.step_s),
          "beginning of the first trajectory to the last result"),
    Field("CoreHours", 11, lambda r: _hours(r.way.held_core_h), "core-hours held during Step"),
    Field("GPUHours", 10, lambda r: _hours(r.way.held_gpu_h), "GPU-hours held during Step"),
    Field("Reason", 30, lambda r: r.way.why_not or "None", "why this way is impossible"),
)
_DEFAULT = "JobID,Way,Policy,NCPUS,NGPUS,ACTMean,ACTChange,Step,CoreHours,GPUHours"


def columns(text: str) -> list[tuple[Field, int]]:
    """Returns the columns of a format; see `choose_fields`."""
    return choose_fields(text or _DEFAULT, SAVINGS_FIELDS, "tangram acct --savings -e")


def print_savings(args: argparse.Namespace, jobs: Sequence[str],
                  chosen: list[tuple[Field, int]]) -> int:
    """Prints a row for each way of each job, and what they rest on; returns the exit status, which
    is 1 if a job could not be simulated.
    """
    from . import acct_table

    for job in jobs:  # a job that is not there is told now and not after minutes of simulation
        next(_journals(job), None)
    told, whole = [(job, *_of_job(job)) for job in jobs], True
    rows, said, values = list[SavingsRow](), dict[str, list[str]](), list[dict[str, Any]]()
    for job, found, why in told:
        if found is None:
            print(f"tangram: acct: job {job}: nothing to compare: {printable(why)}",
                  file=sys.stderr)
            whole = False
            continue
        rows += [SavingsRow(job, way, found.change(way)) for way in found.rows]
        for text in [*_doubts(found), *found.assumptions]:
            said.setdefault(text, []).append(job)
        values.append({"job": job, **found.to_json()})
    if args.json:
        acct_table.print_json("savings", values)
        return not whole
    if rows:
        acct_table.print_rows(args, chosen, rows)
    if rows and not (args.parsable or args.parsable2 or args.noheader):
        count = len(values)
        print("\n" + "\n".join(
            f"- {'' if len(of) == count else _jobs(of)}{printable(text)}"
            for text, of in said.items()))
    return not whole


def _jobs(jobs: Sequence[str]) -> str:
    """Returns what stands before a sentence that is not true of all jobs of the table."""
    return f"Job{'s' * (len(jobs) > 1)} {', '.join(jobs)}: "


def _doubts(found: Savings) -> Iterator[str]:
    """Yields what keeps the rows of a job from being compared."""
    if doubt := found.doubt():
        yield doubt
    for way in found.rows:
        if way.why_not:
            yield f"\"{way.way}\" is impossible: {way.why_not}."


def _journals(job: str) -> Iterator[Event]:
    from ...storage.journal_segments import read_journals
    from ...storage.rundir import job_dir

    return read_journals(job_dir(os.environ, job))


def _of_job(job: str) -> tuple[Savings | None, str]:
    """Returns what `compare` does; a journal that cannot be read costs the other jobs nothing."""
    from ...accounting.job_row import JobFold
    from ...accounting.starts import without_gaps
    from ...errors import InvalidInput
    from ...simulator.savings.run_witness import RunWitness
    from ...storage.job_folders import is_served
    from ...storage.rundir import job_dir

    folder = job_dir(os.environ, job)
    served, fold, witness = is_served(folder), JobFold(), RunWitness()
    try:
        for event in without_gaps(_journals(job)):
            fold.add(event)
            witness.add(event)
    except InvalidInput as error:
        return None, str(error)
    row = fold.close(served, time.time_ns())
    return compare(fold.records, row, witness, partial(say_progress, "acct"))
