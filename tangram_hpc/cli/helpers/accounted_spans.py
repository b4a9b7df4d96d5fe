"""Asks Slurm's accounting when jobs that have ended held their nodes.

No journal has the end of its job: the batch script goes on after the broker, and Slurm decides when
the job is over. So rows about jobs take these times from sacct. One call is made for all jobs in
question. Where there is no accounting, or it has forgotten a job, the journal's own times count.

A row of sacct belongs to a job if its submit time is one of those that the job's broker recorded
(`storage.identity`), since job ids repeat.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...domain.slurm import JobSpan

_DEADLINE_S = 10.0
_LATE_S = 600.0  # accounting has the end of a job after this time, if it ever has
_SAME_S = 2  # the components of a job are submitted within this time


def ask_spans(folders: Sequence[Path]) -> dict[Path, list[JobSpan] | None]:
    """Returns, for each of these folders, when its Slurm job held nodes: a span for each start and
    component. It is None for a job that has just ended and whose end accounting does not have yet.
    Jobs that run, that accounting does not know, or that are no Slurm jobs have no entry.
    """
    from ...storage.identity import read_starts
    from ...storage.job_folders import is_served

    starts = {folder: read_starts(folder) for folder in folders if not is_served(folder)}
    asked = {one.job for known in starts.values() for one in known}
    told = _ask(asked) if asked else None
    found: dict[Path, list[JobSpan] | None] = {}
    for folder, known in starts.items():
        if not known or told is None:
            continue
        spans = [span for span in told if span.job.partition("+")[0] == known[0].job and any(
            abs(span.submit_s - start.submitted_s) <= _SAME_S for start in known)]
        if spans and all(span.end_ns for span in spans):
            found[folder] = spans
        elif _has_just_ended(folder):
            found[folder] = None
    return found


def _ask(jobs: Iterable[str]) -> list[JobSpan] | None:
    """Returns the answer of accounting; None if there is no accounting, or no answer."""
    from ...ports import SlurmRejected, SlurmTransient
    from ...slurm.commands import Commands

    try:
        return asyncio.run(Commands(os.environ, _DEADLINE_S).spans(sorted(jobs)))
    except SlurmRejected:
        return None
    except SlurmTransient as failed:
        print(f"tangram: Slurm's accounting does not answer, so jobs end with their brokers: "
              f"{failed}", file=sys.stderr)
        return None


def _has_just_ended(folder: Path) -> bool:
    from ...storage.journal_segments import journals

    try:
        last = max((path.stat().st_mtime for path in journals(folder)), default=0.0)
    except OSError:
        return False  # it is removed at this moment
    return time.time() - last < _LATE_S
