"""Runs the service calls of a node: forms batches, retries after a copy died, reports outcomes.

Calls of one service on one block form a queue and run in the order in which they came, in batches
as large as the service allows. `node_copies.py` brings a copy to the block; how a copy computes is
its backend's matter.

Invariants: the outcome of a call is reported exactly once, whatever happens to copies. When a copy
dies during a batch, its calls run again: the first time with others and the second time alone, so
that one call that kills copies takes no others along for long.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...config.services import Service, options_of
from ...domain.outcome import Outcome, too_long
from ...domain.service import FALTERED, ServiceSpec, service_of
from ...domain.states import ActionState
from ...errors import InvalidInput, StoreFailed
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
from ...unawaited import raise_failure
from .gpu_occupancy import Block
from .limited_wait import within
from .node_copies import Make, NodeCopies
from .service_copy import ServiceCopy

DEATHS_MAX = 3  # copies that may die under one call
DIED = "its service copy died"


class TookTooLong(ServiceDied):
    """Raised when a copy was ended because one of its calls reached its time limit.

    The other calls of the batch are not to blame.
    """


@dataclass(eq=False)
class PendingCall:
    """A call that has no outcome yet, or whose batch still runs.

    Attributes:
        order: The worker's order to start this attempt.
        payload: The call's payload as it came.
        request: The decoded method and arguments.
        tokens: How many tokens the call counts for in a batch; the client declared this number.
        deaths: How many copies have died under this call.
        reported: The broker knows the outcome, but the call's batch still runs.
        restore_ns: How long it took to bring the copy to the block for this call, ns.
        metered: The meter's number for this call; 0 for none.
        came_ns: When its order came (monotonic).
        setup_ns: How long its last try needed, without `restore_ns`, until its batch began, ns; -1
            before. A call that is not the first of its batch has no restore, so this set-up has it.
        began_ns: When its batch began to run (monotonic); 0 while no batch runs with it.
        beside: How many calls that batch has, itself included.
    """

    order: StartAttempt
    payload: bytes
    request: ServiceRequest = field(default_factory=lambda: ServiceRequest("", b""))
    tokens: int = 0
    deaths: int = 0
    reported: bool = False
    restore_ns: int = 0
    metered: int = 0
    came_ns: int = field(default_factory=time.monotonic_ns)
    setup_ns: int = -1
    began_ns: int = 0
    beside: int = 1

    def begin(self, at: int, beside: int) -> None:
        """Notes that a batch of this many calls has begun to run with it."""
        self.began_ns, self.beside = at, beside

    def requeued(self) -> None:
        """Notes that its batch is over without an answer."""
        self.began_ns, self.beside = 0, 1

    def cut_short(self, state: ActionState, reason: str) -> Outcome:
        """Returns the outcome of a call that ends without an answer of its own. If its batch runs,
        the call has held its GPUs until now, and shared them with the others of the batch.
        """
        if not self.began_ns:
            return Outcome(state, reason=reason)
        return Outcome(state, exec_ns=time.monotonic_ns() - self.began_ns, reason=reason,
                       batch=self.beside, restore_ns=self.restore_ns, setup_ns=self.setup_ns)

    @property
    def timeout_s(self) -> float | None:
        """The call's limit on its run time, seconds; None for no limit."""
        return self.order.action.timeout_ns / 1e9 if self.order.action.timeout_ns else None


class CallQueue:
    """The calls of one service on one block.

    Attributes:
        service: The service's name.
        block: The GPUs of the block.
        calls: The waiting calls, FCFS.
        deaths: How many copies in a row have died while they were brought to this block.
        task: The task that runs the calls; None while there is none.
        free_ns: When its last batch ended, also by the death of a copy (monotonic); 0 before.
    """

    def __init__(self, service: str, block: Block) -> None:
        self.service, self.block = service, block
        self.calls: deque[PendingCall] = deque()
        self.deaths = 0
        self.task: asyncio.Task[None] | None = None
        self.free_ns = 0


