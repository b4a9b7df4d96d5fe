"""How often a broker may call Slurm, and which answer each caller gets; the adapter is a fake."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram_hpc.app.system_clock import SystemClock
from tangram_hpc.domain.slurm import JobOrder, JobRef, JobView
from tangram_hpc.ports import SlurmRejected, SlurmTransient
from tangram_hpc.slurm.budget import Budget, RpcLimits
from tangram_hpc.slurm.budgeted import BudgetedSlurm

S = 10**9


# ---- the decisions ---------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40 * S), min_size=1, max_size=200))
def test_slurm_calls_other_than_queries_are_a_burst_and_then_one_per_30_seconds(
        gaps: list[int]) -> None:
    budget, now, made = Budget(Random(0).uniform), 1_000 * S, []
    for gap in gaps:
        now += gap
        if budget.may_act_at(now) <= now:
            budget.acted(now)
            made.append(now)
        else:
            assert now < budget.may_act_at(now) <= now + budget.limits.refill_ns
    for n, first in enumerate(made):
        for m, last in enumerate(made[n:], 1):
            assert m <= budget.limits.burst + (last - first) // budget.limits.refill_ns


def test_queries_are_thirty_seconds_apart() -> None:
    budget = Budget(Random(0).uniform)
    assert budget.may_query_at(5 * S) <= 5 * S
    budget.queried(5 * S)
    assert budget.may_query_at(6 * S) == 35 * S
    budget.acted(6 * S)
    assert budget.may_query_at(6 * S) == 35 * S and budget.may_act_at(6 * S) <= 6 * S


def test_pauses_after_slurm_failures_double_up_to_a_limit_with_jitter() -> None:
    def pauses(seed: int) -> list[int]:
        budget, found = Budget(Random(seed).uniform), []
        for n in range(12):
            budget.failed(n * 10_000 * S)
            found.append(budget.closed_until - n * 10_000 * S)
            assert budget.may_query_at(0) >= budget.closed_until <= budget.may_act_at(0)
        return found

    one, limits = pauses(1), RpcLimits()
    for n, pause in enumerate(one):
        whole = min(limits.most_ns, limits.first_ns << n)
        assert 0.75 * whole <= pause <= 1.25 * whole
    assert one == pauses(1) != pauses(2)
    budget = Budget(Random(1).uniform)
    budget.failed(0)
    budget.failed(100 * S)
    budget.answered()
    assert budget.closed_until == 0
    budget.failed(200 * S)
    assert budget.closed_until - 200 * S <= 1.25 * limits.first_ns


# ---- who is told what ------------------------------------------------------------------------


class FakeAdapter:
    """A Slurm that knows jobs 1 to 9, and answers when the test says so."""

    name = "fake"

    def __init__(self) -> None:
        self.made: list[tuple[str, Any, int]] = []
        self.fails: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.inside = 0

    async def _call(self, what: str, argument: Any) -> None:
        self.made.append((what, argument, time.monotonic_ns()))
        self.inside += 1
        assert self.inside == 1, "two calls run at once"
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
        finally:
            self.inside -= 1
        if self.fails is not None:
            raise self.fails

    async def submit(self, order: JobOrder) -> int:
        await self._call("submit", order.script)
        return 7

    async def query(self, jobs: Sequence[int], names: Sequence[str]) -> tuple[JobView, ...]:
        await self._call("query", (*jobs, *names))
        return tuple(JobView(j, -1, "RUNNING", name=f"j{j}") for j in range(1, 10)
                     if j in jobs or f"j{j}" in names)

    async def cancel(self, jobs: Sequence[JobRef]) -> None:
        await self._call("cancel", tuple(jobs))

    async def comment(self, job: int, text: str) -> None:
        await self._call("comment", text)

    async def close(self) -> None:
        self.made.append(("close", None, 0))


FAST = RpcLimits(query_ns=S // 20, burst=4, refill_ns=S // 20, first_ns=S // 20, most_ns=S)


async def reply(ask: Callable[[Callable[[Any], None]], None]) -> Any:
    """The answer that `then` gets, which never comes before the call has returned."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ask(answer.set_result)
    assert not answer.done()
    return await asyncio.wait_for(answer, 30)


