"""The worker's records of attempts, open sessions and snapshots. This module does no I/O."""

from __future__ import annotations

import os
import signal
import time
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable

from ...domain.outcome import CPU_AT_LEAST, RSS_AT_LEAST, Outcome
from ...domain.session import SessionSpec
from ...domain.states import ActionState
from ...protocol.message import StartAttempt
from ...protocol.process_frames import RUNNER, GiveInput, SandboxSpec
from ...resources import process_tree
from .execution_processes import ExecutionProcess


class NodeAttempt:
    """An attempt of an action on this worker.

    Attributes:
        order: the worker's order to start it.
        cores: the CPUs that it holds now.
        payload: its encoded call, until it is sent.
        digest: of a function call, the function's digest; `blob` is its pickle until it is sent.
        process: the execution process that runs it; None before.
        live: true until its outcome is on its way to the broker.
        storing: its return value is being written to the store.
        gone: whether none of its processes is left.
        held: whether its CPUs are enforced.
        asked_mib: the memory that it may use, in MiB; 0 for no limit.
        gpu_token: ends the measuring of its GPUs; 0 for none.
        taken_ns: when its order came, or, of a call that waited in its runner, when the call
            before it had ended (monotonic).
        started_ns: when it started (monotonic); 0 before.
        stalled_ns: for how long the job was suspended since then, in ns; its time limit is that
            much later.
        resize_ns: how long its resizes took so far, in ns.
        stop: the state and reason to report when someone ended it, at `stopped_ns` (monotonic).
        last_usage: CPU time in ns and peak memory in KiB of a function just before its runner was
            killed.
        timer: its time limit, if it is a function.
        early: a signal that came before it started; None for none.
        secrets: the secrets of its session, by the variables of its commands that hold them.
    """

    __slots__ = (
        "asked_mib",
        "blob",
        "cores",
        "digest",
        "early",
        "gone",
        "gpu_token",
        "held",
        "last_usage",
        "live",
        "order",
        "payload",
        "process",
        "resize_ns",
        "secrets",
        "stalled_ns",
        "started_ns",
        "stop",
        "stopped_ns",
        "storing",
        "taken_ns",
        "timer",
    )  # fmt: skip

    def __init__(self, order: StartAttempt) -> None:
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
        self.taken_ns = time.monotonic_ns()
        self.started_ns = 0
        self.stalled_ns = 0
        self.resize_ns = 0
        self.stop: tuple[ActionState, str] | None = None
        self.stopped_ns = 0
        self.last_usage = 0, 0
        self.timer: TimerHandle | None = None
        self.early: GiveInput | None = None
        self.secrets: dict[str, str] = {}

    def stop_as(self, state: ActionState, reason: str) -> None:
        """Notes why the worker ends the attempt: the state and the reason of its outcome."""
        self.stop, self.stopped_ns = (state, reason), time.monotonic_ns()

    def look_before_kill(self, process: ExecutionProcess) -> None:
        """Measures a call whose runner is about to be killed and cannot report its usage."""
        pids = [process.pid, *process_tree.descendants(process.pid)]
        used = sum(map(process_tree.cpu_ns, pids)) - process.process_cpu_ns
        self.last_usage = max(0, used), max(map(process_tree.high_water_kib, pids))

    def end_timer(self) -> None:
        """Cancels the timer of the attempt's time limit."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    @property
    def setup_ns(self) -> int:
        """How long it took to start it, in ns; -1 if it did not start."""
        return self.started_ns - self.taken_ns if self.started_ns else -1

    def orphaned(self, process: ExecutionProcess, status: int, reason: str) -> Outcome:
        """Returns the outcome of an attempt whose execution process died."""
        state = self.stop[0] if self.stop else ActionState.FAILED
        cpu_ns, maxrss_kib = self.last_usage
        number = os.WTERMSIG(status) if status >= 0 and os.WIFSIGNALED(status) else 0
        code = os.WEXITSTATUS(status) if status >= 0 and not number else 0
        if process.kind != RUNNER and not self.stop:
            number = code = 0  # the status is that of the init, not of the command
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


class NodeSnapshot:
    """A folder of frozen files.

    Attributes:
        name: the name by which clients know it; empty if only forks begin from it.
        home: the name of the folder.
        folder: the path of the folder.
        base: the snapshot whose layers it has below its own; None for none.
        session: the session of which it was taken on this node; 0 if another node has taken it.
        image, digest: the image of the session, as it was asked for, and its digest.
        mib: the space that it takes on the disk, in MiB.
        users: how many sessions and snapshots need its files.
        used_s: when it was last used (monotonic).
        listed: whether sessions may still begin from it.
    """

    __slots__ = ("base", "digest", "folder", "home", "image", "listed", "mib", "name",
                 "session", "used_s", "users")

    def __init__(self, name: str, home: str, folder: str, base: NodeSnapshot | None = None,
                 image: str = "", digest: str = "") -> None:
        self.name, self.home, self.folder, self.base = name, home, folder, base
        self.image, self.digest = image, digest
        self.session = 0
        self.mib = self.users = 0
        self.used_s = time.monotonic()
        self.listed = bool(name)


class NodeSession:
    """A session that is open on this node.

    Attributes:
        process: its init, once one is being built.
        up: whether that init accepts orders; `was_up`: whether one ever did.
        closing: it is being closed.
        packing: it moves to another node, and its files are or will be packed.
        running: the lease of its running command; 0 for none.
        deaths: how many of its inits have died.
        copies: sessions that wait to begin with a copy of its files; `copying`: copies under way.
        waiting: attempts that wait for it, in order.
        secrets: the variables of its commands whose values are secret.
        pulling: whether its image or its snapshot is not ready yet.
        image: the digest of its image, once the image is ready.
        takes: the attempts to take a snapshot of it that wait, in order.
        freezing: whether its files are being frozen.
        taking: the attempt for which its files are being frozen; None if they are not, or if they
            are frozen for forks.
        still: is called once nothing runs in it, with an empty text, or with the reason why
            something may; None if nobody waits for that.
        base: the snapshot that it began from; None for none.
        frozen: a snapshot of its present files, for forks; None if there is none, or if an action
            may have changed the files since.
    """

    __slots__ = (
        "base",
        "box",
        "closing",
        "copies",
        "copying",
        "deaths",
        "freezing",
        "frozen",
        "id",
        "image",
        "packing",
        "process",
        "pulling",
        "running",
        "secrets",
        "spec",
        "still",
        "takes",
        "taking",
        "up",
        "waiting",
        "was_up",
    )

    def __init__(self, spec: SessionSpec, box: SandboxSpec) -> None:
        self.id = spec.id
        self.spec = spec
        self.box = box
        self.process: ExecutionProcess | None = None
        self.up = self.was_up = self.closing = self.packing = self.pulling = False
        self.image = ""
        self.running = 0
        self.deaths = 0
        self.copies: deque[NodeSession] = deque()
        self.copying: list[NodeSession] = []
        self.waiting: deque[NodeAttempt] = deque()
        self.secrets: dict[str, str] = {}
        self.takes: deque[NodeAttempt] = deque()
        self.taking: NodeAttempt | None = None
        self.freezing = False
        self.still: Callable[[str], None] | None = None
        self.base: NodeSnapshot | None = None
        self.frozen: NodeSnapshot | None = None


def cause(status: int) -> str:
    """Describes a wait status for people; -1 means unknown."""
    if status < 0:
        return "with its fork server"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"signal {number}, {signal.Signals(number).name}"
        except ValueError:
            return f"signal {number}"
    return f"exit code {os.WEXITSTATUS(status)}"