class ServiceExecutor:
    """The services of a node; see `ports.Executor` for what its methods mean.

    Args:
        reports: The worker, which is told of starts and outcomes.
        store: Where large payloads are kept.
        make: Makes a backend for a copy of a service.
        mem_mib: Host memory that all copies may take, MiB; 0 for no limit.
        meter: Measures what a call used of its GPUs; None where that cannot be measured.
        cache_mib: Memory of each GPU that weights of parked copies may take, MiB.
    """

    def __init__(self, reports: Reports, store: Store, make: Make, mem_mib: int = 0,
                 meter: GpuMeter | None = None, cache_mib: int = 0) -> None:
        self._reports, self._store, self._meter = reports, store, meter
        self._copies = NodeCopies(make, mem_mib, cache_mib)
        self._queues: dict[tuple[str, Block], CallQueue] = {}
        self._by_lease: dict[int, tuple[CallQueue, PendingCall]] = {}  # lease -> its queue and call
        self._tasks: list[asyncio.Task[None]] = []  # queues' tasks, which `close` cancelled

    def __contains__(self, lease: object) -> bool:
        return lease in self._by_lease

    def prepare(self, spec: ServiceSpec) -> None:
        """Makes a service known, so that it may be called, and begins to load its copies."""
        try:
            copies: int = options_of(spec).copies
        except InvalidInput:
            copies = 1  # the backend will report what is wrong with the options
        self._copies.prepare(spec, copies)

    def start(self, order: StartAttempt, payload: memoryview) -> None:
        """Puts a call into the queue of its service and block, and starts the queue if it does not
        run. A lease that is known is ignored.
        """
        if order.lease in self._by_lease:
            return
        call, service = PendingCall(order, bytes(payload)), service_of(order.action.key)
        queue = self._queues.setdefault((service, order.gpus), CallQueue(service, order.gpus))
        self._by_lease[order.lease] = queue, call
        why = self._decode(call) if self._copies.spec(service) else (
            f"key: service {service!r} is not known to this node")
        if why:
            return self._end(call, Outcome(ActionState.FAILED, reason=why))
        queue.calls.append(call)
        if queue.task is None:
            queue.task = asyncio.ensure_future(self._serve(queue))
            queue.task.add_done_callback(raise_failure)

    def take_back(self, lease: int) -> bool:
        """Forgets a call that has not begun; returns whether it could be forgotten."""
        queue, call = self._by_lease[lease]
        if call not in queue.calls:
            return False
        queue.calls.remove(call)
        del self._by_lease[lease]
        return True

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        """Ends a call with this state and reason; an unknown lease is ignored.

        A call in a running batch is over for its client at once. Its block stays busy until the
        batch ends, because the other calls in it go on.
        """
        if lease not in self._by_lease:
            return
        queue, call = self._by_lease[lease]
        outcome = call.cut_short(state, reason)
        if call in queue.calls:
            queue.calls.remove(call)
            self._end(call, outcome)
        elif not call.reported:
            call.reported = True
            self._reports.finished(lease, outcome, None, False)

    def occupies(self, block: Block) -> bool:
        """Returns whether weights of a service are in the memory of any of these GPUs."""
        return self._copies.occupies(block)

    async def vacate(self, block: Block) -> None:
        """Frees the memory of these GPUs for an action that is no call of a service."""
        await self._copies.vacate(block)

    def close(self) -> None:
        """Ends all calls and kills all copies; call `closed` afterwards to wait for their end."""
        self._tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        for task in self._tasks:
            task.cancel()
        self._copies.kill()
        for _, call in list(self._by_lease.values()):
            self._end(call, call.cut_short(ActionState.CANCELLED, "its worker was closed"))

    async def closed(self) -> None:
        """Returns when nothing of the calls and copies is left."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._copies.close()

    # ---- one queue ----

    async def _serve(self, queue: CallQueue) -> None:
        spec, options = self._declared(queue.service)
        if options.batch > 1 and options.batch_wait_ms and len(queue.calls) < options.batch:
            await asyncio.sleep(options.batch_wait_ms / 1e3)
        while queue.calls:
            if self._copies.spec(queue.service) is not spec:  # a busy queue has no end
                spec, options = self._declared(queue.service)
            await self._run(queue, _batch(queue.calls, options))
        queue.task = None
        self._queues.pop((queue.service, queue.block), None)

    def _declared(self, service: str) -> tuple[ServiceSpec, Service]:
        spec = self._copies.spec(service)
        assert spec is not None
        return spec, options_of(spec)

    async def _run(self, queue: CallQueue, batch: list[PendingCall]) -> None:
        """Runs a batch: each call gets its outcome or goes back to the front of the queue."""
        called = False
        try:
            async with self._copies.on(queue.service, queue.block) as (copy, took_ns):
                batch, called, queue.deaths = self._drop_cancelled(batch), True, 0
                if batch:
                    batch[0].restore_ns = took_ns
                    now = time.monotonic_ns()
                    for call in batch:
                        call.setup_ns = max(0, now - max(call.came_ns, queue.free_ns)
                                            - call.restore_ns)
                        self._report_start(call, queue.block)
                    await self._call(copy, batch)
        except TookTooLong as error:
            self._requeue(queue, batch, str(error), False)
        except ServiceDied as error:
            queue.deaths += not called
            if queue.deaths >= DEATHS_MAX:
                self._fail(batch, ActionState.FAILED,
                           f"its copies die while they are loaded or woken: {error}", FALTERED)
            else:
                self._requeue(queue, batch, str(error), called)
        except OutOfDeviceMemory as error:
            self._fail(batch, ActionState.OUT_OF_MEMORY, f"it does not fit on its GPUs: {error}",
                       0 if called else FALTERED)
        except ServiceRefused as error:
            self._fail(batch, ActionState.FAILED, str(error), FALTERED)
        finally:
            queue.free_ns = time.monotonic_ns()

    def _report_start(self, call: PendingCall, block: Block) -> None:
        if self._meter is not None:
            # ends the measurement of the try during which the copy died
            self._meter.end(call.metered)
            call.metered = self._meter.begin(block)
        self._reports.started(call.order.lease)

    def _drop_cancelled(self, batch: list[PendingCall]) -> list[PendingCall]:
        """Returns the calls that were not cancelled while their copy was brought."""
        for call in batch:
            if call.reported:
                self._end(call, Outcome(ActionState.CANCELLED))
        return [call for call in batch if not call.reported]

    async def _call(self, copy: ServiceCopy, batch: list[PendingCall]) -> None:
        began = time.monotonic_ns()
        for call in batch:
            call.begin(began, len(batch))
        limit = min((c.timeout_s for c in batch if c.timeout_s is not None), default=None)
        try:
            replies = await within(copy.backend.call([c.request for c in batch]), limit,
                                   copy.backend.kill)
        except OutOfDeviceMemory as error:
            if await self._copies.drop_kept(copy.block):
                return await self._call(copy, batch)
            if len(batch) == 1:
                raise
            half = len(batch) // 2  # a batch that does not fit may fit in halves
            for part in (batch[:half], batch[half:]):
                try:
                    await self._call(copy, part)
                except OutOfDeviceMemory:
                    self._fail(part, ActionState.OUT_OF_MEMORY,
                               f"it does not fit on its GPUs: {error}")
            return
        except TimeoutError:
            self._time_out(batch, limit)
            raise TookTooLong("the copy was ended because a call reached its time limit") from None
        self._report_replies(batch, replies, time.monotonic_ns() - began)

    def _report_replies(self, batch: Sequence[PendingCall], replies: Sequence[ServiceReply],
                        spent_ns: int) -> None:
        for call, reply in zip(batch, replies, strict=True):
            state = ActionState.FAILED if reply.error else ActionState.COMPLETED
            payload = encode(ErrorReturn("ServiceError", reply.error) if reply.error
                             else ValueReturn(reply.value))
            outcome = Outcome(state, exec_ns=spent_ns, reason=reply.error, batch=len(batch),
                              restore_ns=call.restore_ns, returned=len(payload),
                              setup_ns=call.setup_ns)
            if len(payload) > INLINE_MAX:
                owner = owner_of_result(call.order.action, call.order.lease)
                try:
                    payload = encode(Stored(self._store.put(payload, owner), len(payload)))
                except StoreFailed as error:
                    outcome = msgspec.structs.replace(outcome, state=ActionState.FAILED,
                                                      reason=str(error))
                    payload = encode(ErrorReturn("StoreFailed", str(error)))
            self._end(call, outcome, payload)

    def _time_out(self, batch: Sequence[PendingCall], reached_s: float | None) -> None:
        for call in batch:
            limit = call.timeout_s
            if limit is not None and limit == reached_s:
                self._end(call, call.cut_short(ActionState.TIMEOUT, too_long(limit)))

    def _requeue(self, queue: CallQueue, batch: Sequence[PendingCall], why: str,
                 blamed: bool) -> None:
        """Puts the calls without an outcome back to the front of the queue.

        Args:
            queue: The queue of the calls.
            batch: The calls, in order.
            why: How the copy ended, for the reason of a call that is given up.
            blamed: Whether the copy may have died of these calls; each then counts one death more.
        """
        for call in reversed(batch):
            if call.order.lease not in self._by_lease:
                continue  # its outcome was reported
            call.deaths += blamed
            if call.deaths >= DEATHS_MAX or call.reported:
                self._end(call, call.cut_short(ActionState.FAILED, f"{DIED}: {why}"))
            else:
                call.requeued()
                queue.calls.appendleft(call)

    def _fail(self, batch: Sequence[PendingCall], state: ActionState, why: str,
              pushed: int = 0) -> None:
        """Ends the calls that have no outcome. `pushed` is FALTERED if the service is to blame."""
        for call in batch:
            if call.order.lease in self._by_lease:
                outcome = call.cut_short(state, why)
                self._end(call, msgspec.structs.replace(outcome, pushed=pushed))

    def _end(self, call: PendingCall, outcome: Outcome, payload: bytes | None = None) -> None:
        lease = call.order.lease
        del self._by_lease[lease]
        if self._meter is not None:
            outcome = self._meter.measured(call.metered, outcome)
        if call.reported:
            self._reports.released(lease)
        else:
            self._reports.finished(lease, outcome, payload, True)

    def _decode(self, call: PendingCall) -> str:
        """Decodes a call's payload; returns why that is impossible, or an empty string."""
        try:
            message: Any = decode(call.payload)
            if isinstance(message, Stored):
                message = decode(self._store.get(message.digest))
        except msgspec.DecodeError as error:
            return f"payload: not in the protocol ({error})"
        except (InvalidInput, StoreFailed) as error:
            return str(error)
        if not isinstance(message, ServiceCall):
            return f"payload: a service cannot run a {type(message).__name__}"
        call.request = ServiceRequest(message.method, message.arguments)
        call.tokens = message.tokens
        return ""


def _batch(calls: deque[PendingCall], options: Service) -> list[PendingCall]:
    """Takes the next batch from the queue; a call under which two copies died runs alone."""
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
