"""Owns: the calls of services that a node was given - in which batch each runs, again after a copy
died, and how it ended. Must not know how a copy does it, or where it stands.

Law: a call's outcome is told once, whatever happens to copies. Calls of one service on one block
run in the order they came, as many as one as the service allows. One that a copy died under runs
again: with others once, then alone, so that one bad call takes no others along for long.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...config.services import Service, options_of
from ...domain.outcome import Outcome, too_long
from ...domain.service import FALTERED, ServiceSpec, service_of
from ...domain.states import ActionState
from ...errors import InvalidInput
from ...ports import (
    OutOfDeviceMemory,
    Reports,
    ServiceDied,
    ServiceRefused,
    ServiceReply,
    ServiceRequest,
    Store,
)
from ...protocol.message import INLINE_MAX, StartAttempt
from ...protocol.payload import (
    ErrorReturn,
    ServiceCall,
    Stored,
    ValueReturn,
    decode,
    encode,
    owner_of_result,
)
from ...resources.gpu.gpu_meter import GpuMeter
from .gpu_occupancy import Block
from .node_copies import Make, NodeCopies, ServiceCopy

DEATHS_MAX = 3  # copies that may die under one call
DIED = "its copy died under it"


class TookTooLong(ServiceDied):
    """A copy was ended because a call of it had run for its limit: no fault of the others."""


@dataclass(eq=False)
class PendingCall:
    """A call that has no outcome yet."""

    order: StartAttempt
    payload: bytes
    request: ServiceRequest = field(default_factory=lambda: ServiceRequest("", b""))
    tokens: int = 0
    deaths: int = 0
    told: bool = False  # its outcome is known to the broker, but its batch still runs
    restore_ns: int = 0
    metered: int = 0  # its token

    @property
    def timeout_s(self) -> float | None:
        """Its limit on run time."""
        return self.order.action.timeout_ns / 1e9 if self.order.action.timeout_ns else None


class CallQueue:
    """The calls of one service on one block."""

    def __init__(self, service: str, block: Block) -> None:
        self.service, self.block = service, block
        self.calls: deque[PendingCall] = deque()
        self.deaths = 0  # copies that died on their way to it, in a row
        self.task: asyncio.Task[None] | None = None


class ServiceExecutor:
    """A node's services; see `ports.Executor` for what its calls mean.

    Args:
        reports: who is told.
        store: where large payloads lie.
        make: makes a backend for a copy of a service.
        mem_mib: memory that copies of services may take; 0: any.
        meter: tells what a call used of its GPUs, where it can be told.
    """

    def __init__(self, reports: Reports, store: Store, make: Make, mem_mib: int = 0,
                 meter: GpuMeter | None = None) -> None:
        self._reports, self._store, self._meter = reports, store, meter
        self._copies = NodeCopies(make, mem_mib)
        self._queues: dict[tuple[str, Block], CallQueue] = {}
        self._of: dict[int, tuple[CallQueue, PendingCall]] = {}  # by lease
        self._tasks: list[asyncio.Task[None]] = []  # that were cancelled

    def __contains__(self, lease: object) -> bool:
        return lease in self._of

    def prepare(self, spec: ServiceSpec) -> None:
        """A service may be called from now on."""
        try:
            copies: int = options_of(spec).copies
        except InvalidInput:
            copies = 1  # its backend says why it cannot be served
        self._copies.prepare(spec, copies)

    def start(self, order: StartAttempt, payload: memoryview) -> None:
        """Runs a call, or lets it follow on those of its service on that block."""
        call, service = PendingCall(order, bytes(payload)), service_of(order.action.key)
        queue = self._queues.setdefault((service, order.gpus), CallQueue(service, order.gpus))
        self._of[order.lease] = queue, call
        why = self._read(call) if self._copies.spec(service) else (
            f"key: service {service!r} is not known to this node")
        if why:
            return self._end(call, Outcome(ActionState.FAILED, reason=why))
        queue.calls.append(call)
        if queue.task is None:
            queue.task = asyncio.ensure_future(self._serve(queue))
            queue.task.add_done_callback(_check)

    def take_back(self, lease: int) -> bool:
        """Forgets a call that has not begun; says whether."""
        queue, call = self._of[lease]
        if call not in queue.calls:
            return False
        queue.calls.remove(call)
        del self._of[lease]
        return True

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        """Ends a call. One that is in a batch is over for its client at once; its block is busy
        until the batch ends, as the others in it go on."""
        if lease not in self._of:
            return
        queue, call = self._of[lease]
        outcome = Outcome(state, reason=reason)
        if call in queue.calls:
            queue.calls.remove(call)
            self._end(call, outcome)
        elif not call.told:
            call.told = True
            self._reports.finished(lease, outcome, None, False)

    def close(self) -> None:
        """Ends all calls and copies; `closed` is to follow."""
        self._tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        for task in self._tasks:
            task.cancel()
        self._copies.kill()
        for _, call in list(self._of.values()):
            self._end(call, Outcome(ActionState.CANCELLED, reason="its worker was closed"))

    async def closed(self) -> None:
        """Returns when nothing of them is left."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._copies.close()

    # ---- one queue ----

    async def _serve(self, queue: CallQueue) -> None:
        spec = self._copies.spec(queue.service)
        assert spec is not None
        options: Service = options_of(spec)
        if options.batch > 1 and options.batch_wait_ms and len(queue.calls) < options.batch:
            await asyncio.sleep(options.batch_wait_ms / 1e3)
        while queue.calls:
            await self._run(queue, _batch(queue.calls, options))
        queue.task = None
        self._queues.pop((queue.service, queue.block), None)

    async def _run(self, queue: CallQueue, batch: list[PendingCall]) -> None:
        """Gives each call its outcome, or puts it back to the front."""
        called = False
        try:
            async with self._copies.on(queue.service, queue.block) as (copy, took_ns):
                batch, called, queue.deaths = self._wanted(batch), True, 0
                if batch:
                    batch[0].restore_ns = took_ns
                    for call in batch:
                        self._begin(call, queue.block)
                    await self._call(copy, batch)
        except TookTooLong as error:
            self._again(queue, batch, str(error), False)
        except ServiceDied as error:
            queue.deaths += not called
            if queue.deaths >= DEATHS_MAX:
                self._fail(batch, ActionState.FAILED, f"its copies die on their way: {error}",
                           FALTERED)
            else:
                self._again(queue, batch, str(error), called)
        except OutOfDeviceMemory as error:
            self._fail(batch, ActionState.OUT_OF_MEMORY, f"it does not fit on its GPUs: {error}")
        except ServiceRefused as error:
            self._fail(batch, ActionState.FAILED, str(error), FALTERED)

    def _begin(self, call: PendingCall, block: Block) -> None:
        if self._meter is not None:
            self._meter.end(call.metered)  # of a copy that died under it
            call.metered = self._meter.begin(block)
        self._reports.started(call.order.lease)

    def _wanted(self, batch: list[PendingCall]) -> list[PendingCall]:
        """Those that were not cancelled while their copy was brought."""
        for call in batch:
            if call.told:
                self._end(call, Outcome(ActionState.CANCELLED))
        return [call for call in batch if not call.told]

    async def _call(self, copy: ServiceCopy, batch: list[PendingCall]) -> None:
        began = time.monotonic_ns()
        limits = [call.timeout_s for call in batch if call.timeout_s is not None]
        try:
            replies = await _within(copy.backend.call([c.request for c in batch]),
                                    min(limits, default=None), copy.backend.kill)
        except OutOfDeviceMemory as error:
            if len(batch) == 1:
                raise
            half = len(batch) // 2  # what does not fit as one may as two
            for part in (batch[:half], batch[half:]):
                try:
                    await self._call(copy, part)
                except OutOfDeviceMemory:
                    self._fail(part, ActionState.OUT_OF_MEMORY,
                               f"it does not fit on its GPUs: {error}")
            return
        except TimeoutError:
            self._time_out(batch, time.monotonic_ns() - began)
            raise TookTooLong("it was ended, as a call of it took too long") from None
        self._tell(batch, replies, time.monotonic_ns() - began)

    def _tell(self, batch: Sequence[PendingCall], replies: Sequence[ServiceReply],
              spent_ns: int) -> None:
        for call, reply in zip(batch, replies, strict=True):
            state = ActionState.FAILED if reply.error else ActionState.COMPLETED
            payload = encode(ErrorReturn("ServiceError", reply.error) if reply.error
                             else ValueReturn(reply.value))
            outcome = Outcome(state, exec_ns=spent_ns, reason=reply.error, batch=len(batch),
                              restore_ns=call.restore_ns, returned=len(payload))
            if len(payload) > INLINE_MAX:
                owner = owner_of_result(call.order.action, call.order.lease)
                payload = encode(Stored(self._store.put(payload, owner), len(payload)))
            self._end(call, outcome, payload)

    def _time_out(self, batch: Sequence[PendingCall], spent_ns: int) -> None:
        for call in batch:
            limit = call.timeout_s
            if limit is not None and spent_ns >= limit * 1e9:
                self._end(call, Outcome(ActionState.TIMEOUT, exec_ns=spent_ns,
                                        reason=too_long(limit), restore_ns=call.restore_ns))

    def _again(self, queue: CallQueue, batch: Sequence[PendingCall], why: str,
               under_it: bool) -> None:
        """Puts those without an outcome back; `under_it`: the copy may have died of them."""
        for call in reversed(batch):
            if call.order.lease not in self._of:
                continue  # its outcome is known
            call.deaths += under_it
            if call.deaths >= DEATHS_MAX or call.told:
                self._end(call, Outcome(ActionState.FAILED, reason=f"{DIED}: {why}"))
            else:
                queue.calls.appendleft(call)

    def _fail(self, batch: Sequence[PendingCall], state: ActionState, why: str,
              pushed: int = 0) -> None:
        """`pushed`: FALTERED where the service is to blame and not these calls."""
        for call in batch:
            if call.order.lease in self._of:
                self._end(call, Outcome(state, reason=why, pushed=pushed))

    def _end(self, call: PendingCall, outcome: Outcome, payload: bytes | None = None) -> None:
        lease = call.order.lease
        del self._of[lease]
        if self._meter is not None:
            outcome = self._meter.measured(call.metered, outcome)
        if call.told:
            self._reports.released(lease)
        else:
            self._reports.finished(lease, outcome, payload, True)

    def _read(self, call: PendingCall) -> str:
        """Decodes its payload; why it cannot, or an empty string."""
        try:
            told: Any = decode(call.payload)
            if isinstance(told, Stored):
                told = decode(self._store.get(told.digest))
        except msgspec.DecodeError as error:
            return f"payload: not in the protocol ({error})"
        except InvalidInput as error:
            return str(error)
        if not isinstance(told, ServiceCall):
            return f"payload: a service cannot run a {type(told).__name__}"
        call.request = ServiceRequest(told.method, told.arguments)
        call.tokens = told.tokens
        return ""


def _batch(calls: deque[PendingCall], options: Service) -> list[PendingCall]:
    """Takes the next batch; a call that a copy died under twice runs alone."""
    batch = [calls.popleft()]
    tokens = batch[0].tokens
    while calls and len(batch) < options.batch and not _alone(batch[0]) and not _alone(calls[0]):
        tokens += calls[0].tokens
        if options.batch_tokens and tokens > options.batch_tokens:
            break
        batch.append(calls.popleft())
    return batch


def _alone(call: PendingCall) -> bool:
    return call.deaths >= DEATHS_MAX - 1


def _check(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()  # a broken law must be heard


async def _within(work: Awaitable[list[ServiceReply]], limit_s: float | None,
                  kill: Callable[[], None]) -> list[ServiceReply]:
    """Awaits it; after `limit_s` it is killed, and TimeoutError raised when it has ended."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=limit_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if done:
        return task.result()
    kill()
    await asyncio.wait([task])
    if task.cancelled() or task.exception() is not None:
        raise TimeoutError
    return task.result()  # it was done in that very moment
