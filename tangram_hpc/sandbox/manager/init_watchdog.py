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
from .memory_pressure import LOOK_S
from .node_attempts import NodeAttempt

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

    def look(self, attempts: Iterable[tuple[NodeAttempt, int]]) -> None:
        """Looks once at those that run. O(attempts)."""
        late, now = dict[int, int](), time.monotonic_ns()
        for attempt, _ in attempts:
            lease, limit_ns = attempt.order.lease, attempt.order.action.timeout_ns
            ended_ns = (attempt.stopped_ns if attempt.stop is not None
                        else attempt.started_ns + limit_ns)
            kind = attempt.order.action.kind  # an init keeps the limits of commands only
            if (attempt.process is None or kind is not Kind.EXEC
                    or not (attempt.stop or limit_ns) or now - ended_ns < self._goodbye_ns):
                continue
            late[lease] = self._late.get(lease, 0) + 1
            if late[lease] > self._looks_max:
                if attempt.stop is None:
                    attempt.stop_as(ActionState.TIMEOUT, too_long(limit_ns / 1e9))
                attempt.process.kill()
        self._late = late
