"""Programs that wait for their turn in the HTTP server. The clock is virtual, so nothing waits."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from tangram_hpc.http_api.program_queue import (
    FIRST,
    LEAST,
    TARGET_S,
    AdmissionWindow,
    ProgramQueue,
    TooLate,
)


class VirtualTime(selectors.DefaultSelector):
    """A selector that does not wait: it moves its clock forward."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


def run(work: Any) -> Any:
    """Runs `work(now)` in an event loop whose clock is virtual."""
    selector = VirtualTime()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(work(lambda: selector.now))
    finally:
        loop.close()


# ---- the window --------------------------------------------------------------------------------


def test_the_window_doubles_in_a_round_while_cores_are_free() -> None:
    window = AdmissionWindow()
    for _ in range(int(FIRST)):
        window.ended(0.0, full=True)
    assert window.limit == 2 * FIRST
    window.ended(0.0, full=False)  # nobody waits: nothing is learned
    assert window.limit == 2 * FIRST


def test_the_window_is_cut_once_a_round_and_grows_slowly_after_it() -> None:
    window = AdmissionWindow()
    for _ in range(int(FIRST)):
        window.ended(2 * TARGET_S, full=True)
    assert window.limit == pytest.approx(0.7 * FIRST)
    window.ended(2 * TARGET_S, full=True)
    assert window.limit == pytest.approx(0.49 * FIRST)
    window.ended(0.0, full=True)
    assert window.limit == pytest.approx(0.49 * FIRST + 0.1)
    for _ in range(1000):
        window.ended(2 * TARGET_S, full=True)
    assert window.limit == LEAST


# ---- turns -------------------------------------------------------------------------------------


def test_the_program_whose_time_ends_first_goes_first() -> None:
    async def work(now: Any) -> list[int]:
        queue, order = ProgramQueue(now), []
        queue.window.limit = 1

        async def program(due: float) -> None:
            async with queue.admitted(due, 1.0):
                order.append(due)
                await asyncio.sleep(0.1)

        await asyncio.gather(*map(program, (50, 40, 30, 20)))
        return order

    assert run(work) == [50, 20, 30, 40]  # the first found nobody before it


def test_a_program_that_has_less_time_than_programs_take_is_refused_at_its_turn() -> None:
    async def work(now: Any) -> list[str]:
        queue, told = ProgramQueue(now), []
        queue.window.limit = 1

        async def program(due: float, seconds: float, longest_s: float = 9.0) -> None:
            try:
                async with queue.admitted(due, longest_s):
                    await asyncio.sleep(seconds)
                    told.append(f"{due} ended")
            except TooLate:
                told.append(f"{due} refused at {now():.0f}")

        await asyncio.gather(program(99, 2.0), program(3, 2.0), program(9, 2.0),
                             program(4, 0.5, longest_s=0.6))
        return told

    # the shortest may take 0.6 s at most, so that its time is enough whatever others have taken
    assert run(work) == ["99 ended", "3 refused at 2", "4 ended", "9 ended"]


def test_random_cancellations_leave_no_turn_taken() -> None:
    """Waiting and running programs are cancelled at random; the window is respected, and at the
    end all turns are free."""
    async def work(now: Any) -> tuple[int, int]:
        queue, rng = ProgramQueue(now), random.Random(7)
        queue.window.limit, most = 3, 0
        inside = 0

        async def program(seconds: float) -> None:
            nonlocal inside, most
            async with queue.admitted(now() + 5, 1.0):
                inside += 1
                most = max(most, inside)
                try:
                    await asyncio.sleep(seconds)
                finally:
                    inside -= 1

        tasks = []
        for _ in range(2000):
            tasks.append(asyncio.ensure_future(program(rng.random())))
            await asyncio.sleep(rng.random() / 5)
            if rng.random() < 0.5:
                tasks[rng.randrange(len(tasks))].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        queue.window.limit = 1
        await program(0.0)
        return most, queue._inside

    most, left = run(work)
    assert left == 0 and most >= 3  # it grows while programs end that had no wait for cores


# ---- overload ----------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.8, 2.0, 4.0])
def test_at_any_load_the_cores_give_right_answers_at_their_full_rate(load: float) -> None:
    """Two cores run programs of 0.1 s on average. A client gives up after 3 s and tries again twice
    as verl does. A program that is still at the broker then has cost 20 ms of a core for nothing.
    The same clients without admission get less than half of the rate at twice the load."""
    with_admission, rate = run(lambda now: overload(ProgramQueue(now), load, now))
    assert with_admission > 0.9 * min(load, 1.0) * rate
    if load == 2.0:
        open_door = ProgramQueue(now=lambda: 0.0)  # whose window admits all, and whose clock stands
        open_door.window.limit = 1e9
        without, _ = run(lambda now: overload(open_door, load, now))
        assert without < with_admission / 2


def overload(queue: ProgramQueue, load: float, now: Any
             ) -> Coroutine[Any, Any, tuple[float, float]]:
    """Returns right answers a second in the last 20 of 40 s, and the rate that two cores can do."""
    rng, cores, ended, wasted = random.Random(1), asyncio.Semaphore(2), [], []
    rate = 2 / 0.1

    async def at_the_broker(program: Any) -> None:
        came = now()
        try:
            async with cores:
                program.queue_s = now() - came
                await asyncio.sleep(rng.uniform(0.05, 0.15))
        except asyncio.CancelledError:
            wasted.append(asyncio.ensure_future(clean_up()))
            raise

    async def clean_up() -> None:
        async with cores:
            await asyncio.sleep(0.02)

    async def attempt() -> None:
        async with queue.admitted(now() + 3.0, 1.0) as program:
            await at_the_broker(program)

    async def call() -> None:
        for pause_s in (1.0, 2.0, 0.0):
            try:
                await asyncio.wait_for(attempt(), 3.0)
                ended.append(now())
                return
            except (asyncio.TimeoutError, TooLate):
                await asyncio.sleep(pause_s)

    async def work() -> tuple[float, float]:
        calls = []
        for _ in range(int(40 * load * rate)):
            calls.append(asyncio.ensure_future(call()))
            await asyncio.sleep(1 / (load * rate))
        right = sum(at >= 20 for at in ended) / 20
        await asyncio.gather(*calls)
        await asyncio.gather(*wasted)
        return right, rate

    return work()
