"""Writes a job's accounting in one line into the Comment of its Slurm job, when the broker ends.

The Comment is tried once, within `READ_S` + `CALL_S`. If the site refuses a Comment, the controller
does not answer, or the journal takes too long to read, one line on standard error says so. That is
never a failure of the job.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

from ...accounting.record import fold
from ...accounting.summary import summary
from ...domain.event import Event
from ...errors import InvalidInput
from ...ports import Slurm, SlurmFailure, SlurmTransient
from ...storage.journal_segments import read_journals

# enough for some hundred thousand actions; the templates leave more time before the limit
READ_S = 20.0
CALL_S = 10.0


class _TooLong(Exception):
    """The journal could not be read in time."""


async def set_job_comment(slurm: Slurm, job: int, folder: Path) -> str:
    """Sets the Comment; returns an empty text, or one line that says why it could not be set."""
    try:
        line = summary(fold(_within(read_journals(folder), READ_S)))
    except _TooLong:
        return f"its journal cannot be read in {READ_S:g} s: tangram acct -j {job} --comment"
    except InvalidInput as error:
        return str(error)
    answer: asyncio.Future[SlurmFailure | None] = asyncio.get_running_loop().create_future()

    def answered(told: SlurmFailure | None) -> None:
        if not answer.done():
            answer.set_result(told)

    slurm.comment(job, line, answered)
    try:
        failed = await asyncio.wait_for(answer, CALL_S)
    except asyncio.TimeoutError:
        failed = SlurmTransient("Slurm does not answer")
    return "" if failed is None else str(failed)


def _within(events: Iterator[Event], seconds: float) -> Iterator[Event]:
    end = time.monotonic() + seconds
    for number, event in enumerate(events):
        if number % 1024 == 0 and time.monotonic() > end:
            raise _TooLong
        yield event