class WatchedBudget(Budget):
    """Notes when each query was counted; the adapter gets it later on a busy machine."""

    def __init__(self, seed: int, limits: RpcLimits) -> None:
        super().__init__(seed, limits)
        self.times: list[int] = []

    def queried(self, now: int) -> None:
        self.times.append(now)
        super().queried(now)


def play(scene: Callable[[BudgetedSlurm, FakeAdapter], Any], limits: RpcLimits = FAST,
         budget: Budget | None = None) -> Any:
    async def go() -> Any:
        fake = FakeAdapter()
        slurm = BudgetedSlurm(fake, budget or Budget(Random(3).uniform, limits), SystemClock())
        try:
            return await scene(slurm, fake)
        finally:
            await slurm.closed()
            assert fake.made[-1][0] == "close" and fake.inside == 0
    return asyncio.run(go())


def test_every_slurm_call_gets_its_answer() -> None:
    async def scene(slurm: BudgetedSlurm, fake: FakeAdapter) -> None:
        assert await reply(lambda then: slurm.submit(JobOrder("s"), then)) == 7
        assert await reply(lambda then: slurm.cancel([JobRef(1, 2)], then)) is None
        assert await reply(lambda then: slurm.comment(1, "c", then)) is None
        rows = await reply(lambda then: slurm.query([2, 44], then, ["j5"]))
        assert [r.job for r in rows] == [2, 5]
        assert await reply(lambda then: slurm.query([], then)) == ()
        assert await reply(lambda then: slurm.cancel([], then)) is None
        assert [what for what, _, _ in fake.made] == ["submit", "cancel", "comment", "query"]
        calls = slurm.calls()
        assert (calls.adapter, calls.submits, calls.queries, calls.cancels, calls.comments) == (
            "fake", 1, 1, 1, 1)
        assert calls.failed == calls.refused == calls.held_back == 0
    play(scene)


def test_ten_thousand_job_queries_are_merged_into_a_few_calls() -> None:
    budget = WatchedBudget(Random(3).uniform, FAST)

    async def scene(slurm: BudgetedSlurm, fake: FakeAdapter) -> None:
        began, answers = time.monotonic_ns(), []
        for _ in range(5):
            asks = [reply(lambda then, n=n: slurm.query([n % 9 + 1], then)) for n in range(2000)]
            answers += await asyncio.gather(*asks)
        assert all(len(rows) == 1 and rows[0].job == n % 2000 % 9 + 1
                   for n, rows in enumerate(answers))
        times = budget.times
        assert len(times) <= 2 + (time.monotonic_ns() - began) // FAST.query_ns
        assert all(b - a >= FAST.query_ns for a, b in itertools.pairwise(times)), times
        made = [what for what, _, _ in fake.made]
        assert made.count("query") == slurm.calls().queries == len(times) <= 10
    play(scene, budget=budget)


def test_a_call_beyond_the_budget_is_transient_with_the_time_to_retry() -> None:
    async def scene(slurm: BudgetedSlurm, fake: FakeAdapter) -> None:
        answers = await asyncio.gather(*(
            reply(lambda then: slurm.submit(JobOrder("s"), then)) for _ in range(6)))
        late = [a for a in answers if isinstance(a, SlurmTransient)]
        assert answers.count(7) == 4 and len(late) == 2 and len(fake.made) == 4
        now = SystemClock().now_ns()
        assert all(not a.unsure and now < a.again_ns <= now + 20 * S for a in late)
        assert slurm.calls().held_back == 2
    slow = RpcLimits(burst=4, refill_ns=10 * S)
    play(scene, slow)


def test_a_broker_that_used_its_budget_up_cancels_and_writes_its_comment() -> None:
    """They are made once, at its end: a satellite that is not cancelled stays in Slurm's queue."""
    async def scene(slurm: BudgetedSlurm, fake: FakeAdapter) -> None:
        answers = [await reply(lambda then: slurm.submit(JobOrder("s"), then)) for _ in range(5)]
        assert answers[:4] == [7] * 4 and isinstance(answers[4], SlurmTransient)
        assert await reply(lambda then: slurm.cancel([JobRef(1)], then)) is None
        assert await reply(lambda then: slurm.comment(1, "c", then)) is None
        again = await reply(lambda then: slurm.submit(JobOrder("s"), then))
        assert isinstance(again, SlurmTransient)
        assert again.again_ns > answers[4].again_ns + 15 * S  # each counts as a submission
        assert [what for what, _, _ in fake.made] == ["submit"] * 4 + ["cancel", "comment"]
    play(scene, RpcLimits(burst=4, refill_ns=10 * S))


