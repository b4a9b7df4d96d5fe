"""Owns: ending the init of a sandbox that has not ended a command which it should have: one over
its time limit, or one that was to be stopped. Must not judge anything sooner than an init would.

An init keeps its commands' limits, and what it runs may find a way to keep it from that: it waits
for a program's start, which takes as long as opening the program's file does. Then its death is
what ends the command; its session goes on with another init.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ...domain.action import Kind
from ...domain.outcome import too_long
from ...domain.states import ActionState
from .jobs import Job
from .memory_pressure import LOOK_S

ANSWER_S = 10.0  # beyond all that it was given: a crowded node makes an init wait for a core


class InitWatchdog:
    """One worker's; `look` every LOOK_S while anything runs. Looks are counted, not time, as a job
    that was suspended is late for everything when it goes on.

    Args:
        kill_wait_s: how long a command may take to say goodbye.
    """

    def __init__(self, kill_wait_s: float) -> None:
        self._goodbye_ns = round(kill_wait_s * 1e9)
        self._looks_max = ANSWER_S / LOOK_S
        self._late: dict[int, int] = {}  # lease -> looks since it should have ended

    def look(self, jobs: Iterable[tuple[Job, int]]) -> None:
        """Looks once at those that run. O(jobs)."""
        late, now = dict[int, int](), time.monotonic_ns()
        for job, _ in jobs:
            lease, limit_ns = job.order.lease, job.order.action.timeout_ns
            ended_ns = job.stopped_ns if job.stop is not None else job.started_ns + limit_ns
            if (job.process is None or job.order.action.kind is not Kind.EXEC  # not kept by an init
                    or not (job.stop or limit_ns) or now - ended_ns < self._goodbye_ns):
                continue
            late[lease] = self._late.get(lease, 0) + 1
            if late[lease] > self._looks_max:
                if job.stop is None:
                    job.stop_as(ActionState.TIMEOUT, too_long(limit_ns / 1e9))
                job.process.kill()
        self._late = late
