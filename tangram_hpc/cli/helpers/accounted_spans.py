"""Asks Slurm's accounting when jobs that have ended held their nodes.

No journal has the end of its job: the batch script goes on after the broker, and Slurm decides when
the job is over. So rows about jobs take these times from sacct. One call asks about many jobs.
Where there is no accounting, or it has forgotten a job, the journal's own times count. Where
accounting does not answer in time, they count until somebody asks again.

A row of sacct belongs to a job if its submit time is one of those that the job's broker recorded
(`storage.identity`), since job ids repeat.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...domain.slurm import JobSpan

_DEADLINE_S = 10.0
_LATE_S = 600.0  # accounting has the end of a job after this time, if it ever has
_AT_ONCE = 500  # jobs of one call: its time and its command line are bounded
_SAME_S = 2  # the components of a job are submitted within this time


def ask_spans(folders: Sequence[Path]) -> dict[Path, list[JobSpan] | None]:
    """Returns, for each of these folders, when its Slurm job held nodes: a span for each start and
    component. It is None for a job that must be asked about again later, since accounting did not
    answer, or the job has just ended and accounting does not have its end yet. Jobs that run, that
    accounting does not know, or that are no Slurm jobs have no entry.
    """
    from ...storage.identity import read_starts
    from ...storage.job_folders import is_served

    starts = {folder: read_starts(folder) for folder in folders if not is_served(folder)}
    asked = {one.job for known in starts.values() for one in known}
    told = asyncio.run(_ask(sorted(asked))) if asked else {}
    found: dict[Path, list[JobSpan] | None] = {}
    for folder, known in starts.items():
        if not known or known[0].job not in told:
            continue
        answer = told[known[0].job]
        if answer is None:
            found[folder] = None
            continue
        spans = [span for span in answer if any(
            abs(span.submit_s - start.submitted_s) <= _SAME_S for start in known)]
        if spans and all(span.end_ns for span in spans):
            found[folder] = spans
        elif _has_just_ended(folder):
            found[folder] = None
    return found


async def _ask(jobs: Sequence[str]) -> dict[str, list[JobSpan] | None]:
    """Returns the answer of accounting for each of these jobs, which is None if there was no answer
    in time. Jobs have no entry if there is no accounting. After the first call without an answer no
    other is made.
    """
    from ...ports import SlurmRejected, SlurmTransient
    from ...slurm.commands import Commands

    commands = Commands(os.environ, _DEADLINE_S)
    told: dict[str, list[JobSpan] | None] = {}
    for at in range(0, len(jobs), _AT_ONCE):
        answer: dict[str, list[JobSpan]] = {job: [] for job in jobs[at:at + _AT_ONCE]}
        try:
            spans = await commands.spans(list(answer))
        except SlurmRejected:
            break
        except SlurmTransient as failed:
            print(f"tangram: Slurm's accounting does not answer, so jobs end with their brokers: "
                  f"{failed}", file=sys.stderr)
            told.update(dict.fromkeys(jobs[at:]))
            break
        for span in spans:
            answer.get(span.job.partition("+")[0], []).append(span)
        told.update(answer)
    return told


def _has_just_ended(folder: Path) -> bool:
    from ...storage.journal_segments import journals

    try:
        last = max((path.stat().st_mtime for path in journals(folder)), default=0.0)
    except OSError:
        return False  # it is removed at this moment
    return time.time() - last < _LATE_S
