"""Ends an init that has failed to end its command in time, and measures for how long attempts were
suspended.

An init enforces the time limits of its commands, but a command may find a way to hold it up: an
init waits while a program starts, and that takes as long as opening the program's file does. Then
killing the init is what ends the command, and its session goes on with another init. An init must
never be judged earlier than it would have acted itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ...domain.action import Kind
from ...domain.outcome import too_long
from ...domain.states import ActionState
from .memory_pressure import LOOK_S
from .node_attempts import NodeAttempt

_STALL_NS = round((LOOK_S + 1) * 1e9)  # this worker was stopped between looks further apart
ANSWER_S = 10.0  # added to every deadline: on a crowded node an init waits for a core


class InitWatchdog:
    """The watchdog of one worker. Call `look` every LOOK_S while anything runs.

    After Slurm has suspended and resumed a job, every deadline would have passed by the clock. So a
    look that comes much later than planned adds the time since the one before to `stalled_ns` of
    the attempts that ran, and after a deadline the watchdog counts its own looks instead of time.

    Args:
        kill_wait_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, kill_wait_s: float) -> None:
        self._goodbye_ns = round(kill_wait_s * 1e9)
        self._looks_max = ANSWER_S / LOOK_S
        self._late: dict[int, int] = {}  # by lease: looks since its deadline
        self._looked = time.monotonic_ns()  # when the last look was; none is while nothing runs

    def look(self, attempts: Iterable[tuple[NodeAttempt, int]]) -> None:
        """Checks all running attempts once. O(attempts)."""
        late, now = dict[int, int](), time.monotonic_ns()
        for attempt, _ in attempts:
            if (gap := now - max(self._looked, attempt.started_ns)) > _STALL_NS:
                attempt.stalled_ns += gap
            lease, limit_ns = attempt.order.lease, attempt.order.action.timeout_ns
            ended_ns = (attempt.stopped_ns if attempt.stop is not None
                        else attempt.started_ns + attempt.stalled_ns + limit_ns)
            kind = attempt.order.action.kind  # an init keeps the limits of commands only
            if (attempt.process is None or kind is not Kind.EXEC
                    or not (attempt.stop or limit_ns) or now - ended_ns < self._goodbye_ns):
                continue
            late[lease] = self._late.get(lease, 0) + 1
            if late[lease] > self._looks_max:
                if attempt.stop is None:
                    attempt.stop_as(ActionState.TIMEOUT, too_long(limit_ns / 1e9))
                attempt.process.kill()
        self._late, self._looked = late, now
