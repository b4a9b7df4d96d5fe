"""Owns: which process runs which lease. Fills the `Executor` port with processes on this machine.
Must not start, wait for or signal a user's process itself: processes and their fork server do.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from ...domain.action import Kind
from ...domain.outcome import Outcome, too_long
from ...domain.session import SessionSpec
from ...domain.states import ENDED, ActionState
from ...errors import InvalidInput
from ...ports import Reports, SandboxSettings, Store
from ...protocol.message import INLINE_MAX, Start
from ...protocol.payload import ErrorReturn, FunctionCall, decode, encode, owner_of_result
from ...protocol.process_frames import (
    FRAME_MAX,
    RUNNER,
    Ended,
    Gone,
    Kill,
    Piece,
    Run,
    Setup,
    Units,
)
from ...resources.cpu import affinity
from ...resources.cpu.enforce import Enforcer, probe
from ...resources.gpu.devices import Devices
from ...resources.gpu.meter import GpuMeter
from .backends import Backends
from .execution_processes import ExecutionProcess
from .init_watchdog import InitWatchdog
from .jobs import Job, cause
from .memory_pressure import LOOK_S, MemoryPressure
from .payload_cache import PayloadCache, is_stored
from .pools import Pool
from .process_supervisor import ProcessSupervisor
from .runner_watchdog import RunnerWatchdog
from .sessions import Sessions

_EXEC = Kind.EXEC
_FUNCTION = Kind.FUNCTION
_DEFAULTS = SandboxSettings()
_SAID = ENDED - {ActionState.NODE_FAIL, ActionState.PREEMPTED}  # those send an action back


class SandboxExecutor:
    """Runs actions in processes of this machine. Must be made and used on one running asyncio loop.

    Args:
        reports: who is told.
        store: where payloads over the inline limit lie.
        scratch: a node-local directory for what sandboxes write; see `ProcessSupervisor`.
        cores: the units this worker lends.
        settings: what a site or a user chose.
        backends: what can build sandboxes here; None: found out.
        pinned: bind to the units; None: when they are all cores of this process.
        gpus: names the lent GPUs to what runs on them, and measures them; None: there are none.

    Raises:
        InvalidInput: `scratch` or a setting cannot be used.
    """

    def __init__(self, reports: Reports, store: Store, scratch: str | Path,
                 cores: tuple[int, ...], settings: SandboxSettings = _DEFAULTS, *,
                 backends: Backends | None = None, pinned: bool | None = None,
                 gpus: GpuMeter | None = None, enforcer: Enforcer | None = None) -> None:
        self.pinned = pinned = affinity.describe(cores) == "affinity" if pinned is None else pinned
        self._gpus = gpus or GpuMeter(Devices())
        self._reports, self._cores = reports, cores
        self._loop = asyncio.get_running_loop()
        self._cache, self._closed = PayloadCache(store), False
        self._jobs: dict[int, Job] = {}
        backends = backends or Backends.probed(settings.isolation, settings.read_paths)
        self._enforcer = enforcer = enforcer or probe(pinned, settings.enforcement)
        self._counts_ooms = "memory" in enforcer.limits
        units = max(1, len(cores))
        self._supervisor = ProcessSupervisor(self, Path(scratch), units, settings, backends,
                                             enforcer, pinned)
        self._sessions = Sessions(self._supervisor, self, reports, self._cache)
        self._runner_watchdog = RunnerWatchdog(self._free_behind)
        self._memory_pressure = MemoryPressure(not self._counts_ooms, self.kill)
        self._init_watchdog = InitWatchdog(settings.kill_wait_s)
        self._looking: asyncio.TimerHandle | None = None

    @property
    def enforcement(self) -> str:
        """How units are enforced."""
        return self._enforcer.name

    @property
    def fork_server_pid(self) -> int:
        """The process id of the parent of all processes."""
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
            job = self._jobs[lease]
            if job.live and job.stop is None:
                job.stop = (ActionState.CANCELLED, "its session was closed")
        self._sessions.close(one)

    def pack_session(self, session: int) -> None:
        """See `ports.Executor`."""
        self._sessions.pack(session)

    def start(self, order: Start, payload: memoryview | bytes) -> None:
        """See `ports.Executor`. A lease that is known is ignored."""
        if self._closed or order.lease in self._jobs:
            return
        job = self._jobs[order.lease] = Job(order)
        if is_stored(payload):
            try:
                self._cache.fetch(bytes(payload), lambda data, why: self._fetched(job, data, why))
            except msgspec.DecodeError as error:
                self._fail(job, f"payload: {error}")
        else:
            job.payload = bytes(payload)
            self._admit(job)

    def follow(self, order: Start, payload: memoryview) -> bool:
        """See `ports.Executor`: calls of functions wait in the runner itself."""
        before = self._jobs.get(order.after)
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
        job = self._jobs[order.lease] = Job(order)
        job.payload, job.digest = bytes(payload), call.digest
        self._runner_watchdog.watch(process)
        self.dispatch(job, process)
        return True

    def take_back(self, lease: int) -> bool:
        """See `ports.Executor`."""
        job = self._jobs.get(lease)
        if job is None or job.process is None or job.process.kind != RUNNER:
            return False
        self._free_behind(job.process, lease)
        return lease not in self._jobs

    def _free_behind(self, process: ExecutionProcess, asked: int = 0) -> None:
        """Gives back what a runner has not begun, but for the one that is asked for."""
        for lease in reversed(process.take_back()):
            del process.leases[lease], self._jobs[lease]
            if lease != asked:
                self._reports.returned(lease)

    def _fetched(self, job: Job, data: bytes, why: str) -> None:
        if not self.waits(job):
            return
        if why or len(data) > FRAME_MAX - (1 << 20):
            return self._fail(job, why or f"payload: {len(data)} bytes are too many")
        job.payload = data
        self._admit(job)

    def waits(self, job: Job) -> bool:
        """See `sessions.Crew`."""
        return self._jobs.get(job.order.lease) is job and job.live and job.process is None

    def _admit(self, job: Job) -> None:
        action = job.order.action
        if action.kind is _FUNCTION:
            return self._admit_function(job)
        if action.session:
            session = self._sessions.get(action.session)
            if session is None or session.closing:
                return self._fail(job, "session: it is not open on this node")
            return self._sessions.enter(job, session)
        if action.kind is not _EXEC:
            return self._fail(job, "session: reading and writing files needs one")
        try:
            box = self._supervisor.backends.box(SessionSpec(0, trusted=action.trusted))
        except InvalidInput as error:
            return self._fail(job, str(error))
        self._into_pool(job, self._supervisor.pool(box))

    def _admit_function(self, job: Job) -> None:
        try:
            call = decode(job.payload)
        except msgspec.DecodeError as error:
            return self._fail(job, f"payload: not in the protocol ({error})")
        if not isinstance(call, FunctionCall):
            return self._fail(job, f"payload: a runner cannot run a {type(call).__name__}")
        job.digest = call.digest

        def then(blob: bytes, why: str) -> None:
            if self.waits(job):
                if why:
                    return self._fail(job, why)
                job.blob = blob
                self._into_pool(job, self._supervisor.runners)

        self._cache.function(call.digest, then)

    def _into_pool(self, job: Job, pool: Pool) -> None:
        if pool.free:
            self.dispatch(job, pool.free.pop())
        else:
            pool.waiting.append(job)
            pool.warm_up()

    def dispatch(self, job: Job, process: ExecutionProcess) -> None:
        """See `sessions.Crew`."""
        order, action = job.order, job.order.action
        job.process = process
        process.leases[order.lease] = None
        limit = action.timeout_ns
        spec = None
        if process.kind == RUNNER:
            process.load(job.digest, job.blob)
            job.blob = b""
            if limit:
                job.timer = self._loop.call_later(limit / 1e9, self.kill, order.lease,
                                                  ActionState.TIMEOUT, too_long(limit / 1e9))
        elif session := self._sessions.get(action.session):
            spec = session.spec
        units = len(job.cores)
        limits = self._supervisor.limits(action, spec)
        group = process.group
        assert group is not None
        group.limit(limits.mem_mib, limits.pids)
        cores = job.cores or (self._cores if action.key != "cpu" else ())  # an endpoint's: any
        if cores:
            job.held = group.bind(cores if self.pinned else (), len(cores)) and units > 0
        most = max(units, action.degrees[-1]) if action.resizable else units
        job.gpu_token = self._gpus.begin(order.gpus)
        run = Run(order.lease, job.payload, self._gpus.devices.mask(order.gpus), units, most, limit,
                  spec is not None, spec.background if spec is not None else "end", limits)
        job.payload = b""
        job.started_ns = time.monotonic_ns()
        (process.call if process.kind == RUNNER else process.send)(run)
        job.asked_mib = limits.mem_mib
        self._looking = self._looking or self._loop.call_later(LOOK_S, self._look)
        if len(process.leases) == 1 or process.kind != RUNNER:
            self._reports.started(order.lease)

    def _look(self) -> None:
        """Looks at memory, and at who takes too long, for as long as anything runs."""
        self._looking = None
        running = [(job, job.asked_mib) for job in self._jobs.values() if job.live and job.process]
        self._memory_pressure.look(running, self._sessions.idle_processes)
        self._init_watchdog.look(running)
        if running:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        """See `ports.Executor`."""
        job = self._jobs.get(lease)
        if job is None or not job.live or job.stop is not None:
            return
        if job.process is None:
            return self.unstarted(job, state, reason)
        job.stop_as(state, reason)
        if job.process.kind == RUNNER:
            if next(iter(job.process.leases)) == lease:  # else once it is at it
                job.look_before_kill(job.process)
                job.process.kill()
        else:
            job.process.send(Kill(lease, state, reason))

    def resize(self, lease: int, cores: tuple[int, ...]) -> None:
        """See `ports.Executor`."""
        job = self._jobs.get(lease)
        if job is None:
            return
        job.cores = cores
        process = job.process
        if process is not None and job.live and process.group is not None:
            if cores:
                job.held = process.group.rebind(cores if self.pinned else (), len(cores))
            process.send(Units(lease, len(cores)))

    # ---- facts from processes ----

    def process_born(self, process: ExecutionProcess) -> Setup:
        """See `Owner`."""
        return self._supervisor.setup(process)

    def process_up(self, process: ExecutionProcess) -> None:
        """A process waits for orders."""
        self._supervisor.starts.over(process)
        if process.session:
            return self._sessions.up(process)
        self._supervisor.pool_of(process).booted(process)
        self._idle(process)

    def process_failed(self, process: ExecutionProcess, text: str) -> None:
        """A process could not be forked."""
        self._supervisor.starts.over(process)
        if not process.fresh:
            process.tidy()
        if process.session:
            self._sessions.lost(process, text)
        else:
            self._pool_lost(process, text)

    def _pool_lost(self, process: ExecutionProcess, text: str) -> None:
        pool = self._supervisor.pool_of(process)
        none_left = pool.lost(process)
        if process.up:
            pool.warm_up()
        elif none_left:  # it cannot be built: those that wait would wait for ever
            while pool.waiting:
                job = pool.waiting.popleft()
                if self.waits(job):
                    self._fail(job, text)

    def ended(self, process: ExecutionProcess, message: Ended) -> None:
        """An action ended."""
        job = self._jobs.get(message.lease)
        if job is None or job.process is not process or not job.live:
            return  # a runner said what is not its to say
        if message.clean:
            process.leases.pop(message.lease, None)
        process.process_cpu_ns = message.process_cpu_ns
        outcome = self._told(job, process, message.outcome)
        self._finish(job, outcome, message.payload, message.clean, soon=True)
        if message.clean:
            self._left(process, message.lease)

    def settled(self) -> None:
        """See `Owner`."""
        self._reports.settled()

    def _told(self, job: Job, process: ExecutionProcess, outcome: Outcome) -> Outcome:
        """What a process said of an outcome, with what only its worker knows."""
        state, reason = outcome.state, outcome.reason
        if state not in _SAID and (job.stop is None or job.stop[0] is not state):
            state = ActionState.FAILED
        elif process.kind == RUNNER and not job.asked_mib:
            return outcome  # it was told how it is held
        if job.asked_mib and self._counts_ooms and process.group is not None:
            kills = process.group.oom_kills()
            if kills > process.oom_kills and state is ActionState.FAILED:
                state = ActionState.OUT_OF_MEMORY
                reason = f"mem: more than the {job.asked_mib} MiB asked for"
            process.oom_kills = kills
        held = self._enforcer.name if job.held else "counted"
        return msgspec.structs.replace(outcome, state=state, reason=reason,
                                       isolation=process.isolation, enforcement=held)

    def gone(self, process: ExecutionProcess, message: Gone) -> None:
        """What an action left is gone."""
        job = self._jobs.get(message.lease)
        if job is None or job.process is not process or job.live:
            return
        process.leases.pop(message.lease, None)
        self._release(job)
        self._left(process, message.lease)

    def piece(self, process: ExecutionProcess, message: Piece) -> None:
        """A command printed something; what a runner says so is not its to say."""
        if message.lease in process.leases and process.kind != RUNNER:
            self._reports.output(message.lease, message.stream, message.data)

    def process_died(self, process: ExecutionProcess, status: int, clean: bool, tail: str) -> None:
        """A process ended; what ran in it failed with it."""
        self._supervisor.starts.over(process)
        what = "the runner process" if process.kind == RUNNER else "the sandbox's init"
        reason = process.broken or f"{what} ended ({cause(status)})"
        self._free_behind(process)
        process.forget()
        for lease in sorted(process.leases):
            self._orphan(self._jobs[lease], process, status, reason, clean, tail)
        if clean:
            process.leases.clear()
        process.kept = bool(process.session) and self._sessions.lost(process, reason)
        if not process.session:
            self._pool_lost(process, reason)
        if clean:
            self._discard(process)

    def _orphan(self, job: Job, process: ExecutionProcess, status: int, reason: str, clean: bool,
                tail: str) -> None:
        """The process of an action died."""
        if job.live:
            payload = None
            if process.kind == RUNNER:
                text = job.stop[1] if job.stop else reason
                payload = encode(ErrorReturn("RunnerDied", text, tail))
            outcome = job.orphaned(process, status, reason)
            self._finish(job, self._told(job, process, outcome), payload, clean)
        elif clean:
            self._release(job)

    def process_clean(self, process: ExecutionProcess) -> None:
        """What a dead process left is gone."""
        for lease in sorted(process.leases):
            self._release(self._jobs[lease])
        process.leases.clear()
        self._discard(process)

    def _discard(self, process: ExecutionProcess) -> None:
        self._supervisor.discard(process, process.kept)
        if process.kept:
            self._sessions.reborn(process)

    def fork_server_lost(self) -> None:
        """The fork server died, and all processes with it: a new one takes its place."""
        self._sessions.homeless()
        self._supervisor.renew()

    def _left(self, process: ExecutionProcess, lease: int) -> None:
        """Nothing of a lease is left in a process: it goes on with what it was given ahead, or can
        take more."""
        if process.kind == RUNNER and process.leases:
            lease = next(iter(process.leases))
            self._jobs[lease].started_ns = time.monotonic_ns()
            self._reports.started(lease)
            if self._jobs[lease].stop is not None:
                process.kill()
        elif process.session:
            session = self._sessions.get(process.session)
            if session is not None:
                self._sessions.left(session, lease)
        elif process.control is not None:
            self._idle(process)

    def _idle(self, process: ExecutionProcess) -> None:
        """A process without a session can take its next action."""
        pool = self._supervisor.pool_of(process)
        while pool.waiting:
            job = pool.waiting.popleft()
            if self.waits(job):
                return self.dispatch(job, process)
        pool.free.append(process)

    # ---- facts for the worker ----

    def _fail(self, job: Job, reason: str) -> None:
        self.unstarted(job, ActionState.FAILED, reason)

    def unstarted(self, job: Job, state: ActionState, reason: str) -> None:
        """See `sessions.Crew`."""
        self._finish(job, job.unstarted(state, reason), None, True)

    def _finish(self, job: Job, outcome: Outcome, payload: bytes | None, clean: bool,
                soon: bool = False) -> None:
        job.live, job.gone = False, clean
        job.end_timer()
        outcome = self._gpus.measured(job.gpu_token, outcome).returning(payload)
        if payload is not None and len(payload) > INLINE_MAX:
            job.storing = True
            owner = owner_of_result(job.order.action, job.order.lease)
            self._cache.keep(payload, owner, lambda data, why: self._kept(job, outcome, data, why))
        else:
            if clean:
                del self._jobs[job.order.lease]
            self._reports.finished(job.order.lease, outcome, payload, clean, soon)

    def _kept(self, job: Job, outcome: Outcome, data: bytes, why: str) -> None:
        if self._jobs.get(job.order.lease) is not job:
            return  # closed meanwhile
        job.storing = False
        if why:
            outcome = msgspec.structs.replace(outcome, state=ActionState.FAILED, reason=why)
        if job.gone:
            del self._jobs[job.order.lease]
        self._reports.finished(job.order.lease, outcome, None if why else data, job.gone)

    def _release(self, job: Job) -> None:
        job.gone = True
        if not job.storing:  # else its outcome, when it goes up, says so itself
            del self._jobs[job.order.lease]
            self._reports.released(job.order.lease)

    # ---- the end ----

    def close(self) -> None:
        """See `ports.Executor`. Blocks for as long as the last processes take to die."""
        if self._closed:
            return
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        self._supervisor.close(self._cache.close)
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.end_timer()
            lease = job.order.lease
            if job.live or job.storing:
                outcome = job.unstarted(ActionState.CANCELLED, "its worker was closed")
                self._reports.finished(lease, outcome, None, True)
            else:
                self._reports.released(lease)
        self._sessions.end_all()
