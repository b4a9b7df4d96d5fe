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
from ...domain.states import ActionState
from .jobs import Job

ANSWER_S = 10.0  # beyond all that it was given: a crowded node makes an init wait for a core


class Overdue:
    """One worker's; `look` now and then while anything runs.

    Args:
        kill_wait_s: how long a command may take to say goodbye.
    """

    def __init__(self, kill_wait_s: float) -> None:
        self._grace_ns = round((kill_wait_s + ANSWER_S) * 1e9)

    def look(self, jobs: Iterable[tuple[Job, int]]) -> None:
        """Looks once at those that run. O(jobs)."""
        now = time.monotonic_ns()
        for job, _ in jobs:
            if job.host is None or job.order.action.kind is not Kind.EXEC:
                continue  # a runner's calls are ended from outside in any case
            limit_ns = job.order.action.timeout_ns
            if job.stop is not None:
                over = now - job.stopped_ns > self._grace_ns
            else:
                over = 0 < limit_ns < now - job.started_ns - self._grace_ns
            if over:
                limit = f"it ran longer than its limit of {limit_ns / 1e9:g} s"
                job.stop = job.stop or (ActionState.TIMEOUT, limit)
                job.host.kill()
