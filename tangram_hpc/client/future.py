"""`Future`: the result of one action, and details of how it was served.

A `Future` is a `concurrent.futures.Future` (`result`, `exception`, `add_done_callback`,
`as_completed`, `wait`) that can also be awaited. The connection's thread completes it.

The condition, the list of waiters and the list of callbacks of the base class are made when they
are first needed. Of a thousand futures most have ended before anybody waits for them. Making ten
objects for each would take a third of the client's CPU time per action, most of it for the garbage
collector.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from dataclasses import dataclass
from typing import Any

import msgspec

from ..domain.ids import show
from ..domain.rollouts import Routed
from ..domain.states import ActionState
from ..errors import ActionFailed, ActionOutOfMemory, ActionTimeout, ClientClosed, InvalidInput
from ..interrupts import CallersLock, InterruptibleCondition, check_wait, futures_lock
from ..protocol.input_flow import SIGNALS
from ..protocol.message import ActionResult


@dataclass(frozen=True)
class Details:
    """How an action was served; see `Future.details`.

    Attributes:
        id: the action's id, as commands and accounting show it.
        state: the state in which it ended.
        node: the node on which it ran.
        cores: the numbers of the CPUs that it held.
        attempt: the number of the attempt that gave this result; the first is 1.
        queue_s: seconds from submission to grant, by the broker's clock. The time in which the
            action was held back at the client is included, by the client's clock.
        held_s: seconds from grant to finish, by the broker's clock.
        exec_s: seconds of run time, by the node's clock.
        act_s: seconds from submission to result, by the client's clock.
        cpu_s: user and system seconds of its processes.
        maxrss_kib: the largest resident set of any one of its processes, in KiB.
        isolation: the isolation backend that it had.
        enforcement: how its limits were enforced.
        reason: one line that says why the action ended in this state, where the state does not
            tell.
        grants: (ns since the grant, units from then on) for each size that it had.
        restore_s: for the call that brought its service to the GPUs: how long that took, in
            seconds. For other calls of the same batch this time is in `queue_s`.
        batch: how many calls of a service ran together, this one included.
        exit_code: as for `ExecResult`, for actions of every kind.
        lower_bounds: which of "cpu" and "maxrss" are lower bounds only, as they could not be
            measured to the end.
    """

    id: str
    state: ActionState
    node: str
    cores: tuple[int, ...]
    attempt: int
    queue_s: float
    held_s: float
    exec_s: float
    act_s: float
    cpu_s: float
    maxrss_kib: int
    isolation: str
    enforcement: str
    reason: str
    grants: tuple[tuple[int, int], ...] = ()
    restore_s: float = 0.0
    batch: int = 1
    exit_code: int = 0
    lower_bounds: tuple[str, ...] = ()

    @property
    def system_s(self) -> float:
        """Seconds in which the action neither waited for units, nor waited for its service to be
        brought to GPUs, nor ran: the overhead of the system."""
        return max(0.0, self.act_s - self.queue_s - self.restore_s - self.exec_s)


_FAILURES = {ActionState.TIMEOUT: ActionTimeout, ActionState.OUT_OF_MEMORY: ActionOutOfMemory}


class ExecResult(msgspec.Struct, frozen=True, gc=False):
    """The result of a command. It is true in a condition if the command completed.

    Attributes:
        state: COMPLETED (exit code 0), FAILED, TIMEOUT or OUT_OF_MEMORY.
        exit_code: 0 if the command completed, and only then. Otherwise the command's own exit code,
            128 + N after signal N (137 after SIGKILL), or 1 where neither is known; 124 for TIMEOUT
            and 137 for OUT_OF_MEMORY. A command that could not be started has what a shell gives:
            127 for a program that is not there, 126 for one that cannot be run, and for a `cwd`
            that cannot be entered; `reason` then says which.
        signal: the number of the signal that ended it; 0 for none.
        stdout, stderr: the output, as bytes; long output is kept in part, see `output_max` and
            `keep` of `Client.submit`.
        cut: how many bytes of stdout and of stderr were dropped.
        reason: one line that says why it ended so, where the state does not say it.
        cpu_s: user and system seconds of its processes.
        maxrss_kib: the largest resident set of any one of its processes, in KiB.
        grants: (ns since the grant, units from then on) for each size that it had.
        isolation: the isolation backend that it had.
        enforcement: how its limits were enforced.
        lower_bounds: which of "cpu" and "maxrss" are lower bounds only, as they could not be
            measured to the end.

    Example:
        result = client.submit("make test").result()
        print(result.text if result else result.stderr.decode())
    """

    state: ActionState
    exit_code: int
    signal: int
    stdout: bytes
    stderr: bytes
    cut: tuple[int, int]
    reason: str
    cpu_s: float = 0.0
    maxrss_kib: int = 0
    grants: tuple[tuple[int, int], ...] = ()
    isolation: str = ""
    enforcement: str = ""
    lower_bounds: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the command ended with exit code 0."""
        return self.state is ActionState.COMPLETED

    def __bool__(self) -> bool:
        return self.state is ActionState.COMPLETED

    @property
    def text(self) -> str:
        """`stdout` as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")

    @property
    def returncode(self) -> int:
        """The exit code, or minus the number of the signal, as `subprocess` gives it."""
        return -self.signal if self.signal else self.exit_code

    def check(self) -> ExecResult:
        """Returns this result if the command completed, and raises otherwise.

        Raises:
            ActionTimeout: the command ran longer than its `timeout`.
            ActionOutOfMemory: it took more memory than it may have.
            ActionFailed: it failed. The message holds the reason and the end of stderr.
        """
        if self.ok:
            return self
        tail = self.stderr.decode(errors="replace")[-400:].strip()
        end = f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"
        kind = _FAILURES.get(self.state, ActionFailed)
        raise kind(f"{self.state.value} ({end}) {self.reason} {tail}".strip(), self)


_PYTHON_ENDS = ("Python is ending, so a client can neither submit nor wait; close what uses it "
                "before, in a with block or a function of atexit")


class Future(concurrent.futures.Future[Any]):
    """The result of one action, now or later; made by `submit` and the like.

    It is a `concurrent.futures.Future` and can be awaited. `result()` returns the value, or raises
    an error that the docstring of `Client.submit`, `Client.call` or `Session.read` lists; it raises
    CancelledError after a `cancel()` of this client.

    Attributes:
        action: the action's id, as a number; see `id`.
        told: the broker's message of the end, and the ACT in ns; None before the end. Use `details`
            instead.

    Example:
        futures = [client.submit(["sh", path]) for path in paths]
        for future in tangram_hpc.as_completed(futures):
            print(future.id, future.result().exit_code)
    """

    def __init__(self, action: int, cancel: Callable[[int], None],
                 interrupt: Callable[[int, int], None] | None = None,
                 lock: CallersLock | None = None) -> None:
        # the attributes that the base class's __init__ sets, except those that `_condition` makes
        # later
        self._state = PENDING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._made: InterruptibleCondition | None = None
        self.action = action
        self.told: tuple[ActionResult, int] | None = None
        self._cancel, self._interrupt, self._lock = cancel, interrupt, lock

    @property
    def _condition(self) -> InterruptibleCondition:  # type: ignore[override]
        """The lock that every method of the base class takes before it reads the state. A future
        that has not ended when Python finalizes fails here, so that no wait for it can hang; an
        error raised here would also come from `repr`, and from a generator that only gives up."""
        if sys.is_finalizing() and not self.done():
            self._exception, self._state = ClientClosed(_PYTHON_ENDS), FINISHED
        if self._made is None:
            made = InterruptibleCondition()
            with futures_lock:  # it is also held while a future without a condition ends
                if self._made is None:  # no call from here on: no signal handler comes in between
                    self._waiters: list[Any] = []
                    self._done_callbacks: list[Callable[[Any], object]] = []
                    self._made = made
        return self._made

    def set_result(self, result: Any) -> None:
        """Ends the future with a value; for the connection's thread."""
        with futures_lock:
            if self._made is None and self._state == PENDING:
                self._result = result
                self._state = FINISHED
                return
        super().set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end and returns the action's value.

        Args:
            timeout: the longest wait, in seconds; None for no limit. The action goes on after it.

        Raises:
            TimeoutError: the action has not ended in time.
            CancelledError: this client cancelled the action.
            ActionFailed: the action has no value; a subclass says why.
            WouldDeadlock: the wait could not end where it was begun: in a callback of this client,
                or in a signal handler that has interrupted a call of it.
        """
        if self._state == FINISHED and self._exception is None:
            return self._result
        check_wait(self, self._lock, timeout)
        try:
            return super().result(timeout)
        finally:
            # Otherwise an error would hold this frame, and the frame the future with its error: a
            # cycle that keeps the caller's arguments until a garbage collection.
            del self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end and returns what `result` would raise; None for an action with a value.
        It raises what `result` raises for a wait that ends too early."""
        check_wait(self, self._lock, timeout)
        return super().exception(timeout)

    def _invoke_callbacks(self) -> None:
        super()._invoke_callbacks()  # type: ignore[misc]
        # An ended future calls a new callback at once. The old ones often hold the future.
        self._done_callbacks.clear()

    def done(self) -> bool:
        """Whether the action has ended."""
        return self._state in (FINISHED, CANCELLED, CANCELLED_AND_NOTIFIED)

    def end_in_child(self, error: Exception) -> None:
        """Ends the copy in the child of a fork; see `forked.end_copy`."""
        if not self.done():
            self._made, self._exception, self._state = None, error, FINISHED

    @property
    def details(self) -> Details | None:
        """How the action was served; None until it has ended, or if it never reached the broker."""
        if self.told is None:
            return None
        r, act_ns = self.told
        o = r.outcome
        return Details(show(r.action), o.state, r.node, r.cores, r.attempt, r.queue_ns / 1e9,
                       r.held_ns / 1e9, o.exec_ns / 1e9, act_ns / 1e9, o.cpu_ns / 1e9,
                       o.maxrss_kib, o.isolation, o.enforcement, o.reason, r.grants,
                       o.restore_ns / 1e9, o.batch, o.exit_status, o.lower_bounds)

    @property
    def route(self) -> Routed | None:
        """For a turn of a rollout pool that has ended: the service and bucket that it went to, and
        how ("stay", "transfer" or "prefill"). None before the end and for other actions."""
        return self.told[0].route if self.told is not None else None

    @property
    def id(self) -> str:
        """The action's id, as commands and accounting show it."""
        return show(self.action)

    def __await__(self) -> Generator[Any, None, Any]:
        check_wait(self, self._lock, None)
        return asyncio.wrap_future(self).__await__()

    def cancel(self) -> bool:
        """Asks the broker to cancel the action, whether it runs or not; returns at once. The future
        ends when the broker has confirmed; at once for an action that is held back at the client.

        Returns:
            False if the action has ended already.
        """
        if self.done():
            return False
        self._cancel(self.action)
        return True

    def interrupt(self, number: int = signal.SIGINT) -> bool:
        """Sends a signal to the action's command; returns at once. A command that has not started
        gets it when it starts. In a shell the command that runs in the foreground gets it, and the
        shell goes on. Functions and calls of services take no signal.

        Args:
            number: SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT or SIGTSTP.

        Returns:
            False if the action has ended already, or is none that takes signals.

        Raises:
            InvalidInput: it is another signal.
        """
        if number not in SIGNALS:
            raise InvalidInput(f"number: signal {number} cannot be sent to an action; one of "
                               f"{', '.join(signal.Signals(each).name for each in SIGNALS)} can")
        if self.done() or self._interrupt is None:
            return False
        self._interrupt(self.action, int(number))
        return True

    def end_cancelled(self) -> None:
        """Ends the future as cancelled, when the broker has confirmed or has never had the action.
        """
        if super().cancel():
            self.set_running_or_notify_cancel()


