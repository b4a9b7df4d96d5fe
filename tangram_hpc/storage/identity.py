"""Whose a job's folder is: which job of Slurm wrote the journals that lie in it.

Problem: a job id is no identity. Ids begin again when a controller is rebuilt, wrap around, and are
the same on two clusters that share a home. A job that resumes a stranger's journal gives `once`
names the stranger's results.

What was measured (Slurm 22.05): the submit time that `squeue` shows CHANGES at each requeue, to the
time of the requeue, and SLURM_RESTART_COUNT (absent, 1, 2, ...) grows by one. Nothing that Slurm
shows of a running job stays the same over a requeue and is unique. So the folder keeps
`identity.json`: the cluster, the id, and the submit time and restart count of each start whose
broker took the folder.

A start of now is the same job's, if

- its restart count and submit time are those of the last start on record (a broker that was started
  again within one start), or
- its restart count and submit time are both later, and accounting agrees: of the starts that `sacct
  --duplicates` lists, the last on record is among the `restarts` ones before this. That tells it
  from a stranger with the same id that was itself requeued before it came to its broker. Where
  there is no accounting, or not all of those starts, the first half alone decides.

Everything else is a stranger's, also what cannot be proven: a journal without a record, or a submit
time that Slurm did not tell.
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
        cluster: SLURM_CLUSTER_NAME.
        job: the id; of a het job its leader's.
        submitted_s: epoch seconds, as squeue says for this start; 0: it did not say.
        restarts: how often the job was requeued before.
    """

    cluster: str
    job: str
    submitted_s: int
    restarts: int


def read_starts(folder: Path) -> list[JobStart]:
    """The starts on record, oldest first; empty: there is no record, or it cannot be read."""
    try:
        told = json.loads((folder / _NAME).read_text())
        if told["format"] != FORMAT:
            return []
        return [JobStart(str(told["cluster"]), str(told["job"]), int(at), int(count))
                for at, count in told["starts"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write_starts(folder: Path, starts: Sequence[JobStart]) -> None:
    """Replaces the record; `starts` are of one job and not empty."""
    replace_file(folder / _NAME, json.dumps({
        "format": FORMAT, "cluster": starts[0].cluster, "job": starts[0].job,
        "starts": [[start.submitted_s, start.restarts] for start in starts]}), 0o666)


async def why_foreign(starts: Sequence[JobStart], now: JobStart,
                      accounted: Callable[[], Awaitable[Sequence[int]]]) -> str:
    """Why what lies in a folder is another job's; empty: it is this job's.

    Args:
        starts: the record of the folder, oldest first.
        now: this start.
        accounted: asks accounting for the submit times of all starts under this id; asked only
            where nothing else decides.
    """
    if not starts:
        return "no record says whose it is"
    last = starts[-1]
    if (last.cluster, last.job) != (now.cluster, now.job):
        return f"it is of job {last.job} of cluster {last.cluster}"
    told = bool(last.submitted_s and now.submitted_s)
    whose = f"it is of a job submitted at {last.submitted_s} (restart count {last.restarts})"
    if now.restarts < last.restarts or (told and now.submitted_s < last.submitted_s):
        return whose
    if now.restarts == last.restarts:
        if not told:
            return "Slurm does not tell the submit time that would show whose it is"
        return "" if now.submitted_s == last.submitted_s else whose
    if told and now.submitted_s == last.submitted_s:
        return whose  # a requeue gives a new one
    if not told:
        return ""
    before = sorted(at for at in await accounted() if at < now.submitted_s)
    own = before[-now.restarts:]
    return whose if len(own) == now.restarts and last.submitted_s not in own else ""
