"""The Slurm port: an adapter's calls under one broker's rate limit (serves `ports.Slurm`).

Invariants: one call of Slurm is made at a time, by one task. Queries that wait for their time are
merged into one. A call other than a query waits only for the calls in front of it; during a pause,
or for a submission if the rate limit does not allow it, its caller is told so at once and the call
is not made. Each caller gets exactly one answer, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..domain.slurm import JobOrder, JobRef, JobView, SlurmCalls
from ..ports import Clock, SlurmFailure, SlurmRejected, SlurmTransient
from .adapter import SlurmAdapter, wanted
from .budget import Budget

_TEXT_MAX = 200  # characters of the last failure that are kept for people


@dataclass
class _Call:
    kind: str  # name of the counter in `SlurmCalls` that counts this call
    make: Callable[[], Awaitable[Any]]
    then: Callable[[Any], None]


@dataclass
class _Query:
    jobs: tuple[int, ...]
    names: tuple[str, ...]
    then: Callable[[tuple[JobView, ...] | SlurmFailure], None]


class BudgetedSlurm:
    """An adapter's calls under a rate limit; used by one thread, that of the running loop.

    Args:
        adapter: Carries the calls out.
        budget: The rate limit.
        clock: The broker's clock.
    """

    def __init__(self, adapter: SlurmAdapter, budget: Budget, clock: Clock) -> None:
        self._adapter, self._budget, self._clock = adapter, budget, clock
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Call] = deque()  # calls other than queries, FCFS
        self._queries: list[_Query] = []  # queries that will be merged into one
        self._under_way: list[Callable[[Any], None]] = []  # callbacks of the call in progress
        self._wake = asyncio.Event()  # set when a call or query joins
        self._task: asyncio.Task[None] | None = None
        self._calls = SlurmCalls()
        self._closed = False

    # ---- the port ----------------------------------------------------------------------------

    def submit(self, order: JobOrder, then: Callable[[int | SlurmFailure], None]) -> None:
        """Submits a job if the rate limit allows it now; see `ports.Slurm.submit`."""
        self._act(_Call("submits", lambda: self._adapter.submit(order), then))

    def cancel(self, jobs: Sequence[JobRef],
               then: Callable[[SlurmFailure | None], None]) -> None:
        """Cancels jobs, except during a pause; see `ports.Slurm.cancel`."""
        asked = tuple(jobs)
        if not asked:
            self._loop.call_soon(then, None)
            return
        self._act(_Call("cancels", lambda: self._adapter.cancel(asked), then))

    def comment(self, job: int, text: str, then: Callable[[SlurmFailure | None], None]) -> None:
        """Sets a Comment, except during a pause; see `ports.Slurm.comment`."""
        self._act(_Call("comments", lambda: self._adapter.comment(job, text), then))

    def query(self, jobs: Sequence[int],
              then: Callable[[tuple[JobView, ...] | SlurmFailure], None],
              names: Sequence[str] = ()) -> None:
        """Joins the next query that the rate limit allows; see `ports.Slurm.query`."""
        if not jobs and not names:
            self._loop.call_soon(then, ())
        elif not self._refused(then, self._budget.closed_until):
            self._queries.append(_Query(tuple(jobs), tuple(names), then))
            self._go()

    def calls(self) -> SlurmCalls:
        """Returns the counters of all calls; see `ports.Slurm.calls`."""
        return msgspec.structs.replace(self._calls, adapter=self._adapter.name,
                                       closed_until_ns=self._budget.closed_until)

    def close(self) -> None:
        """Answers everything that waits with SlurmTransient; see `ports.Slurm.close`."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        late = SlurmTransient("the broker ends", unsure=True)
        for then in self._under_way:
            self._loop.call_soon(then, late)
        self._under_way = []
        self._drop(SlurmTransient("the broker ends"))

    async def closed(self) -> None:
        """Closes the port if it is open, and returns when all of its tasks and processes have
        ended.
        """
        if not self._closed:
            self.close()
        if self._task is not None:
            await asyncio.wait([self._task])
        await self._adapter.close()

    # ---- one call at a time ------------------------------------------------------------------

    def _act(self, call: _Call) -> None:
        # Cancellations and Comments are as few as submissions, and what is not made at the broker's
        # end is never made: its satellites would stay in the queue.
        now, budget = self._clock.now_ns(), self._budget
        at = budget.may_act_at(now) if call.kind == "submits" else budget.closed_until
        if not self._refused(call.then, at):
            budget.acted(now)
            self._waiting.append(call)
            self._go()

    def _refused(self, then: Callable[[Any], None], until: int) -> bool:
        """Answers at once if no call may be made before `until`; returns whether it did."""
        if not self._closed and until <= self._clock.now_ns():
            return False
        pause = self._budget.closed_until > self._clock.now_ns()
        why = ("the broker ends" if self._closed else f"no answer before: {self._calls.last_error}"
               if pause else "more calls of Slurm than a broker's budget has")
        self._count("held_back")
        self._loop.call_soon(then, SlurmTransient(why, until))
        return True

    def _go(self) -> None:
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._work())
            self._task.add_done_callback(self._report_bug)

    def _report_bug(self, task: asyncio.Task[None]) -> None:
        """Hands an exception that nobody expected to the loop's handler at once."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.call_exception_handler({"message": "a call of Slurm", "exception": error})

    async def _work(self) -> None:
        """Makes calls until none is left; other calls go before queries."""
        while self._waiting or self._queries:
            if self._waiting:
                call = self._waiting.popleft()
                await self._make(call.kind, call.make, [call.then])
                continue
            now = self._clock.now_ns()
            wait_ns = self._budget.may_query_at(now) - now
            if wait_ns <= 0:
                await self._ask()
                continue
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), wait_ns / 1e9)
            except asyncio.TimeoutError:
                pass

    async def _ask(self) -> None:
        """Makes one query that answers all waiting ones."""
        asked, self._queries = self._queries, []
        jobs = tuple(dict.fromkeys(job for each in asked for job in each.jobs))
        names = tuple(dict.fromkeys(name for each in asked for name in each.names))
        self._budget.queried(self._clock.now_ns())
        await self._make("queries", lambda: self._adapter.query(jobs, names),
                         [_part(each) for each in asked])

    async def _make(self, kind: str, make: Callable[[], Awaitable[Any]],
                    thens: list[Callable[[Any], None]]) -> None:
        self._count(kind)
        self._under_way = thens
        answer: Any
        try:
            answer = await make()
        except SlurmRejected as never:
            self._fail("refused", never)
            answer = never
        except SlurmTransient as late:
            self._fail("failed", late)
            self._budget.failed(self._clock.now_ns())
            late.again_ns = self._budget.closed_until
            answer = late
            self._drop(late)
        else:
            self._budget.answered()
        self._under_way = []
        for then in thens:
            self._loop.call_soon(then, answer)

    def _fail(self, kind: str, failed: SlurmFailure) -> None:
        self._count(kind)
        self._calls = msgspec.structs.replace(self._calls, last_error=str(failed)[:_TEXT_MAX])
        if isinstance(failed, SlurmRejected):
            self._budget.answered()

    def _drop(self, why: SlurmTransient) -> None:
        """Tells all waiting callers that their calls are not made."""
        waiting = [call.then for call in self._waiting] + [each.then for each in self._queries]
        self._waiting.clear()
        self._queries = []
        for then in waiting:
            self._count("held_back")
            self._loop.call_soon(then, SlurmTransient(str(why), why.again_ns))

    def _count(self, kind: str) -> None:
        more = {kind: getattr(self._calls, kind) + 1}
        self._calls = msgspec.structs.replace(self._calls, **more)


def _part(asked: _Query) -> Callable[[Any], None]:
    """Returns a callback that takes one query's rows out of the merged answer."""
    def then(answer: tuple[JobView, ...] | SlurmFailure) -> None:
        mine = wanted(answer, asked.jobs, asked.names) if isinstance(answer, tuple) else answer
        asked.then(mine)
    return then
