"""Owns: the worker's notes on leases and sessions. Must not do any I/O."""

from __future__ import annotations

import os
import signal
import time
from asyncio import TimerHandle
from collections import deque

from ...domain.outcome import CPU_AT_LEAST, RSS_AT_LEAST, Outcome
from ...domain.session import SessionSpec
from ...domain.states import ActionState
from ...protocol.message import Start
from ...protocol.process_frames import RUNNER, Box
from ...resources import tree
from .execution_processes import ExecutionProcess


class NodeAttempt:
    """What the worker knows of a lease.

    `live` until its outcome is on its way up. `open` until nothing of it is left. `held`: its units
    are enforced. `stop` is how it must be reported when someone ended it, at `stopped_ns`.
    `gpu_token` ends the measuring of its GPUs. `last_usage`: CPU time in ns and memory in KiB of a
    function just before its runner was killed.
    """

    __slots__ = (
        "asked_mib",
        "blob",
        "cores",
        "digest",
        "gone",
        "gpu_token",
        "held",
        "last_usage",
        "live",
        "order",
        "payload",
        "process",
        "started_ns",
        "stop",
        "stopped_ns",
        "storing",
        "timer",
    )  # fmt: skip

    def __init__(self, order: Start) -> None:
        self.order = order
        self.cores = order.cores
        self.payload = b""
        self.digest = ""
        self.blob = b""
        self.process: ExecutionProcess | None = None
        self.live = True
        self.storing = False
        self.held = False
        self.asked_mib = 0
        self.gone = False
        self.gpu_token = 0
        self.started_ns = 0
        self.stop: tuple[ActionState, str] | None = None
        self.stopped_ns = 0
        self.last_usage = 0, 0
        self.timer: TimerHandle | None = None

    def stop_as(self, state: ActionState, reason: str) -> None:
        """Someone ends it."""
        self.stop, self.stopped_ns = (state, reason), time.monotonic_ns()

    def look_before_kill(self, process: ExecutionProcess) -> None:
        """Its runner is about to be killed, and cannot say what the call has used."""
        pids = [process.pid, *tree.descendants(process.pid)]
        used = sum(map(tree.cpu_ns, pids)) - process.process_cpu_ns
        self.last_usage = max(0, used), max(map(tree.high_water_kib, pids))

    def end_timer(self) -> None:
        """Its limit no longer counts."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def unstarted(self, state: ActionState, reason: str) -> Outcome:
        """Its outcome when it never ran."""
        return Outcome(state, reason=reason)

    def orphaned(self, process: ExecutionProcess, status: int, reason: str) -> Outcome:
        """Its outcome when its process died under it."""
        state = self.stop[0] if self.stop else ActionState.FAILED
        cpu_ns, maxrss_kib = self.last_usage
        number = os.WTERMSIG(status) if status >= 0 and os.WIFSIGNALED(status) else 0
        code = os.WEXITSTATUS(status) if status >= 0 and not number else 0
        if process.kind != RUNNER and not self.stop:
            number = code = 0  # its init's end, not the command's own
        return Outcome(
            state,
            exit_code=code,
            signal=number,
            exec_ns=time.monotonic_ns() - self.started_ns,
            cpu_ns=cpu_ns,
            maxrss_kib=maxrss_kib,
            reason=self.stop[1] if self.stop else reason,
            at_least=CPU_AT_LEAST | RSS_AT_LEAST,
        )


class Session:
    """A session's process, and what waits for it.

    Attributes:
        process: its init, once one is being built.
        up: whether that takes orders; `was_up`: whether one ever did.
        running: the lease of its command, 0 for none.
        copies: sessions that will begin with a copy of its files; `copying`: those being made.
        deaths: inits that it lost.
        packing: it goes to another node, and its files are or will be packed.
    """

    __slots__ = (
        "box",
        "closing",
        "copies",
        "copying",
        "deaths",
        "id",
        "packing",
        "process",
        "running",
        "spec",
        "up",
        "waiting",
        "was_up",
    )

    def __init__(self, spec: SessionSpec, box: Box) -> None:
        self.id = spec.id
        self.spec = spec
        self.box = box
        self.process: ExecutionProcess | None = None
        self.up = self.was_up = self.closing = self.packing = False
        self.running = 0
        self.deaths = 0
        self.copies: deque[Session] = deque()
        self.copying: list[Session] = []
        self.waiting: deque[NodeAttempt] = deque()


def cause(status: int) -> str:
    """A wait status for people; -1: not known."""
    if status < 0:
        return "with its fork server"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"signal {number}, {signal.Signals(number).name}"
        except ValueError:
            return f"signal {number}"
    return f"exit code {os.WEXITSTATUS(status)}"
