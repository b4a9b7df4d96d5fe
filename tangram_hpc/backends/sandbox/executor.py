"""Owns: which host runs which lease. Fills the `Executor` port with processes on this machine. Must
not start, wait for or signal a user's process itself: hosts and their nursery do.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from ...domain.action import Kind
from ...domain.outcome import Outcome
from ...domain.session import SessionSpec
from ...domain.states import ENDED, ActionState
from ...errors import InvalidInput
from ...ports import Reports, Store
from ...wire.message import INLINE_MAX, Start
from ...wire.payload import ErrorReturn, FunctionCall, decode, encode
from ..cpu import affinity
from . import scratch as folders
from .hosts import Host, NurseryClient
from .hostwire import FRAME_MAX, INIT, RUNNER, Close, Cores, Ended, Gone, Kill, Load, Piece, Run
from .hostwire import Setup as HostSetup
from .jobs import Job, Pool, Session, cause
from .stuck import StuckWatch
from .vault import FUNCTIONS_MAX, Vault, is_stored

_CLOSE_S = 8.0  # an init that has not ended its sandbox by then is killed
_SPARE = 4  # inits beyond the units: an action may hold none
_EXEC = Kind.EXEC
_FUNCTION = Kind.FUNCTION


class SandboxExecutor:
    """Runs actions in processes of this machine. Must be made and used on one running asyncio loop.

    Args:
        reports: who is told.
        store: where payloads over the inline limit lie.
        scratch: a node-local directory for what sandboxes write; made when missing. All of this
            worker's lies in a directory of its own beneath it, which is removed at the end.
        cores: the units this worker lends.
        pinned: bind to them; None: when they are all cores of this process.
        kill_wait_s: seconds from SIGTERM to SIGKILL.
        output_max: bytes kept of each of a command's output streams.
        warm: inits kept ready for actions without a session; None: one a unit, at most 4.

    Raises:
        InvalidInput: `scratch` cannot be used.
    """

    def __init__(
        self,
        reports: Reports,
        store: Store,
        scratch: str | Path,
        cores: tuple[int, ...],
        *,
        pinned: bool | None = None,
        kill_wait_s: float = 2.0,
        output_max: int = 1 << 20,
        warm: int | None = None,
    ) -> None:
        if pinned is None:
            pinned = affinity.describe(cores) == "affinity"
        self.pinned = pinned
        self._enforcement = "affinity" if pinned else "counted"
        self._reports = reports
        self._loop = asyncio.get_running_loop()
        self._vault = Vault(store)
        self._setup = HostSetup(round(kill_wait_s * 1e9), output_max)
        self._jobs: dict[int, Job] = {}
        self._sessions: dict[int, Session] = {}
        self._stuck = StuckWatch(self._free_behind)
        self._closed = False
        self._folder = Path(scratch)
        self._roots: list[str] = []  # of this nursery, and of those that died
        self._numbers = itertools.count(1)
        self._nursery = self._make_nursery()
        units = max(1, len(cores))
        warm = min(units, 4) if warm is None else warm
        self._inits = Pool(lambda: self._nursery.fork(INIT), max(units, warm) + _SPARE, warm)
        self._runners = Pool(lambda: self._nursery.fork(RUNNER), units, 0)
        self._pools = {INIT: self._inits, RUNNER: self._runners}
        self._inits.warm_up()

    def _make_nursery(self) -> NurseryClient:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # resolved, as links inside a sandbox are followed by comparing with it
            root = os.path.realpath(tempfile.mkdtemp(prefix="worker-", dir=self._folder))
        except OSError as error:
            raise InvalidInput(
                f"scratch: cannot use {self._folder} ({error.strerror}); "
                "name a writable directory on a local disk"
            ) from None
        self._roots.append(root)
        return NurseryClient(self, root, self._setup, self._numbers)

    # ---- orders: sessions ----

    def open_session(self, spec: SessionSpec) -> None:
        """See `ports.Executor`."""
        if self._closed or spec.id in self._sessions:
            return
        host = self._inits.give_away()
        ready = host is not None
        if host is None:
            host = self._nursery.fork(INIT)
        host.session = spec.id
        self._sessions[spec.id] = Session(spec.id, host)
        if ready:
            self._inits.warm_up()
            self._session_up(self._sessions[spec.id])

    def close_session(self, session: int) -> None:
        """See `ports.Executor`."""
        one = self._sessions.get(session)
        if one is None or one.closing:
            return
        one.closing = True
        for lease in one.host.leases:
            job = self._jobs[lease]
            if job.live and job.stop is None:
                job.stop = (ActionState.CANCELLED, "its session was closed")
        if one.up:
            self._shut(one.host)

    def _shut(self, host: Host) -> None:
        host.send(Close())
        self._loop.call_later(_CLOSE_S, host.kill)

    def _session_up(self, session: Session) -> None:
        session.up = True
        self._reports.session_up(session.id)
        waiting, session.waiting = session.waiting, type(session.waiting)()
        for job in waiting:
            self._into_session(job, session)

    # ---- orders: actions ----

    def start(self, order: Start, payload: memoryview | bytes) -> None:
        """See `ports.Executor`. A lease that is known is ignored."""
        if self._closed or order.lease in self._jobs:
            return
        job = self._jobs[order.lease] = Job(order)
        if is_stored(payload):
            try:
                self._vault.fetch(bytes(payload), lambda data, why: self._fetched(job, data, why))
            except msgspec.DecodeError as error:
                self._fail(job, f"payload: {error}")
        else:
            job.payload = bytes(payload)
            self._admit(job)

    def follow(self, order: Start, payload: memoryview) -> bool:
        """See `ports.Executor`: calls of functions wait in the runner itself."""
        before = self._jobs.get(order.after)
        host = before.host if before is not None else None
        if host is None or host.kind != RUNNER or host.control is None or (
                order.action.kind is not _FUNCTION or order.action.timeout_ns
                or next(reversed(host.leases), 0) != order.after or is_stored(payload)):
            return False
        try:
            call = decode(payload)
        except msgspec.DecodeError:
            return False
        if not isinstance(call, FunctionCall) or call.digest not in host.functions:
            return False
        job = self._jobs[order.lease] = Job(order)
        job.payload, job.digest = bytes(payload), call.digest
        self._stuck.watch(host)
        self._dispatch(job, host)
        return True

    def take_back(self, lease: int) -> bool:
        """See `ports.Executor`."""
        job = self._jobs.get(lease)
        if job is None or job.host is None or job.host.kind != RUNNER:
            return False
        self._free_behind(job.host, lease)
        return lease not in self._jobs

    def _free_behind(self, host: Host, asked: int = 0) -> None:
        """Gives back what a runner has not begun, but for the one that is asked for."""
        for lease in reversed(host.take_back()):
            del host.leases[lease], self._jobs[lease]
            if lease != asked:
                self._reports.returned(lease)

    def _fetched(self, job: Job, data: bytes, why: str) -> None:
        if not self._waits(job):
            return
        if why or len(data) > FRAME_MAX - (1 << 20):
            return self._fail(job, why or f"payload: {len(data)} bytes are too many")
        job.payload = data
        self._admit(job)

    def _waits(self, job: Job) -> bool:
        return self._jobs.get(job.order.lease) is job and job.live and job.host is None

    def _admit(self, job: Job) -> None:
        action = job.order.action
        if action.kind is _FUNCTION:
            return self._admit_function(job)
        if action.session:
            session = self._sessions.get(action.session)
            if session is None or session.closing:
                return self._fail(job, "session: it is not open on this node")
            return self._into_session(job, session)
        if action.kind is not _EXEC:
            return self._fail(job, "session: reading and writing files needs one")
        self._into_pool(job, self._inits)

    def _admit_function(self, job: Job) -> None:
        try:
            call = decode(job.payload)
        except msgspec.DecodeError as error:
            return self._fail(job, f"payload: not in the protocol ({error})")
        if not isinstance(call, FunctionCall):
            return self._fail(job, f"payload: a runner cannot run a {type(call).__name__}")
        job.digest = call.digest

        def then(blob: bytes, why: str) -> None:
            if self._waits(job):
                if why:
                    return self._fail(job, why)
                job.blob = blob
                self._into_pool(job, self._runners)

        self._vault.function(call.digest, then)

    def _into_session(self, job: Job, session: Session) -> None:
        is_exec = job.order.action.kind is _EXEC
        if not session.up or (is_exec and session.running):
            session.waiting.append(job)
            return
        if is_exec:
            session.running = job.order.lease
        self._dispatch(job, session.host)

    def _into_pool(self, job: Job, pool: Pool) -> None:
        if pool.free:
            self._dispatch(job, pool.free.pop())
        else:
            pool.waiting.append(job)
            pool.warm_up()

    def _dispatch(self, job: Job, host: Host) -> None:
        order, action = job.order, job.order.action
        job.host = host
        host.leases[order.lease] = None
        limit = action.timeout_ns
        if host.kind == RUNNER:
            self._load(job, host)
            if limit:
                reason = f"it ran longer than its limit of {limit / 1e9:g} s"
                stop = (order.lease, ActionState.TIMEOUT, reason)
                job.timer = self._loop.call_later(limit / 1e9, self.kill, *stop)
        bound = job.cores if self.pinned else ()
        keep = action.session != 0
        units = len(job.cores)
        run = Run(order.lease, job.payload, bound, order.gpus, units, limit, keep)
        job.payload = b""
        job.started_ns = time.monotonic_ns()
        (host.call if host.kind == RUNNER else host.send)(run)
        if len(host.leases) == 1 or host.kind != RUNNER:
            self._reports.started(order.lease)

    def _load(self, job: Job, host: Host) -> None:
        if job.digest not in host.functions:
            drop = ""
            if len(host.functions) >= FUNCTIONS_MAX:
                drop = next(iter(host.functions))
                del host.functions[drop]
            host.functions[job.digest] = None
            host.send(Load(job.digest, job.blob, drop))
        job.blob = b""

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        """See `ports.Executor`."""
        job = self._jobs.get(lease)
        if job is None or not job.live or job.stop is not None:
            return
        if job.host is None:
            return self._finish(job, job.unstarted(state, reason), None, True)
        job.stop = (state, reason)
        if job.host.kind == RUNNER:
            if next(iter(job.host.leases)) == lease:  # else once it is at it
                job.host.kill()
        else:
            job.host.send(Kill(lease, state, reason))

    def resize(self, lease: int, cores: tuple[int, ...]) -> None:
        """See `ports.Executor`."""
        job = self._jobs.get(lease)
        if job is None:
            return
        job.cores = cores
        if job.host is not None and job.live:
            bound = cores if self.pinned else ()
            if bound and job.host.kind == RUNNER:  # it is busy with the function, cannot listen
                affinity.apply(job.host.pid, bound)
            job.host.send(Cores(lease, bound, len(cores)))

    # ---- facts from hosts ----

    def host_up(self, host: Host) -> None:
        """A host waits for orders."""
        if host.session:
            session = self._sessions[host.session]
            if session.closing:
                self._shut(host)
            else:
                self._session_up(session)
        else:
            self._pools[host.kind].booted(host)
            self._idle(host)

    def host_failed(self, host: Host, text: str) -> None:
        """A host could not be forked."""
        if host.session:
            return self._session_lost(host, "" if self._sessions[host.session].closing else text)
        pool = self._pools[host.kind]
        if pool.failed(host):
            while pool.waiting:
                job = pool.waiting.popleft()
                if self._waits(job):
                    self._fail(job, text)

    def ended(self, host: Host, message: Ended) -> None:
        """An action ended."""
        job = self._jobs.get(message.lease)
        if job is None or job.host is not host or not job.live:
            return  # a runner said what is not its to say
        outcome = message.outcome
        if outcome.state not in ENDED:
            outcome = msgspec.structs.replace(outcome, state=ActionState.FAILED)
        if message.clean:
            host.leases.pop(message.lease, None)
        self._finish(job, outcome, message.payload, message.clean)
        if message.clean:
            self._next(host)

    def gone(self, host: Host, message: Gone) -> None:
        """What an action left is gone."""
        job = self._jobs.get(message.lease)
        if job is None or job.host is not host or job.live:
            return
        host.leases.pop(message.lease, None)
        self._release(job)
        self._next(host)

    def _next(self, host: Host) -> None:
        """A host goes on with what it was given ahead, or can take more."""
        if host.kind == RUNNER and host.leases:
            lease = next(iter(host.leases))
            self._jobs[lease].started_ns = time.monotonic_ns()
            self._reports.started(lease)
            if self._jobs[lease].stop is not None:
                host.kill()
        else:
            self._idle(host)

    def piece(self, host: Host, message: Piece) -> None:
        """An action printed something."""
        if message.lease in host.leases and message.stream in (1, 2):
            self._reports.output(message.lease, message.stream, message.data)

    def host_died(self, host: Host, status: int, clean: bool, tail: str) -> None:
        """A host ended; what ran in it failed with it."""
        what = "the runner process" if host.kind == RUNNER else "the sandbox's init"
        reason = f"{what} ended ({cause(status)})"
        self._free_behind(host)
        host.forget()
        for lease in sorted(host.leases):
            job = self._jobs[lease]
            if job.live:
                payload = None
                if host.kind == RUNNER:
                    payload = encode(ErrorReturn("RunnerDied", job.stop[1] if job.stop else reason,
                                                 tail))  # fmt: skip
                outcome = job.orphaned(host, status, reason, self._enforcement)
                self._finish(job, outcome, payload, clean)
            elif clean:
                self._release(job)
        if clean:
            host.leases.clear()
        if host.session:
            self._session_lost(host, reason)
        else:
            pool = self._pools[host.kind]
            pool.lost(host)
            pool.warm_up(at_least=1 if host.kind == RUNNER else 0)

    def host_clean(self, host: Host) -> None:
        """What a dead host left is gone."""
        for lease in sorted(host.leases):
            self._release(self._jobs[lease])
        host.leases.clear()

    def nursery_lost(self) -> None:
        """The nursery died, and all hosts with it: a new one takes its place."""
        self._nursery.close()
        self._nursery = self._make_nursery()

    def _session_lost(self, host: Host, reason: str) -> None:
        session = self._sessions.pop(host.session)
        state = ActionState.CANCELLED if session.closing else ActionState.FAILED
        text = "its session was closed" if session.closing else reason
        for job in session.waiting:
            if self._waits(job):
                self._finish(job, job.unstarted(state, text), None, True)
        self._reports.session_down(session.id, "" if session.closing else reason)

    def _idle(self, host: Host) -> None:
        """A host can take its next action."""
        if host.session:
            session = self._sessions.get(host.session)
            if session is None or session.running in host.leases:
                return
            session.running = 0
            while session.waiting and not session.running:
                job = session.waiting.popleft()
                if self._waits(job):
                    self._into_session(job, session)
            return
        pool = self._pools[host.kind]
        while pool.waiting:
            job = pool.waiting.popleft()
            if self._waits(job):
                return self._dispatch(job, host)
        pool.free.append(host)

    # ---- facts for the worker ----

    def _fail(self, job: Job, reason: str) -> None:
        self._finish(job, job.unstarted(ActionState.FAILED, reason), None, True)

    def _finish(self, job: Job, outcome: Outcome, payload: bytes | None, clean: bool) -> None:
        job.live = False
        job.end_timer()
        job.gone = clean
        if payload is not None and len(payload) > INLINE_MAX:
            job.storing = True
            self._vault.keep(payload, lambda data, why: self._kept(job, outcome, data, why))
        else:
            if clean:
                del self._jobs[job.order.lease]
            self._reports.finished(job.order.lease, outcome, payload, clean)

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
        self._nursery.close()
        for root in self._roots:
            folders.remove(root)
        with suppress(OSError):  # the last worker of this folder
            self._folder.rmdir()
        self._vault.close()
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.end_timer()
            lease = job.order.lease
            if job.live or job.storing:
                outcome = job.unstarted(ActionState.CANCELLED, "its worker was closed")
                self._reports.finished(lease, outcome, None, True)
            else:
                self._reports.released(lease)
        sessions, self._sessions = list(self._sessions), {}
        for session in sessions:
            self._reports.session_down(session, "")
