"""Notices that a broker has no worker: says so after a while, and ends the broker later.

A job in which no worker joins holds its nodes and does nothing, and everybody who submits work
waits without a word. Usually the job step of the workers has not begun, because another step holds
the CPUs or the memory that it asks for, or the workers cannot reach the broker.

A Slurm job that has ended takes its workers along, but not a broker that was started beside it, as
with `salloc`. So Slurm is asked now and then whether the job still runs, while there is no worker.

Time in which the broker itself did not run, or in which its job was suspended, does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...domain.slurm import JobView

SAID_AFTER_S = 60.0
ASKED_AFTER_S = 10.0
ASKED_EVERY_S = 120.0
_LONGEST_S = 10.0  # a longer time between two looks is a stall, of which only this counts


class MissingWorkers:
    """Watches one broker; it is given the time and what the broker has.

    Args:
        job: the job's name or Slurm id.
        limit_s: after how many seconds without a worker a broker in Slurm ends; 0: never.
        in_slurm: whether the broker runs inside this job of Slurm's.

    Attributes:
        gave_up: why the broker must end; empty while it need not.
    """

    def __init__(self, job: str, limit_s: float, in_slurm: bool) -> None:
        self._job, self._in_slurm = job, in_slurm
        self._limit_s = limit_s if in_slurm else 0.0
        self._looked_at: float | None = None
        self._alone_s = 0.0  # how long there has been no worker
        self._missing_s = 0.0  # how long none has been there although the broker needs one
        self._asks_at_s = ASKED_AFTER_S
        self._ever = self._said = self._held = False
        self.gave_up = ""

    def look(self, now_s: float, workers: int, needed: bool) -> str:
        """Returns a line for people, or nothing.

        Args:
            now_s: the time of the monotonic clock, seconds.
            workers: how many workers have joined and are not lost.
            needed: whether the broker is of no use without a worker.
        """
        since_s = 0.0 if self._looked_at is None else min(now_s - self._looked_at, _LONGEST_S)
        self._looked_at = now_s
        if workers:
            return self._joined()
        self._alone_s += since_s
        self._missing_s = self._missing_s + since_s if needed else 0.0
        if 0 < self._limit_s <= self._missing_s:
            self.gave_up = f"{self._fact()}; {self._remedy()}"
        elif self._missing_s >= SAID_AFTER_S and not self._said:
            self._said = True
            ends = (f". The broker ends after {self._limit_s:.0f} s (setting no_worker_s)"
                    if self._limit_s else "")
            return f"job {self._job}: {self._fact()}; {self._remedy()}{ends}"
        return ""

    def take_question(self) -> bool:
        """Returns whether Slurm is to be asked now whether the job still runs. The next question
        is then due after `ASKED_EVERY_S`."""
        if not self._in_slurm or self._alone_s < self._asks_at_s:
            return False
        self._asks_at_s = self._alone_s + ASKED_EVERY_S
        return True

    def has_ended(self, views: Sequence[JobView]) -> bool:
        """Takes Slurm's answer, and returns whether it says that the job has ended.

        Slurm shows a user the jobs of that user alone, and a container may give us another number.
        So an empty answer says that the job has ended only if an earlier one has shown it.
        """
        if any(view.state == "SUSPENDED" for view in views):
            self._missing_s = 0.0
        if any(view.holds for view in views):
            self._held = True
            return False
        return bool(views) or self._held

    def _joined(self) -> str:
        alone_s, said = self._alone_s, self._said
        self._alone_s = self._missing_s = 0.0
        self._asks_at_s, self._ever, self._said = ASKED_AFTER_S, True, False
        return f"job {self._job}: a worker has joined after {alone_s:.0f} s" if said else ""

    def _fact(self) -> str:
        what = "has been there for" if self._ever else "has joined within"
        return f"no worker {what} {self._missing_s:.0f} s"

    def _remedy(self) -> str:
        if not self._in_slurm:
            return f"start one with `TANGRAM_JOB={self._job} tangram worker`"
        none = ("they have ended, as after `scancel` of their step, and are not started again in "
                "this start of the job: the job's output says why" if self._ever else
                "srun waits for CPUs or memory that another step holds, or has ended: its message "
                "is in the job's output, and `tangram template check SCRIPT` says whether the "
                "steps fit")
        return ("satellites join when Slurm starts their jobs (`squeue --me`). If the workers are "
                f"steps of this job, see `squeue --steps -j {self._job}`. If it shows no step of "
                f"the workers, {none}. If it shows one, its worker does not reach this broker: the "
                "worker's message is in the job's output; check the settings `bind` and `ports`")
