"""The interface of one way to talk to Slurm, and what Slurm's error messages mean for a caller.

There are two adapters: Slurm's own commands (`commands.py`) and pyslurm (`binding.py`). An adapter
carries out one call and knows nothing of rate limits, which `budgeted.py` adds. Slurm's error
messages are the same text whichever adapter receives them, so one table here decides which failures
may pass by themselves (`SlurmTransient`) and which need a person (`SlurmRejected`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..domain.slurm import COMMENT_MAX, JobOrder, JobRef, JobView
from ..ports import SlurmFailure, SlurmRejected, SlurmTransient

# parts of Slurm's messages, lower case: Slurm did not carry the call out, and may do so later
_AWAY = ("unable to contact slurm controller (connect failure)", "unable to contact slurm "
         "controller (send failure)", "standby", "rate limit", "try again", "temporarily",
         "authentication", "munge", "connection refused", "communication connection failure",
         "connect to database", "database connection", "resource temporarily unavailable",
         "unable to establish configuration source", "failed to connect", "cannot allocate memory",
         "too many requests", "controller not responding")
# nobody knows whether Slurm carried the call out
_LATE = ("timed out", "timeout", "receive failure", "zero bytes", "shutdown failure",
         "unable to contact slurm controller", "unexpected message", "incomplete packet")
_UNKNOWN_JOB = ("invalid job id",)
_OVER = ("already completing or completed", "already finished", "job/step already")


class SlurmAdapter(Protocol):
    """One way to talk to Slurm. Each call raises SlurmRejected or SlurmTransient (without
    `again_ns`) and ends within the adapter's deadline. See `ports.Slurm` for what they do."""

    @property
    def name(self) -> str:
        """The adapter's name, which is `cli` or `pyslurm`."""
        ...

    async def submit(self, order: JobOrder) -> int:
        """Submits a batch job and returns its id."""
        ...

    async def query(self, jobs: Sequence[int], names: Sequence[str]) -> tuple[JobView, ...]:
        """Returns this user's jobs with these ids or names, ordered by id and component."""
        ...

    async def cancel(self, jobs: Sequence[JobRef]) -> None:
        """Cancels each job, and tries all of them. A job that has ended or is unknown is no
        failure.
        """
        ...

    async def comment(self, job: int, text: str) -> None:
        """Puts our line into the Comment of one of this user's jobs.

        This takes two calls of Slurm, as what others wrote into the Comment must stay.
        """
        ...

    async def close(self) -> None:
        """Ends every process that this adapter has started."""
        ...


def failure(text: str, by: str = "") -> SlurmFailure:
    """Returns the failure that an error message of Slurm stands for.

    A message that is not in the tables counts as a rejection: a person sees a rejection, and a call
    is never repeated in vain.

    Args:
        text: the message.
        by: the part of it that decides, where other parts are a site's own words.
    """
    low = (by or text).lower()
    if any(part in low for part in _AWAY):
        return SlurmTransient(text)
    if any(part in low for part in _LATE):
        return SlurmTransient(text, unsure=True)
    return SlurmRejected(text)


def says_unknown(failed: SlurmFailure) -> bool:
    """Returns whether Slurm said that there is no such job."""
    return isinstance(failed, SlurmRejected) and _any(failed, _UNKNOWN_JOB)


def says_over(failed: SlurmFailure) -> bool:
    """Returns whether Slurm said that the job has ended."""
    return isinstance(failed, SlurmRejected) and _any(failed, _OVER)


def _any(failed: SlurmFailure, parts: tuple[str, ...]) -> bool:
    return any(part in str(failed).lower() for part in parts)


def checked_comment(text: str) -> str:
    """Returns the text if it can be our line of a Comment.

    Raises:
        SlurmRejected: the text has control characters, or more than `COMMENT_MAX` characters.
    """
    if not text.isprintable():
        raise SlurmRejected("comment: only printable characters on one line")
    if len(text) > COMMENT_MAX:
        raise SlurmRejected(f"comment: {len(text)} characters, at most {COMMENT_MAX}")
    return text


def comment_of(rows: Sequence[JobView]) -> str | None:
    """Returns the Comment of a job (of a het job: its leader's), or None if there is no row."""
    return next((row.comment for row in rows if row.component <= 0), None)


def wanted(rows: Sequence[JobView], jobs: Sequence[int], names: Sequence[str]
           ) -> tuple[JobView, ...]:
    """Returns the rows of the jobs with these ids or names, ordered by id and component."""
    ids, called = frozenset(jobs), frozenset(names)
    return tuple(sorted((row for row in rows if row.job in ids or row.name in called),
                        key=lambda row: (row.job, row.component)))
