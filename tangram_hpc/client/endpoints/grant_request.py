"""`GrantRequest`: the client's state of one action that asks for an endpoint's slot and token.

The broker grants, and the client reports how the call went (`GrantEnded`). Every grant is answered
once, under the lease that fences it. The last answer is kept until the action's result is here, so
that the connection can repeat it after a reconnect. The connection's thread only hands grants over;
all other methods run in the caller's thread or event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from contextlib import suppress
from typing import SupportsFloat

from ...domain.outcome import Outcome
from ...domain.service import pushed_by
from ...domain.states import ActionState
from ...errors import BrokerUnreachable, InvalidInput
from ...interrupts import CallersLock, PlainFuture, check_wait
from ...protocol import message as ms
from ..forked import end_copy
from ..future import Future

_COST_MAX = 1e12
_RETURNED_MAX = 1 << 40
_Grant = concurrent.futures.Future[ms.Granted]


class GrantRequest:
    """One request for grants: `wait` for a grant, make the call, then report its end (`end`), or
    ask for another grant (`again`).

    Args:
        future: the action's future; it ends when the broker knows the end.
        send: sends a message to the broker.
        delay_s: the seconds until a grant may be used; None if it came too late to be used.
        lock: the connection's, for waits that could not end; None where nobody waits in vain.

    Attributes:
        future: as above.
        said: the last answer to a grant; None before the first.
    """

    def __init__(self, future: Future, send: Callable[[ms.Message], None],
                 delay_s: Callable[[ms.Granted], float | None],
                 lock: CallersLock | None = None) -> None:
        self.future, self._send, self._delay_s, self._lock = future, send, delay_s, lock
        self.said: ms.GrantEnded | None = None
        self._lease = 0  # the lease of the grant that is in use; 0 for none
        self._over = 0  # the lease whose end was reported last
        self._began_ns = 0  # when the call could start
        self._next: _Grant = PlainFuture(self._lock)
        future.add_done_callback(self._closed)

    @property
    def ended(self) -> bool:
        """Whether the end of the call was reported."""
        return self.said is not None and self.said.outcome.state is not ActionState.PREEMPTED

    # ---- the client's thread -----------------------------------------------------------------

    def granted(self, grant: ms.Granted) -> None:
        """Called when the broker has granted; the same grant may come twice."""
        if grant.lease != self._over:
            with suppress(concurrent.futures.InvalidStateError):
                self._next.set_result(grant)

    def _closed(self, future: concurrent.futures.Future[object]) -> None:
        problem = None if future.cancelled() else future.exception()
        with suppress(concurrent.futures.InvalidStateError):
            self._next.set_exception(problem or BrokerUnreachable("the client was closed"))

    def disown(self, error: Exception) -> None:
        """Ends the wait in the child of a fork; the grant is the parent's."""
        end_copy(self._next, error)

    # ---- the caller's side -------------------------------------------------------------------

    async def wait(self) -> None:
        """Waits until the call may be made.

        Raises:
            InfeasibleRequest: no such endpoint is declared.
            BrokerUnreachable: the broker or this client ended.
        """
        check_wait(self._next, self._lock, None)
        while (pause_s := self._taken(await asyncio.wrap_future(self._next))) is None:
            pass
        if pause_s:
            await asyncio.sleep(pause_s)
            self._began_ns = time.monotonic_ns()

    def wait_here(self) -> None:
        """Waits as `wait` does, but blocks the calling thread."""
        while (pause_s := self._taken(self._next.result())) is None:
            pass
        if pause_s:
            time.sleep(pause_s)
            self._began_ns = time.monotonic_ns()

    def _taken(self, grant: ms.Granted) -> float | None:
        """Takes a grant. Returns the seconds until the call may start, or None if the grant came
        too late and was given back."""
        self._lease, self._began_ns = grant.lease, time.monotonic_ns()
        pause_s = self._delay_s(grant)
        if pause_s is None:
            self.again("its client was late")
        return pause_s

    def again(self, reason: str, failure: BaseException | None = None) -> None:
        """Gives the grant back and asks for another one, at the same place in the queue.

        Args:
            reason: why, in one line.
            failure: an exception that may say that the endpoint pushed back.
        """
        over, self._over = self._lease, self._lease
        self._next = PlainFuture(self._lock)
        self._tell(over, ActionState.PREEMPTED, reason, failure)
        self._lease = 0
        if self.future.done():
            self._closed(self.future)

    def end(self, state: ActionState, reason: str = "", *, failure: BaseException | None = None,
            cost: float = 0.0, returned: int = 0) -> None:
        """Reports how the call went, or that it will not be made. A second report is ignored.

        Args:
            state: the state in which the action ends.
            reason: why, in one line.
            failure: an exception that may say that the endpoint pushed back.
            cost: the cost of the call in the caller's unit, from 0 to 1e12.
            returned: how many characters it returned.

        Raises:
            InvalidInput: `cost` or `returned` is out of range; the action has ended as FAILED.
        """
        if self.ended:
            return
        self._over, wrong = self._lease, ""
        if not isinstance(cost, SupportsFloat) or not 0 <= float(cost) < _COST_MAX:
            wrong = f"cost: {cost!r} is no amount; it is a number from 0 to {_COST_MAX:g}"
        elif type(returned) is not int or not 0 <= returned < _RETURNED_MAX:
            wrong = f"returned: {returned!r} is no whole number of characters"
        if wrong:
            state, reason, cost, returned = ActionState.FAILED, wrong, 0.0, 0
        self._tell(self._lease, state, reason, failure, cost, returned)
        if wrong:
            raise InvalidInput(wrong)

    def _tell(self, lease: int, state: ActionState, reason: str,
              failure: BaseException | None, cost: float = 0.0, returned: int = 0) -> None:
        ran_ns = time.monotonic_ns() - self._began_ns if lease else 0
        pushed, wait_ns = pushed_by(failure) if failure is not None else (0, 0)
        # an exception may quote what is not UTF-8, such as half of a surrogate pair from an answer
        line = " ".join(reason.split()).encode(errors="backslashreplace").decode()[:500]
        self.said = ms.GrantEnded(self.future.action, lease, Outcome(
            state, exec_ns=ran_ns, reason=line,
            cost_micro=round(float(cost) * 1e6), pushed=pushed, retry_after_ns=wait_ns,
            returned=returned, setup_ns=0 if lease else -1))
        self._send(self.said)