def check_python_runs() -> None:
    """Raises an error where a wait for a connection could not end. When Python finalizes, after the
    functions of `atexit`, the connection's thread stands still, but finalizers and generators that
    are closed then still run.

    Raises:
        ClientClosed: Python finalizes.
    """
    if sys.is_finalizing():
        raise ClientClosed(_PYTHON_ENDS)


def as_completed(futures: Iterable[Future], timeout: float | None = None) -> Iterator[Future]:
    """Yields futures as they end, as `concurrent.futures.as_completed` does.

    Args:
        futures: the futures.
        timeout: the longest wait for all of them, in seconds; None for no limit.

    Raises:
        InvalidInput: one of them is not a future.
        TimeoutError: not all of them ended in time.
    """
    # That of the standard library holds the locks of all futures for a moment; after a ^C in it,
    # those that it had taken by then are never free again, and the client's thread waits for them.
    until = None if timeout is None else time.monotonic() + timeout
    waiting, ended = dict.fromkeys(_only_futures(futures)), queue.SimpleQueue[Any]()
    del futures  # it may hold the results, which the caller may be done with
    count, hear = len(waiting), ended.put
    try:
        for each in waiting:
            if isinstance(each, Future):
                check_wait(each, each._lock, timeout)
            each.add_done_callback(hear)
        while waiting:
            if ended.empty():
                check_python_runs()
            left_s = None if until is None else max(0.0, until - time.monotonic())
            try:
                future = ended.get(timeout=left_s)
            except queue.Empty:
                raise concurrent.futures.TimeoutError(
                    f"{len(waiting)} (of {count}) futures unfinished") from None
            del waiting[future]
            yield future
            del future
    finally:
        for each in waiting:
            _hear_no_more(each, hear)


