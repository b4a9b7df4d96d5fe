"""`Future`: a `concurrent.futures.Future` that makes what it needs to wait only for who waits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tangram_hpc.client.client import Client
from tangram_hpc.client.future import Future, as_completed, as_completed_async
from tangram_hpc.client.request import Options, make_action
from tangram_hpc.client.results import Pending, conclude
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput, TangramError
from tangram_hpc.interrupts import futures_lock
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol import payload as pl


def fresh() -> Future:
    return Future(1, lambda action: None)


@contextmanager
def hurried() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def meet(*works: Callable[[], Any]) -> list[Any]:
    """Runs these at once, each in a thread of its own, and returns what they returned."""
    gate, found = threading.Barrier(len(works)), [None] * len(works)

    def run(index: int) -> None:
        gate.wait()
        found[index] = works[index]()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "somebody waits for ever"
    return found


def test_a_future_that_ends_before_it_is_awaited_makes_no_condition() -> None:
    done = fresh()
    assert not done.done()
    done.set_result(5)
    assert done.result() == 5 and done.done()
    assert done._made is None
    assert done.exception() is None and not done.running()
    with pytest.raises(concurrent.futures.InvalidStateError):
        done.set_result(6)
    assert done.result(0) == 5


def test_a_future_keeps_the_rules_of_concurrent_futures() -> None:
    heard: list[Any] = []
    slow, quick, broken = fresh(), fresh(), fresh()
    with pytest.raises(concurrent.futures.TimeoutError):
        slow.result(0.01)
    slow.add_done_callback(lambda future: heard.append(future.result()))
    slow.set_result("late")
    quick.set_result("early")
    quick.add_done_callback(lambda future: heard.append(future.result()))
    broken.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        broken.result()
    assert heard == ["late", "early"] and isinstance(broken.exception(), ValueError)
    assert set(as_completed([slow, quick, broken], 5)) == {slow, quick, broken}
    open_ = fresh()
    done, rest = concurrent.futures.wait([slow, quick, open_], 0.01)
    assert done == {slow, quick} and rest == {open_}
    open_.end_cancelled()
    assert open_.cancelled() and open_.done() and not open_.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        open_.result()
    assert "Future" in repr(fresh()) and "finished" in repr(quick)


def test_a_wait_that_begins_while_the_future_ends_returns() -> None:
    """Once, and whoever comes first."""
    with hurried():
        for turn in range(300):
            one, called = fresh(), list[Any]()
            found = meet(lambda one=one, turn=turn: one.set_result(turn),
                         lambda one=one: one.result(10),
                         lambda one=one, called=called: one.add_done_callback(called.append),
                         lambda one=one: concurrent.futures.wait([one], 10)[0])
            assert found[1] == turn and found[3] == {one} and called == [one]


def test_as_completed_returns_futures_that_end_meanwhile() -> None:
    with hurried():
        for _ in range(60):
            many = [fresh() for _ in range(20)]
            found = meet(lambda many=many: [one.set_result(i) for i, one in enumerate(many)],
                         lambda many=many: sorted(f.result() for f in as_completed(many, 10)))
            assert found[1] == list(range(20))


def test_a_future_can_be_awaited_before_and_after_its_end() -> None:
    async def both() -> list[Any]:
        early, late = fresh(), fresh()
        early.set_result(1)
        asyncio.get_running_loop().call_later(0.01, late.set_result, 2)
        return [await early, await late, await late]

    assert asyncio.run(both()) == [1, 2, 2]


def calls_of_as_completed_async(count: int) -> int:
    """How many functions are called while so many futures end one after the other."""
    futures, ended, calls = [fresh() for _ in range(count)], [], 0

    async def end_them() -> None:
        for future in futures:
            await asyncio.sleep(0)
            future.set_result(5)

    async def main() -> None:
        ending = asyncio.ensure_future(end_them())
        async for future in as_completed_async(futures):
            ended.append(future)
        await ending

    def count_calls(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_calls)
    try:
        asyncio.run(main())
    finally:
        sys.setprofile(None)
    assert ended == futures
    return calls


def test_as_completed_refuses_what_is_not_a_future() -> None:
    with pytest.raises(InvalidInput, match="futures: 1 is not a future; give what `submit`"):
        list(as_completed([1]))  # type: ignore[list-item]


def test_as_completed_async_does_the_same_for_each_future_however_many_there_are() -> None:
    few, many = calls_of_as_completed_async(100), calls_of_as_completed_async(400)
    assert many < 5 * few


def test_as_completed_async_can_be_left_before_the_last_future_has_ended() -> None:
    first, last, ended = fresh(), fresh(), fresh()
    ended.set_exception(ValueError("it failed"))

    async def main() -> list[Future]:
        found = []
        async for future in as_completed_async(iter([last, ended, first])):
            found.append(future)
            if len(found) == 2:
                break
            first.set_result(5)
        return found

    assert asyncio.run(main()) == [ended, first]
    last.set_result(6)  # after the end of the event loop
    assert last.result() == 6


def test_as_completed_async_keeps_no_result_that_its_caller_has_done_with() -> None:
    async def main() -> list[bool]:
        futures = [fresh() for _ in range(3)]
        gone = [weakref.ref(each) for each in futures]
        for each in futures:
            each.set_result(bytes(8))
        seen, ends = [], as_completed_async(iter(futures))
        del futures, each
        async for future in ends:
            del future
            seen.append(gone[len(seen)]() is None)
        return seen

    assert asyncio.run(main()) == [True] * 3


def test_ending_a_future_and_beginning_to_wait_exclude_each_other() -> None:
    """Who begins to wait looks at what has been decided, and who ends it sees who waits."""
    for touch in (lambda one: one.set_result(1), lambda one: one._condition):
        one = fresh()
        with futures_lock:
            thread = threading.Thread(target=touch, args=(one,), daemon=True)
            thread.start()
            thread.join(0.05)
            assert thread.is_alive() and not one.done() and one._made is None
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize(("state", "told"), [
    (ActionState.FAILED, pl.ErrorReturn("ValueError", "no")), (ActionState.TIMEOUT, None),
    (ActionState.COMPLETED, pl.ValueReturn(pickle.dumps(1)[:-1], pickled=True))],
    ids=["failed", "timeout", "unpicklable"])
def test_nothing_is_kept_of_a_failed_action_whose_future_is_dropped(
        state: ActionState, told: pl.Payload | None) -> None:
    future, payload = fresh(), None if told is None else memoryview(pl.encode(told))
    action = make_action(1, Kind.FUNCTION, Options(), 1, "f")
    done = ms.ActionResult(1, Outcome(state), "n", (), 1, 5, 6, 1)
    conclude(Pending(action, b"", future, True, 0), done, payload, None, 0)  # type: ignore[arg-type]
    with pytest.raises(TangramError):
        future.result(0)
    kept = weakref.ref(future)
    del future
    gc.collect()
    assert kept() is None


def test_the_locks_of_futures_are_their_own() -> None:
    """`concurrent.futures.wait` takes the locks of all its futures in the order of their addresses.
    If some of them were one, two threads with futures of other executors among ours could each
    wait for the other."""
    held, other = fresh(), fresh()
    with held._condition:
        thread = threading.Thread(target=other.add_done_callback, args=(print,), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()


def test_a_child_forked_while_a_future_ends_can_use_futures() -> None:
    held, leave = threading.Event(), threading.Event()

    def end_one() -> None:
        with futures_lock:
            held.set()
            leave.wait(20)

    busy = threading.Thread(target=end_one, daemon=True)
    busy.start()
    try:
        assert held.wait(10)
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            one = fresh()
            one.set_result(3)
            os._exit(one.result(5) + 4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    finally:
        leave.set()
        busy.join(10)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """The collector of cyclic garbage is off, as in some trainers."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_an_error_that_was_raised_does_not_keep_its_future() -> None:
    made: list[Future] = []

    def failed(*args: object, **options: object) -> Future:
        one = fresh()
        one.add_done_callback(lambda future: None)  # a condition is made
        one.set_exception(ValueError("no"))
        made.append(one)
        return one

    client = Client.__new__(Client)
    client.submit = failed  # type: ignore[method-assign]
    for fails in (lambda: failed().result(), lambda: list(client.map(len, [""]))):
        with nothing_collected():
            with pytest.raises(ValueError, match="no"):
                fails()
            gone = weakref.ref(made.pop())
            assert gone() is None


def test_a_future_that_has_ended_does_not_keep_its_callbacks() -> None:
    class Waiter:
        def __init__(self, future: Future) -> None:
            self.future, self.ended = future, False
            future.add_done_callback(self.end)

        def end(self, future: Future) -> None:
            self.ended = True

    with nothing_collected():
        waiter = Waiter(fresh())
        waiter.future.set_result(1)
        assert waiter.ended
        gone = weakref.ref(waiter)
        del waiter
        assert gone() is None


def test_map_keeps_no_value_that_was_taken() -> None:
    ended: list[weakref.ref[Future]] = []

    def submit(work: object, value: int, **options: object) -> Future:
        one = fresh()
        one.set_result(value)
        ended.append(weakref.ref(one))
        return one

    client = Client.__new__(Client)
    client.submit = submit  # type: ignore[method-assign]
    with nothing_collected():
        values = client.map(abs, range(3))
        assert [(next(values), ended[n]()) for n in range(2)] == [(0, None), (1, None)]
        assert ended[2]() is not None
