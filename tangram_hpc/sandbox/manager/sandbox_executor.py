"""Runs leases in execution processes of this machine: the `Executor` port of the worker.

This module decides which execution process runs which attempt, tells the worker's driver how each
one ended, and enforces its CPUs and memory. It never starts, waits for or signals a user's process
itself: the execution processes and their fork server do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec

from ...domain.action import Kind
from ...domain.outcome import Outcome, too_long
from ...domain.session import SessionSpec
from ...domain.states import ENDED, ActionState
from ...errors import InvalidInput
from ...ports import Images, OutputLog, Reports, SandboxSettings, Store
from ...protocol import input_flow
from ...protocol.message import (
    INLINE_MAX,
    SnapshotOrder,
    SnapshotReport,
    StartAttempt,
    StreamMessage,
)
from ...protocol.payload import ErrorReturn, FunctionCall, decode, encode, owner_of_result
from ...protocol.process_frames import (
    NEVER_BUILT,
    PAYLOAD_MAX,
    RUNNER,
    CreditInput,
    Ended,
    GiveInput,
    Gone,
    KillCommand,
    LeaseBackground,
    OutputChunk,
    PortBytes,
    PortCredit,
    PortEnded,
    RunAction,
    Setup,
    Units,
)
from ...resources.cpu import affinity
from ...resources.cpu.enforce import Enforcer, probe
from ...resources.gpu.devices import Devices
from ...resources.gpu.gpu_meter import GpuMeter
from .backends import Backends
from .execution_processes import ExecutionProcess
from .init_watchdog import InitWatchdog
from .memory_pressure import LOOK_S, MemoryPressure, oom_reason
from .node_attempts import NodeAttempt, cause
from .node_snapshots import NodeSnapshots
from .output_keeper import OutputKeeper
from .payload_cache import PayloadCache, is_stored
from .pools import Pool
from .port_traffic import PortTraffic
from .process_supervisor import ProcessSupervisor
from .runner_watchdog import RunnerWatchdog
from .sessions import Sessions

_EXEC = Kind.EXEC
_FUNCTION = Kind.FUNCTION
_DEFAULTS = SandboxSettings()
_KILLED = 128 + signal.SIGKILL  # what a shell returns for a command that SIGKILL ended
# states that an execution process may report; the other two send an action back
_REPORTABLE = ENDED - {ActionState.NODE_FAIL, ActionState.PREEMPTED}


class SandboxExecutor:
    """Runs actions in processes of this machine. Create and use it on one running asyncio loop.

    Args:
        reports: receives results and states.
        store: holds payloads above the inline limit.
        scratch: a node-local directory for the files of sandboxes; see `ProcessSupervisor`.
        cores: the CPUs that this worker lends.
        settings: choices of the site and the user.
        backends: the isolation backends that work here; None: they are probed.
        pinned: whether actions are bound to their CPUs; None: if all are cores of this process.
        gpus: names and measures the GPUs that are lent; None: the node lends none.
        enforcer: enforces CPUs and memory; None: the best that works here.
        images: makes folders of images' names; None: an image is a folder.
        outputs: keeps what commands write; None: nothing is kept. Settings say so as well.

    Raises:
        InvalidInput: `scratch` or a setting cannot be used.
    """

    def __init__(self, reports: Reports, store: Store, scratch: str | Path,
                 cores: tuple[int, ...], settings: SandboxSettings = _DEFAULTS, *,
                 backends: Backends | None = None, pinned: bool | None = None,
                 gpus: GpuMeter | None = None, enforcer: Enforcer | None = None,
                 images: Images | None = None, outputs: OutputLog | None = None) -> None:
        self.pinned = pinned = affinity.describe(cores) == "affinity" if pinned is None else pinned
        self._gpus = gpus or GpuMeter(Devices())
        self._reports, self._cores = reports, cores
        self._loop = asyncio.get_running_loop()
        self._cache, self._closed = PayloadCache(store), False
        self._attempts: dict[int, NodeAttempt] = {}
        backends = backends or Backends.probed(settings.isolation, settings.read_paths,
                                               str(scratch))
        self._enforcer = enforcer = enforcer or probe(pinned, settings.enforcement)
        self._counts_ooms = "memory" in enforcer.limits
        units = max(1, len(cores))
        self._supervisor = ProcessSupervisor(self, Path(scratch), units, settings, backends,
                                             enforcer, pinned)
        self._snapshots = NodeSnapshots(self._supervisor, self._cache, reports, settings)
        self._sessions = Sessions(self._supervisor, self, reports, self._cache, self._snapshots,
                                  images)
        self._ports = PortTraffic(self._sessions, reports)
        self._outputs = OutputKeeper(outputs) if outputs is not None else None
        self._runner_watchdog = RunnerWatchdog(self._free_behind)
        self._memory_pressure = MemoryPressure(not self._counts_ooms, self.kill)
        self._init_watchdog = InitWatchdog(settings.kill_wait_s)
        self._next_check: asyncio.TimerHandle | None = None

    @property
    def enforcement(self) -> str:
        """How CPUs are enforced: a name of `enforce.NAMES`."""
        return self._enforcer.name

    @property
    def fork_server_pid(self) -> int:
        """The process id of the fork server."""
        return self._supervisor.pid

    # ---- orders ----

    def open_session(self, spec: SessionSpec) -> None:
        """See `ports.Executor`."""
        if not self._closed:
            self._sessions.open(spec)

    def close_session(self, session: int) -> None:
        """See `ports.Executor`."""
        one = self._sessions.get(session)
        if one is None or one.closing:
            return
        for lease in one.process.leases if one.process else ():
            attempt = self._attempts[lease]
            if attempt.live and attempt.stop is None:
                attempt.stop = (ActionState.CANCELLED, "its session was closed")
        self._sessions.close(one)

    def pack_session(self, session: int) -> None:
        """See `ports.Executor`."""
        self._sessions.pack(session)

    def order_snapshot(self, order: SnapshotOrder) -> None:
        """See `ports.Executor`."""
        if not self._closed:
            self._snapshots.obey(order)

    def snapshot_reports(self) -> list[SnapshotReport]:
        """See `ports.Executor`."""
        return self._snapshots.reports()

    def start(self, order: StartAttempt, payload: memoryview | bytes) -> None:
        """See `ports.Executor`. A lease that is known is ignored."""
        if self._closed or order.lease in self._attempts:
            return
        attempt = self._attempts[order.lease] = NodeAttempt(order)
        if is_stored(payload):
            try:
                self._cache.fetch(bytes(payload),
                                  lambda data, why: self._fetched(attempt, data, why))
            except msgspec.DecodeError as error:
                self._fail(attempt, f"payload: {error}")
        else:
            attempt.payload = bytes(payload)
            self._admit(attempt)

    def follow(self, order: StartAttempt, payload: memoryview) -> bool:
        """See `ports.Executor`. Calls of functions wait in the runner itself."""
        before = self._attempts.get(order.after)
        process = before.process if before is not None else None
        if process is None or process.kind != RUNNER or process.control is None or (
                order.action.kind is not _FUNCTION or order.action.timeout_ns
                or next(reversed(process.leases), 0) != order.after or is_stored(payload)):
            return False
        try:
            call = decode(payload)
        except msgspec.DecodeError:
            return False
        if not isinstance(call, FunctionCall) or call.digest not in process.functions:
            return False
        attempt = self._attempts[order.lease] = NodeAttempt(order)
        attempt.payload, attempt.digest = bytes(payload), call.digest
        self._runner_watchdog.watch(process)
        self.dispatch(attempt, process)
        return True

    def take_back(self, lease: int) -> bool:
        """See `ports.Executor`."""
        attempt = self._attempts.get(lease)
        if attempt is None or attempt.process is None or attempt.process.kind != RUNNER:
            return False
        self._free_behind(attempt.process, lease)
        return lease not in self._attempts

    def _free_behind(self, process: ExecutionProcess, asked: int = 0) -> None:
        """Gives back the calls that a runner has not begun, except the call of the lease
        `asked`."""
        for lease in reversed(process.take_back()):
            del process.leases[lease], self._attempts[lease]
            if lease != asked:
                self._reports.returned(lease)

    def _fetched(self, attempt: NodeAttempt, data: bytes, why: str) -> None:
        if not self.waits(attempt):
            return
        if why or len(data) > PAYLOAD_MAX:
            return self._fail(attempt, why or f"payload: {len(data)} bytes exceed the limit of "
                                       f"{PAYLOAD_MAX}")
        attempt.payload = data
        self._admit(attempt)

    def waits(self, attempt: NodeAttempt) -> bool:
        """See `sessions.CommandDispatcher`."""
        known = self._attempts.get(attempt.order.lease) is attempt
        return known and attempt.live and attempt.process is None

    def _admit(self, attempt: NodeAttempt) -> None:
        action = attempt.order.action
        if action.kind is _FUNCTION:
            return self._admit_function(attempt)
        if action.session:
            session = self._sessions.get(action.session)
            if session is None or session.closing:
                return self._fail(attempt, "session: it is not open on this node")
            return self._sessions.enter(attempt, session)
        if action.kind is not _EXEC:
            return self._fail(attempt, "session: to read or write files, open one")
        try:
            box = self._supervisor.backends.box(SessionSpec(0, trusted=action.trusted))
        except InvalidInput as error:
            return self._fail(attempt, str(error))
        self._into_pool(attempt, self._supervisor.pool(box))

    def _admit_function(self, attempt: NodeAttempt) -> None:
        try:
            call = decode(attempt.payload)
        except msgspec.DecodeError as error:
            return self._fail(attempt, f"payload: not in the protocol ({error})")
        if not isinstance(call, FunctionCall):
            return self._fail(attempt, f"payload: a runner cannot run a {type(call).__name__}")
        attempt.digest = call.digest

        def then(blob: bytes, why: str) -> None:
            if self.waits(attempt):
                if why:
                    return self._fail(attempt, why)
                attempt.blob = blob
                self._into_pool(attempt, self._supervisor.runners)

        self._cache.function(call.digest, then)

    def _into_pool(self, attempt: NodeAttempt, pool: Pool) -> None:
        if pool.free:
            self.dispatch(attempt, pool.free.pop())
        else:
            pool.waiting.append(attempt)
            pool.warm_up()

    def dispatch(self, attempt: NodeAttempt, process: ExecutionProcess) -> None:
        """See `sessions.CommandDispatcher`."""
        order, action = attempt.order, attempt.order.action
        attempt.process = process
        process.leases[order.lease] = None
        limit = action.timeout_ns
        spec = None
        if process.kind == RUNNER:
            process.load(attempt.digest, attempt.blob)
            attempt.blob = b""
            if limit:
                attempt.timer = self._loop.call_later(limit / 1e9, self._out_of_time, attempt)
        elif session := self._sessions.get(action.session):
            spec, attempt.secrets = session.spec, session.secrets
        units = len(attempt.cores)
        limits = self._supervisor.limits(action, spec)
        group = process.group
        assert group is not None
        group.limit(limits.mem_mib, limits.pids)
        if (self._counts_ooms and len(process.leases) == 1
                and (limits.mem_mib or process.kind != RUNNER)):
            process.oom_kills = group.oom_kills()  # this action is not blamed for earlier ones
        # an endpoint action may use any core
        cores = attempt.cores or (self._cores if action.key != "cpu" else ())
        if cores:  # what an earlier action left running is bound, too
            bind = group.rebind if spec is not None and spec.background == "run" else group.bind
            attempt.held = bind(cores if self.pinned else (), len(cores)) and units > 0
        most = max(units, action.degrees[-1]) if action.resizable else units
        attempt.gpu_token = self._gpus.begin(order.gpus)
        mask = self._gpus.devices.mask(order.gpus)
        run: RunAction | LeaseBackground = RunAction(
            order.lease, attempt.payload, mask, units, most, limit, spec is not None,
            spec.background if spec is not None else "end", limits)
        if action.kind is Kind.BACKGROUND:
            run = LeaseBackground(order.lease, units, limits)
        attempt.payload = b""
        attempt.started_ns = time.monotonic_ns()
        (process.call if process.kind == RUNNER else process.send)(run)
        if attempt.early is not None and process.kind != RUNNER:
            process.send(attempt.early)
        attempt.asked_mib = limits.mem_mib
        if self._next_check is None:
            self._memory_pressure.begin()
            self._next_check = self._loop.call_later(LOOK_S, self._check_running)
        if len(process.leases) == 1 or process.kind != RUNNER:
            self._reports.started(order.lease)

    def _out_of_time(self, attempt: NodeAttempt) -> None:
        """Ends a function at its time limit, which is later if the job was suspended meanwhile."""
        limit = attempt.order.action.timeout_ns
        left = attempt.started_ns + attempt.stalled_ns + limit - time.monotonic_ns()
        if attempt.stalled_ns and left > 0:
            attempt.timer = self._loop.call_later(left / 1e9, self._out_of_time, attempt)
        else:
            self.kill(attempt.order.lease, ActionState.TIMEOUT, too_long(limit / 1e9))

    def _check_running(self) -> None:
        """Checks memory and deadlines, and comes again for as long as anything runs."""
        self._next_check = None
        running = [(attempt, attempt.asked_mib) for attempt in self._attempts.values()
                   if attempt.live and attempt.process]
        self._memory_pressure.look(running, self._sessions.idle_processes)
        self._init_watchdog.look(running)
        if running:
            self._next_check = self._loop.call_later(LOOK_S, self._check_running)

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        """See `ports.Executor`."""
        attempt = self._attempts.get(lease)
        if attempt is None or not attempt.live or attempt.stop is not None:
            return
        if attempt.process is None:
            return self.unstarted(attempt, state, reason)
        attempt.stop_as(state, reason)
        if attempt.process.kind == RUNNER:
            if next(iter(attempt.process.leases)) == lease:  # else when it comes to that call
                self._kill_call(attempt)
        else:
            attempt.process.send(KillCommand(lease, state, reason))

    def _kill_call(self, attempt: NodeAttempt, was_read: bool = False) -> None:
        """Ends the first call of a runner by killing the runner. If the runner has ended that call
        already and works on the next one, it is read instead; `was_read` says that it was.

        The calls that have not begun are taken back first, so that the runner goes on to none of
        them. Nothing is read from a killed runner: it would count as free if it said at last that
        its call has ended, and would take another call with it.
        """
        process = attempt.process
        if self._attempts.get(attempt.order.lease) is not attempt or not attempt.live:
            return  # it was read, or all of this was closed
        assert process is not None
        self._free_behind(process)
        if was_read or len(process.leases) == 1 or process.congested:
            attempt.look_before_kill(process)
            process.hang_up()
            process.kill()
        else:
            self._loop.call_soon(process.read)
            self._loop.call_soon(self._kill_call, attempt, True)

    def resize(self, lease: int, cores: tuple[int, ...]) -> None:
        """See `ports.Executor`."""
        attempt = self._attempts.get(lease)
        if attempt is None:
            return
        attempt.cores = cores
        process = attempt.process
        if process is not None and attempt.live and process.group is not None:
            began = time.monotonic_ns()
            if cores:
                attempt.held = process.group.rebind(cores if self.pinned else (), len(cores))
            process.send(Units(lease, len(cores)))
            attempt.resize_ns += time.monotonic_ns() - began

    def give_input(self, lease: int, kind: int, data: bytes, number: int, other: int) -> None:
        """See `ports.Executor`. A signal that comes before its command starts is kept."""
        attempt = self._attempts.get(lease)
        if attempt is None or not attempt.live:
            return
        order = GiveInput(lease, kind, data, number, other)
        if attempt.process is not None and attempt.process.kind != RUNNER:
            attempt.process.send(order)
        elif attempt.process is None and kind == input_flow.SIGNAL:
            attempt.early = order

    def carry(self, message: StreamMessage, data: bytes) -> None:
        """See `ports.Executor`."""
        self._ports.carry(message, data)

    # ---- what execution processes report ----

    def process_born(self, process: ExecutionProcess) -> Setup:
        """See `execution_processes.Owner`."""
        return self._supervisor.setup(process)

    def process_up(self, process: ExecutionProcess) -> None:
        """See `execution_processes.Owner`."""
        self._supervisor.start_limiter.over(process)
        if process.session:
            return self._sessions.up(process)
        self._supervisor.pool_of(process).booted(process)
        self._idle(process)

    def process_failed(self, process: ExecutionProcess, text: str) -> None:
        """See `execution_processes.Owner`."""
        self._supervisor.check_folder()
        self._supervisor.start_limiter.over(process)
        if not process.fresh:
            process.remove_directory()
        if process.session:
            self._sessions.lost(process, text)
        else:
            self._pool_lost(process, text)

    def _pool_lost(self, process: ExecutionProcess, text: str) -> None:
        pool = self._supervisor.pool_of(process)
        none_left = pool.lost(process)
        if process.up:
            pool.warm_up()
        elif none_left:  # it cannot be built: nobody may wait for it
            while pool.waiting:
                attempt = pool.waiting.popleft()
                if self.waits(attempt):
                    self._fail(attempt, text)

    def ended(self, process: ExecutionProcess, message: Ended) -> None:
        """See `execution_processes.Owner`."""
        attempt = self._attempts.get(message.lease)
        if attempt is None or attempt.process is not process or not attempt.live:
            return  # not a lease of this process
        if message.none_left:
            process.leases.pop(message.lease, None)
        process.process_cpu_ns = message.process_cpu_ns
        outcome = self._checked_outcome(attempt, process, message.outcome)
        if outcome.state is ActionState.OUT_OF_MEMORY and process.session and message.none_left:
            # the kernel killed a part of it; what is left would use the memory of later actions
            process.send(KillCommand(message.lease, outcome.state, outcome.reason))
        self._finish(attempt, outcome, message.payload, message.none_left, settles=True)
        if message.none_left:
            self._give_next_work(process, message.lease)

    def settled(self) -> None:
        """See `execution_processes.Owner`."""
        self._reports.settled()

    def _checked_outcome(self, attempt: NodeAttempt, process: ExecutionProcess, outcome: Outcome
                         ) -> Outcome:
        """Replaces a state that the process may not report, or that the worker knows better, and
        adds how the attempt was isolated and limited.
        """
        state, reason = outcome.state, outcome.reason
        asked, killed = attempt.asked_mib, _KILLED in (outcome.exit_code, 128 + outcome.signal)
        if state not in _REPORTABLE and (attempt.stop is None or attempt.stop[0] is not state):
            state = ActionState.FAILED
        elif process.kind == RUNNER and not (asked or killed):
            return outcome  # its own enforcement is right
        ended_so = state is ActionState.FAILED or (
            state is ActionState.COMPLETED and attempt.order.action.kind is Kind.BACKGROUND)
        if (asked or killed) and self._counts_ooms and process.group is not None:
            kills = process.group.oom_kills()
            if kills > process.oom_kills and ended_so:
                state = ActionState.OUT_OF_MEMORY
                reason = oom_reason(asked, process.group.usage().peak_mem_kib)
            process.oom_kills = kills
        elif killed and ended_so and self._memory_pressure.take_kill():
            state = ActionState.OUT_OF_MEMORY
            reason = oom_reason(asked, outcome.maxrss_kib)
        held = self._enforcer.name if attempt.held else "counted"
        return msgspec.structs.replace(outcome, state=state, reason=reason,
                                       isolation=process.isolation, enforcement=held)

    def gone(self, process: ExecutionProcess, message: Gone) -> None:
        """See `execution_processes.Owner`."""
        attempt = self._attempts.get(message.lease)
        if attempt is None or attempt.process is not process or attempt.live:
            return
        process.leases.pop(message.lease, None)
        self._release(attempt)
        self._give_next_work(process, message.lease)

    def output_chunk(self, process: ExecutionProcess, message: OutputChunk) -> None:
        """See `execution_processes.Owner`. A runner has no output of its own to stream."""
        if message.lease not in process.leases or process.kind == RUNNER:
            return
        attempt = self._attempts.get(message.lease)
        if self._outputs is not None and attempt is not None and attempt.live:
            self._outputs.chunk(attempt.order.action.id, message.lease, message.stream,
                                message.data, attempt.secrets)
        if not message.kept_only:
            self._reports.output(message.lease, message.stream, message.data)

    def background_runnable(self, process: ExecutionProcess) -> None:
        """See `execution_processes.Owner`."""
        if process.session:
            self._reports.background_wants(process.session)

    def credit(self, process: ExecutionProcess, message: CreditInput) -> None:
        """See `execution_processes.Owner`."""
        if message.lease in process.leases and process.kind != RUNNER and message.count > 0:
            self._reports.input_credit(message.lease, min(message.count, input_flow.WINDOW))

    def held_still(self, process: ExecutionProcess, why: str) -> None:
        """See `execution_processes.Owner`."""
        if process.session:
            self._sessions.held_still(process, why)

    def port_report(self, process: ExecutionProcess,
                    message: PortBytes | PortCredit | PortEnded) -> None:
        """See `execution_processes.Owner`."""
        self._ports.report(process, message)

    def process_died(self, process: ExecutionProcess, status: int, none_left: bool,
                     tail: str) -> None:
        """See `execution_processes.Owner`. The actions that ran in it fail."""
        self._supervisor.start_limiter.over(process)
        what = "the runner process" if process.kind == RUNNER else "the sandbox's init"
        reason = process.broken or f"{what} ended ({cause(status)})"
        self._free_behind(process)
        process.forget()
        self._ports.lost(process, reason)
        for lease in sorted(process.leases):
            self._orphan(self._attempts[lease], process, status, reason, none_left, tail)
        if none_left:
            process.leases.clear()
        infeasible = os.WIFEXITED(status) and os.WEXITSTATUS(status) == NEVER_BUILT
        process.kept = bool(process.session) and self._sessions.lost(process, reason, infeasible)
        if not process.session:
            self._pool_lost(process, reason)
        if none_left:
            self._discard(process)

    def _orphan(self, attempt: NodeAttempt, process: ExecutionProcess, status: int, reason: str,
                none_left: bool, tail: str) -> None:
        """Ends an attempt whose execution process died."""
        if attempt.live:
            payload = None
            if process.kind == RUNNER:
                text = attempt.stop[1] if attempt.stop else reason
                payload = encode(ErrorReturn("RunnerDied", text, tail))
            outcome = self._checked_outcome(attempt, process,
                                            attempt.orphaned(process, status, reason))
            self._finish(attempt, outcome, payload, none_left)
        elif none_left:
            self._release(attempt)

    def descendants_ended(self, process: ExecutionProcess) -> None:
        """See `execution_processes.Owner`."""
        for lease in sorted(process.leases):
            self._release(self._attempts[lease])
        process.leases.clear()
        self._discard(process)

    def _discard(self, process: ExecutionProcess) -> None:
        self._supervisor.discard(process, process.kept)
        if process.kept:
            self._sessions.restart(process)

    def fork_server_lost(self) -> None:
        """See `execution_processes.Owner`. A new fork server takes its place."""
        self._sessions.directories_lost()
        self._supervisor.renew()

    def _give_next_work(self, process: ExecutionProcess, lease: int) -> None:
        """Gives a process, in which nothing of a lease is left any more, its next work: a call that
        waits in it, or another action.
        """
        if process.kind == RUNNER and process.leases:
            lease = next(iter(process.leases))
            attempt = self._attempts[lease]
            attempt.taken_ns = attempt.started_ns = time.monotonic_ns()
            self._reports.started(lease)
            if attempt.stop is not None:
                self._kill_call(attempt)
        elif process.session:
            session = self._sessions.get(process.session)
            if session is not None:
                self._sessions.left(session, lease)
        elif process.control is not None:
            self._idle(process)

    def _idle(self, process: ExecutionProcess) -> None:
        """Gives the next waiting attempt to a process that has no session, or puts it back into its
        pool. If that pool has given up its warm processes, it ends the process.
        """
        pool = self._supervisor.pool_of(process)
        while pool.waiting:
            attempt = pool.waiting.popleft()
            if self.waits(attempt):
                return self.dispatch(attempt, process)
        if pool.cooled:
            return process.kill()
        pool.free.append(process)

    # ---- results ----

    def _fail(self, attempt: NodeAttempt, reason: str) -> None:
        self.unstarted(attempt, ActionState.FAILED, reason)

    def unstarted(self, attempt: NodeAttempt, state: ActionState, reason: str) -> None:
        """See `sessions.CommandDispatcher`."""
        self._finish(attempt, Outcome(state, reason=reason), None, True)

    def carried_out(self, attempt: NodeAttempt, payload: bytes) -> None:
        """See `sessions.CommandDispatcher`."""
        self._finish(attempt, Outcome(ActionState.COMPLETED), payload, True)

    def _finish(self, attempt: NodeAttempt, outcome: Outcome, payload: bytes | None,
                none_left: bool, settles: bool = False) -> None:
        if outcome.state is ActionState.FAILED:
            self._supervisor.check_folder()
        attempt.live, attempt.gone = False, none_left
        attempt.end_timer()
        outcome = self._gpus.measured(attempt.gpu_token, outcome).returning(
            payload, attempt.setup_ns, attempt.resize_ns)
        if self._outputs is not None:
            self._outputs.ended(attempt.order.action.id, attempt.order.lease,
                                payload if attempt.order.action.kind is _EXEC else None,
                                attempt.secrets)
        if payload is not None and len(payload) > INLINE_MAX:
            attempt.storing = True
            owner = owner_of_result(attempt.order.action, attempt.order.lease)
            self._cache.keep(payload, owner,
                             lambda data, why: self._kept(attempt, outcome, data, why))
        else:
            if none_left:
                del self._attempts[attempt.order.lease]
            self._reports.finished(attempt.order.lease, outcome, payload, none_left, settles)

    def _kept(self, attempt: NodeAttempt, outcome: Outcome, data: bytes, why: str) -> None:
        if self._attempts.get(attempt.order.lease) is not attempt:
            return  # closed meanwhile
        attempt.storing = False
        if why:
            outcome = msgspec.structs.replace(outcome, state=ActionState.FAILED, reason=why)
        if attempt.gone:
            del self._attempts[attempt.order.lease]
        self._reports.finished(attempt.order.lease, outcome, None if why else data, attempt.gone)

    def _release(self, attempt: NodeAttempt) -> None:
        attempt.gone = True
        if not attempt.storing:  # else its outcome will say so
            del self._attempts[attempt.order.lease]
            self._reports.released(attempt.order.lease)

    # ---- the end ----

    def close(self) -> None:
        """See `ports.Executor`. Blocks until the last process is dead."""
        if self._closed:
            return
        self._closed = True
        self._snapshots.close()
        if self._next_check is not None:
            self._next_check.cancel()
        self._supervisor.close(self._cache.close)
        attempts, self._attempts = list(self._attempts.values()), {}
        for attempt in attempts:
            attempt.end_timer()
            lease = attempt.order.lease
            if attempt.live or attempt.storing:
                outcome = Outcome(ActionState.CANCELLED, reason="its worker was closed")
                self._reports.finished(lease, outcome, None, True)
            else:
                self._reports.released(lease)
        self._sessions.end_all()
        if self._outputs is not None:
            self._outputs.close()
