"""Decides whether the journals in a job's folder were written by this Slurm job.

Problem: a job id does not identify a job. Ids begin again when a controller is rebuilt, wrap
around, and are the same on two clusters that share a home. A job that resumes the journal of
another job would return that job's results for its own idempotency keys.

What was measured (Slurm 22.05): the submit time that `squeue` shows CHANGES at each requeue, to the
time of the requeue, and SLURM_RESTART_COUNT (absent, 1, 2, ...) grows by one. Nothing that Slurm
shows of a running job is both unique and the same after a requeue. So the folder keeps
`identity.json`: the cluster, the id, and the submit time and restart count of each start whose
broker took the folder. `why_foreign` has the rule.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..atomic_file import replace_file

FORMAT = "tangram-identity/1"
_NAME = "identity.json"


@dataclass(frozen=True)
class JobStart:
    """One start of a Slurm job.

    Attributes:
        cluster: The cluster's name (SLURM_CLUSTER_NAME).
        job: The job id; of a het job, the leader's.
        submitted_s: The submit time that squeue shows for this start, epoch seconds; 0 for unknown.
        restarts: How often the job was requeued before.
    """

    cluster: str
    job: str
    submitted_s: int
    restarts: int


def read_starts(folder: Path) -> list[JobStart]:
    """Returns the starts on record, oldest first; empty if there is no record or it cannot be read.
    """
    try:
        record = json.loads((folder / _NAME).read_text())
        if record["format"] != FORMAT:
            return []
        return [JobStart(str(record["cluster"]), str(record["job"]), int(at), int(count))
                for at, count in record["starts"]]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return []


def write_starts(folder: Path, starts: Sequence[JobStart]) -> None:
    """Replaces the record by these starts, which are of one job; there must be at least one."""
    replace_file(folder / _NAME, json.dumps({
        "format": FORMAT, "cluster": starts[0].cluster, "job": starts[0].job,
        "starts": [[start.submitted_s, start.restarts] for start in starts]}), 0o666)


async def why_foreign(starts: Sequence[JobStart], now: JobStart,
                      accounted: Callable[[], Awaitable[Sequence[int]]]) -> str:
    """Returns why the contents of a folder are another job's; empty if they are this job's.

    A start belongs to the same job in two cases. In the first, its restart count and submit time
    are those of the last start on record: a broker was started again within one start of the job.

    In the second, its restart count is greater, its submit time is later, and accounting agrees: of
    the starts that `sacct --duplicates` lists, the last on record is among the `restarts` ones
    before this. The third condition rules out another job with the same id that was requeued before
    its first broker started. If accounting lacks some of those starts, the first two conditions
    decide; if a submit time is unknown, the restart count alone decides.

    In all other cases the contents count as another job's, also if nothing is proven: a journal
    without a record, or a start with the same restart count whose submit time Slurm did not tell.

    Args:
        starts: The record of the folder, oldest first.
        now: This start.
        accounted: Asks accounting for the submit times of all starts under this id; it is called
            only where nothing else decides.
    """
    if not starts:
        return "no record says whose it is"
    last = starts[-1]
    if (last.cluster, last.job) != (now.cluster, now.job):
        return f"it is of job {last.job} of cluster {last.cluster}"
    both_known = bool(last.submitted_s and now.submitted_s)
    foreign = f"it is of a job submitted at {last.submitted_s} (restart count {last.restarts})"
    if now.restarts < last.restarts or (both_known and now.submitted_s < last.submitted_s):
        return foreign
    if now.restarts == last.restarts:
        if not both_known:
            return "Slurm does not tell the submit time that would show whose it is"
        return "" if now.submitted_s == last.submitted_s else foreign
    if both_known and now.submitted_s == last.submitted_s:
        return foreign  # a requeue would have given a new submit time
    if not both_known:
        return ""
    before = sorted(at for at in await accounted() if at < now.submitted_s)
    own = before[-now.restarts:]
    return foreign if len(own) == now.restarts and last.submitted_s not in own else ""
