"""`Future`: one action's result, for threads and for asyncio; and the results themselves.

Law: a future ends exactly once, by the client's own thread. It is a `concurrent.futures.Future`
(`result`, `exception`, `add_done_callback`, `as_completed`, `wait`) that can also be awaited. What
its base needs to wait and to call back is made for those that somebody waits for: of a thousand
futures most have ended when their turn comes, and ten objects of each would be a third of what an
action costs its client, most of that for the garbage collector.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from dataclasses import dataclass
from typing import Any

import msgspec

from ..domain.ids import show
from ..domain.rollouts import Routed
from ..domain.states import ActionState
from ..errors import ActionFailed, ActionOutOfMemory, ActionTimeout
from ..protocol.message import Result


@dataclass(frozen=True)
class Details:
    """How an action was served. Times in seconds: `queue_s` submitted -> granted and `held_s`
    granted -> finished by the broker's clock, `exec_s` run time on the node, `act_s` submit ->
    result as the client saw it. `exit_code`: as of `ExecResult`, for actions of every kind.
    `grants`: (ns since it was granted, units from then on). Of a call of a service also
    `restore_s`, what bringing it to its GPUs took (whoever ran with the call that brought it
    waited for that in the queue), and `batch`, how many ran as one with it."""

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
        """What was neither waiting for units, nor bringing a service in, nor running."""
        return max(0.0, self.act_s - self.queue_s - self.restore_s - self.exec_s)


_FAILURES = {ActionState.TIMEOUT: ActionTimeout, ActionState.OUT_OF_MEMORY: ActionOutOfMemory}


class ExecResult(msgspec.Struct, frozen=True, gc=False):
    """A command's end. It is true in a condition if the command completed (`if result:`).

    Attributes:
        state: COMPLETED (exit code 0), FAILED, TIMEOUT or OUT_OF_MEMORY.
        exit_code: 0 if it completed, and only then: a failed command's own exit code, 128 + N after
            signal N, 1 when neither is known; 124 for TIMEOUT and 137 for OUT_OF_MEMORY.
        signal: the signal that ended it, 0 for none.
        stdout, stderr: the output that was kept.
        cut: bytes of each stream that were dropped.
        reason: one line that says why, when the state alone does not.
        cpu_s: user + system seconds of its processes.
        maxrss_kib: largest resident set of any one of them.
        lower_bounds: which of these two are lower bounds, "cpu" and "maxrss", since they could not
            be measured to the end.
        grants: (ns since it was granted, units from then on) of each size it had.
        isolation, enforcement: what it really had.
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
        """Whether it ended with exit code 0."""
        return self.state is ActionState.COMPLETED

    def __bool__(self) -> bool:
        return self.state is ActionState.COMPLETED

    @property
    def text(self) -> str:
        """stdout as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")

    @property
    def returncode(self) -> int:
        """As `subprocess` has it: the exit code, or minus the signal."""
        return -self.signal if self.signal else self.exit_code

    def check(self) -> ExecResult:
        """Itself if `ok`.

        Raises:
            ActionTimeout, ActionOutOfMemory: it was ended for that.
            ActionFailed: it failed; the message holds the reason and the end of stderr.
        """
        if self.ok:
            return self
        tail = self.stderr.decode(errors="replace")[-400:].strip()
        end = f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"
        kind = _FAILURES.get(self.state, ActionFailed)
        raise kind(f"{self.state.value} ({end}) {self.reason} {tail}".strip(), self)


_gate = threading.Lock()  # whether a future ends first, or somebody begins to wait for it


def _forked() -> None:
    """The thread that held it is not in the child of a fork."""
    global _gate
    _gate = threading.Lock()


os.register_at_fork(after_in_child=_forked)


class Future(concurrent.futures.Future[Any]):
    """One action's result to come."""

    def __init__(self, action: int, cancel: Callable[[int], None]) -> None:
        # as the base begins, but for what `_condition` makes
        self._state = PENDING
        self._result: Any = None
        self._exception: BaseException | None = None
        self._made: threading.Condition | None = None
        self.action = action
        self.told: tuple[Result, int] | None = None  # what the broker said, and the ACT in ns
        self._cancel = cancel

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """What all of the base's methods take before they look at anything of it."""
        if self._made is None:
            with _gate:
                if self._made is None:
                    self._waiters: list[Any] = []
                    self._done_callbacks: list[Callable[[Any], object]] = []
                    self._made = threading.Condition()
        return self._made

    def set_result(self, result: Any) -> None:
        """See `concurrent.futures.Future`."""
        with _gate:
            if self._made is None and self._state == PENDING:
                self._result = result
                self._state = FINISHED
                return
        super().set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        """See `concurrent.futures.Future`."""
        if self._state == FINISHED and self._exception is None:
            return self._result
        return super().result(timeout)

    def done(self) -> bool:
        """Whether it has ended."""
        return self._state in (FINISHED, CANCELLED, CANCELLED_AND_NOTIFIED)

    def end_in_child(self, error: Exception) -> None:
        """See `forked.end_copy`."""
        if not self.done():
            self._made, self._exception, self._state = None, error, FINISHED

    @property
    def details(self) -> Details | None:
        """How it was served, once that is known."""
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
        """Of a turn that is done: the service and bucket that it went to, and how (`stay`,
        `transfer`, `prefill`)."""
        return self.told[0].route if self.told is not None else None

    @property
    def id(self) -> str:
        """The action's id as commands and accounting show it."""
        return show(self.action)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def cancel(self) -> bool:
        """Asks the broker to cancel it, running or not. True unless it is done already; the
        future ends when the broker has confirmed."""
        if self.done():
            return False
        self._cancel(self.action)
        return True

    def end_cancelled(self) -> None:
        """The broker confirmed a cancellation (the client's thread only)."""
        if super().cancel():
            self.set_running_or_notify_cancel()


def as_completed(futures: Iterable[Future], timeout: float | None = None) -> Iterator[Future]:
    """The futures as they end; see `concurrent.futures.as_completed`."""
    return concurrent.futures.as_completed(futures, timeout)  # type: ignore[return-value, arg-type]


async def as_completed_async(futures: Iterable[Future]) -> AsyncIterator[Future]:
    """The futures as they end, for `async for`."""
    waiting = {asyncio.wrap_future(f): f for f in futures}
    while waiting:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            if not each.cancelled():
                each.exception()  # else asyncio logs that nobody has looked at it
            yield waiting.pop(each)