def _only_futures(futures: Iterable[Future]) -> Iterator[Future]:
    for each in futures:
        if not isinstance(each, concurrent.futures.Future):
            raise InvalidInput(f"futures: {each!r:.60} is not a future; give what `submit`, `exec` "
                               "and the like return, before `.result()`")
        yield each


def _hear_no_more(future: Future, callback: Callable[..., object]) -> None:
    """Removes a callback of a future, unless the future has ended and calls its callbacks now."""
    with future._condition:
        if not future.done():
            with contextlib.suppress(ValueError):  # it was not added yet
                future._done_callbacks.remove(callback)


async def as_completed_async(futures: Iterable[Future]) -> AsyncIterator[Future]:
    """Yields futures as they end, for `async for`. Other tasks of the event loop run meanwhile.

    Args:
        futures: the futures.

    Example:
        async for future in tangram_hpc.as_completed_async(futures):
            scores.append(future.result())
    """
    loop, waiting = asyncio.get_running_loop(), list(futures)
    ended: asyncio.Queue[Future] = asyncio.Queue()

    def put(future: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed before the action's end
            loop.call_soon_threadsafe(ended.put_nowait, future)

    # One callback each: `asyncio.wait` in a loop looks at every open future each time one ends.
    count = len(waiting)
    for each in waiting:
        if isinstance(each, Future):
            check_wait(each, each._lock, None)
        each.add_done_callback(put)
        del each
    del futures, waiting  # they hold the results, which the caller may be done with
    for _ in range(count):
        yield await ended.get()
