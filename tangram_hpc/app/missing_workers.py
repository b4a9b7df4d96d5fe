"""Notices that a broker has no worker: says so after a while, and ends the broker later.

A job in which no worker joins holds its nodes and does nothing, and everybody who submits work
waits without a word. Usually the job step of the workers has not begun, because another step holds
the CPUs or the memory that it asks for, or the workers cannot reach the broker.

A Slurm job that has ended takes its workers along, but not a broker that was started beside it, as
with `salloc`. So Slurm is asked whether the job still runs, once a while at most.

Time in which the broker itself did not run does not count. A broker that may ask Slurm for
satellites has no worker while it needs none, so nothing is said there.
"""

from __future__ import annotations

SAID_AFTER_S = 60.0
ASKED_AFTER_S = 10.0
ASKED_EVERY_S = 120.0
_LONGEST_S = 10.0  # a longer time between two looks is a stall, of which only this counts


class MissingWorkers:
    """Watches one broker; it is given the time and what the broker has.

    Args:
        job: the job's name or Slurm id.
        limit_s: after how many seconds without a worker the broker ends; 0: never.
        in_slurm: whether the broker runs inside this job of Slurm's.

    Attributes:
        gave_up: why the broker must end; empty while it need not.
    """

    def __init__(self, job: str, limit_s: float, in_slurm: bool) -> None:
        self._job, self._limit_s, self._in_slurm = job, limit_s, in_slurm
        self._looked_at: float | None = None
        self._missing_s, self._asks_at_s = 0.0, ASKED_AFTER_S
        self._ever = self._said = False
        self.gave_up = ""

    def look(self, now_s: float, workers: int, waits: bool) -> str:
        """Returns a line for people, or nothing.

        Args:
            now_s: the time of the monotonic clock, seconds.
            workers: how many workers have joined and are not lost.
            waits: whether the broker waits for workers at all.
        """
        since_s = 0.0 if self._looked_at is None else now_s - self._looked_at
        self._looked_at, missed_s = now_s, self._missing_s
        if workers or not waits:
            said, self._said, self._missing_s = self._said and workers > 0, False, 0.0
            self._ever, self._asks_at_s = self._ever or workers > 0, ASKED_AFTER_S
            return f"job {self._job}: a worker has joined after {missed_s:.0f} s" if said else ""
        self._missing_s += min(since_s, _LONGEST_S)
        if 0 < self._limit_s <= self._missing_s:
            self.gave_up = f"{self._fact()}; {self._remedy()}"
            return ""
        if self._missing_s < SAID_AFTER_S or self._said:
            return ""
        self._said = True
        ends = (f". The broker ends after {self._limit_s:.0f} s (setting no_worker_s)"
                if self._limit_s else "")
        return f"job {self._job}: {self._fact()}; {self._remedy()}{ends}"

    def asks(self) -> bool:
        """Returns whether Slurm is to be asked now whether the job still runs."""
        if not self._in_slurm or self._missing_s < self._asks_at_s:
            return False
        self._asks_at_s = self._missing_s + ASKED_EVERY_S
        return True

    def _fact(self) -> str:
        what = "has been there for" if self._ever else "has joined within"
        return f"no worker {what} {self._missing_s:.0f} s"

    def _remedy(self) -> str:
        if not self._in_slurm:
            return f"start one with `TANGRAM_JOB={self._job} tangram worker`"
        return (f"see `squeue --steps -j {self._job}`. If it shows no step of the workers, srun "
                "waits for CPUs or memory that another step holds: its words are in the job's "
                "output, and `tangram template check SCRIPT` says whether the steps fit. If it "
                "shows one, its worker does not reach this broker: its words are in the job's "
                "output, and settings are bind and ports")