def test_after_a_failure_slurm_is_not_called_for_a_while() -> None:
    async def scene(slurm: BudgetedSlurm, fake: FakeAdapter) -> None:
        fake.fails = SlurmTransient("no answer", unsure=True)
        first = RpcLimits(first_ns=10 * S).first_ns
        fake.gate.clear()
        asked = [asyncio.ensure_future(each) for each in (
            reply(lambda then: slurm.submit(JobOrder("s"), then)),
            reply(lambda then: slurm.cancel([JobRef(1)], then)),
            reply(lambda then: slurm.query([1], then)))]
        await asyncio.sleep(0.01)
        fake.gate.set()
        answers = await asyncio.gather(*asked)
        assert [type(a) for a in answers] == [SlurmTransient] * 3 and len(fake.made) == 1
        assert [a.unsure for a in answers] == [True, False, False]
        again = {a.again_ns for a in answers}
        assert len(again) == 1 and again == {slurm.calls().closed_until_ns}
        assert 0 < again.pop() - SystemClock().now_ns() <= 1.25 * first
        more = await reply(lambda then: slurm.query([1], then))
        assert isinstance(more, SlurmTransient) and "no answer" in str(more) and len(fake.made) == 1
        assert (slurm.calls().failed, slurm.calls().held_back) == (1, 3)
    play(scene, RpcLimits(first_ns=10 * S))


def test_slurm_is_called_again_after_the_pause() -> None:
    async def scene(slurm: BudgetedSlurm, fake: FakeAdapter) -> None:
        fake.fails = SlurmTransient("away")
        assert isinstance(await reply(lambda then: slurm.query([1], then)), SlurmTransient)
        fake.fails = None
        while isinstance(rows := await reply(lambda then: slurm.query([1], then)), SlurmTransient):
            await asyncio.sleep(0.01)
        assert [r.job for r in rows] == [1] and slurm.calls().closed_until_ns == 0
        assert fake.made[-1][2] - fake.made[0][2] >= 0.75 * FAST.first_ns
    play(scene)


def test_a_refusal_by_slurm_starts_no_pause() -> None:
    async def scene(slurm: BudgetedSlurm, fake: FakeAdapter) -> None:
        fake.fails = SlurmRejected("Invalid partition name specified")
        never = await reply(lambda then: slurm.submit(JobOrder("s"), then))
        assert isinstance(never, SlurmRejected)
        fake.fails = None
        assert await reply(lambda then: slurm.submit(JobOrder("s"), then)) == 7
        assert (slurm.calls().refused, slurm.calls().failed) == (1, 0)
        assert slurm.calls().last_error == "Invalid partition name specified"
    play(scene)


def test_closing_the_slurm_port_answers_all_open_calls() -> None:
    async def scene(slurm: BudgetedSlurm, fake: FakeAdapter) -> None:
        fake.gate.clear()
        asked = [asyncio.ensure_future(reply(ask)) for ask in (
            lambda then: slurm.submit(JobOrder("s"), then),
            lambda then: slurm.cancel([JobRef(1)], then), lambda then: slurm.query([1], then))]
        await asyncio.sleep(0.01)
        slurm.close()
        answers = await asyncio.gather(*asked)
        assert [(type(a), a.unsure) for a in answers] == [
            (SlurmTransient, True), (SlurmTransient, False), (SlurmTransient, False)]
        assert isinstance(await reply(lambda then: slurm.query([1], then)), SlurmTransient)
    play(scene)


def test_a_failed_assertion_in_an_adapter_is_raised_in_the_event_loop() -> None:
    async def scene(slurm: BudgetedSlurm, fake: FakeAdapter) -> None:
        broken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: broken.set_result(context["exception"]))
        fake.fails = AssertionError("a law")
        slurm.submit(JobOrder("s"), lambda answer: pytest.fail(str(answer)))
        assert str(await asyncio.wait_for(broken, 30)) == "a law"
    play(scene)
