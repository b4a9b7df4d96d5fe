"""`Endpoint`: calls of somebody else's API from the trainer, within its quota.

The broker grants a slot and a token for every attempt; the call itself is the caller's own code and
runs in this process. A call is repeated only if the endpoint has certainly not carried it out (it
answered 429, or no connection was made), or if its caller declared it idempotent.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, SupportsFloat

from ...domain.states import ActionState
from ...errors import ActionTimeout, InvalidInput, Throttled, Transient, described
from ...interrupts import InterruptibleLock
from ..request import check_flag, count_of
from .grant_request import GrantRequest
from .grants import GrantSource
from .retry_decision import understood

Attempt = Callable[[], Awaitable[Any]]
Cost = float | Callable[[Any], float]
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class Slot:
    """One attempt of a call; made by `Endpoint.slot`. `with` (or `async with`) waits for a slot and
    a token, and holds the slot inside.

    An exception inside ends the action as FAILED. One that says that the endpoint pushed back
    (`Throttled` or `Transient`, see `check_response`) makes the broker grant fewer calls at once.

    Attributes:
        cost: the cost of the call in your own unit; set it before the block ends.
        returned: for a trajectory's tool, how many characters it returned; set it before the block
            ends.
    """

    def __init__(self, request_grant: Callable[[], GrantRequest]) -> None:
        self.cost, self.returned, self._request_grant = 0.0, 0, request_grant
        self._grant_request: GrantRequest | None = None
        self._beginning = InterruptibleLock()  # so that of two threads only one enters

    @property
    def id(self) -> str:
        """The action's id, as accounting shows it; empty before the block is entered."""
        return self._grant_request.future.id if self._grant_request is not None else ""

    def __enter__(self) -> Slot:
        grant_request = self._begin()
        try:
            grant_request.wait_here()
        except BaseException:
            grant_request.end(ActionState.CANCELLED)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        assert self._grant_request is not None
        _end(self._grant_request, error, self.cost, self.returned)

    async def __aenter__(self) -> Slot:
        grant_request = self._begin()
        try:
            await grant_request.wait()
        except BaseException:
            grant_request.end(ActionState.CANCELLED)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        assert self._grant_request is not None
        _end(self._grant_request, error, self.cost, self.returned)

    def _begin(self) -> GrantRequest:
        with self._beginning:
            # a grant whose end is not reported would never come back
            if self._grant_request is not None and not self._grant_request.ended:
                raise InvalidInput("slot: it is in use, and holds one call; make another one for "
                                   "each call, by `slot()` of the endpoint")
            self._grant_request = grant_request = self._request_grant()
        return grant_request


class Endpoint:
    """An API of somebody else with a quota; made by `Client.register_endpoint` and
    `Client.endpoint`. `slot` may be called from any thread; all calls of `request` must be made on
    one event loop.

    Attributes:
        name: the endpoint's name.

    Example:
        search = client.register_endpoint("search", concurrency=8, rate=20)

        async def attempt():
            return tangram_hpc.check_response(await http.get(url)).json()

        answer = await search.request(attempt, timeout=30)
    """

    def __init__(self, grants: GrantSource, name: str, *, cache: int = 0, cache_s: float = 300.0,
                 single_flight: bool = False, rng: random.Random | None = None) -> None:
        count_of(cache, "cache")
        if not isinstance(cache_s, SupportsFloat) or not float(cache_s) > 0:
            raise InvalidInput(f"cache_s: {cache_s!r} is not a number of seconds > 0")
        check_flag(single_flight, "single_flight")
        self.name, self._grants = name, grants
        self._rng = rng or random.Random()
        self._cache_max, self._cache_s, self._single = cache, cache_s, single_flight
        self._cache: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()  # until, answer
        self._flying: dict[Hashable, _Flight] = {}

    def slot(self, name: str = "", *, trajectory: str | int = "") -> Slot:
        """Prepares one attempt that you make and that is never repeated.

        Args:
            name: the class of the action in accounting; empty for the endpoint's name.
            trajectory: the trajectory whose tool it is, see `Client.rollout`; empty for none.

        Returns:
            A Slot, for use as a context manager.

        Example:
            with endpoint.slot() as slot:
                answer = requests.post(url, json=query)
                slot.cost = answer.json()["usage"]["total_tokens"]
        """
        return Slot(lambda: self._grants.request(self.name, name, trajectory))

    async def request(self, attempt: Attempt, *, timeout: float = 60.0, idempotent: bool = False,
                      cost: Cost = 0.0, key: Hashable = None, name: str = "",
                      trajectory: str | int = "") -> Any:
        """Makes one call, with as many attempts as it takes.

        Args:
            attempt: makes one attempt and returns its value. It raises `Throttled` for a 429 and
                `Transient` for a failure that may pass, as `check_response` does.
            timeout: the longest time in seconds, > 0, from the start of the first attempt to the
                end, further attempts and their waits included. The wait for the first grant does
                not count.
            idempotent: whether the call may be carried out twice. If it may, it is repeated even
                after a failure in which the endpoint may have carried it out. A call that was
                answered with 429 or never reached the endpoint is always repeated.
            cost: the cost of the call in your own unit, or a function that computes it from the
                value; `tangram acct` adds it up.
            key: requests with the same key are equal for `cache` and `single_flight`; None for
                neither.
            name: the class of the action in accounting; empty for the endpoint's name.
            trajectory: the trajectory of which this call is a tool, see `Client.rollout`; empty for
                none. The size of the tool's return is that of the value as text or bytes. An answer
                from the cache or from a shared call is not reported; use `Client.tool_returned`.

        Returns:
            The value of the attempt that succeeded.

        Raises:
            ActionTimeout: no attempt succeeded within the timeout.
            InfeasibleRequest: no such endpoint is declared.
            InvalidInput: an argument is wrong; the message names it.
            Exception: the attempt's own exception, if the attempt must not be repeated.
        """
        if not isinstance(timeout, SupportsFloat) or not float(timeout) > 0:
            raise InvalidInput(f"timeout: {timeout!r} is not a number of seconds > 0")
        check_flag(idempotent, "idempotent")
        call = _Call(name or self.name, self._rng, attempt, timeout, idempotent, cost,
                     trajectory != "")

        def request_grant() -> GrantRequest:
            return self._grants.request(self.name, name, trajectory)

        if key is None:
            return await call.run(request_grant())
        now = asyncio.get_running_loop().time()
        if key in self._cache:
            until, value = self._cache[key]
            if now < until:
                self._cache.move_to_end(key)
                return value
            del self._cache[key]
        if not self._single:
            return self._keep(key, await call.run(request_grant()))
        flight = self._flying.get(key)
        if flight is None:
            flight = self._flying[key] = _Flight(asyncio.ensure_future(call.run(request_grant())))
            flight.task.add_done_callback(lambda _: self._landed(key, flight))
        flight.callers += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.callers -= 1
            if not flight.callers and not flight.task.done():  # all of its callers were cancelled
                del self._flying[key]  # a later call gets a flight of its own
                flight.task.cancel()

    def _landed(self, key: Hashable, flight: _Flight) -> None:
        if self._flying.get(key) is flight:
            del self._flying[key]
        if not flight.task.cancelled() and flight.task.exception() is None:
            self._keep(key, flight.task.result())

    def _keep(self, key: Hashable, value: Any) -> Any:
        if self._cache_max:
            self._cache[key] = (asyncio.get_running_loop().time() + self._cache_s, value)
            self._cache.move_to_end(key)
            while len(self._cache) > self._cache_max:
                self._cache.popitem(last=False)
        return value


@dataclass
class _Flight:
    """A call that is under way for several callers.

    Attributes:
        task: makes the call.
        callers: how many wait for it; it ends with the last one that is cancelled.
    """

    task: asyncio.Task[Any]
    callers: int = 0


class _Call:
    """One call of `Endpoint.request`, and its attempts."""

    def __init__(self, name: str, rng: random.Random, attempt: Attempt, timeout_s: float,
                 idempotent: bool, cost: Cost, told: bool) -> None:
        self._name, self._rng, self._attempt, self._timeout_s = name, rng, attempt, timeout_s
        self._idempotent, self._cost, self._told = idempotent, cost, told
        self._deadline, self._failed, self._tries = 0.0, "", 0

    async def run(self, grant_request: GrantRequest) -> Any:
        """Returns the value. The grant request has ended when this returns or raises."""
        try:
            await grant_request.wait()
            self._deadline = asyncio.get_running_loop().time() + self._timeout_s
            while True:
                failure = await self._once(grant_request)
                if failure is None:
                    return self._value
                self._tries += 1
                self._failed = f"{failure} ({self._tries} attempts)"
                await self._before_the_next(grant_request, failure)
        except _OutOfTime:
            reason = f"not served within its timeout of {self._timeout_s:g} s"
            reason += f"; last: {self._failed}" if self._failed else ""
            grant_request.end(ActionState.TIMEOUT, reason)
            late = ActionTimeout(f"action {grant_request.future.id}: TIMEOUT: {reason}")
            late.name, late.limit_s = self._name, float(self._timeout_s)
            late.used_s = late.limit_s + asyncio.get_running_loop().time() - self._deadline
            raise late from None
        except BaseException as error:
            _end(grant_request, error, 0.0)
            raise

    async def _once(self, grant_request: GrantRequest) -> Throttled | Transient | None:
        """Makes one attempt. Returns the failure if the call shall be repeated, else None."""
        try:
            self._value = value = await self._in_time(self._attempt())
        except _OutOfTime:
            raise
        except Exception as error:
            failure = understood(error)
            if failure is None or not self._may_repeat(failure):
                raise
            return failure
        cost = self._cost(value) if callable(self._cost) else self._cost
        grant_request.end(ActionState.COMPLETED, cost=cost,
                          returned=_size(value) if self._told else 0)
        return None

    def _may_repeat(self, failure: Throttled | Transient) -> bool:
        return isinstance(failure, Throttled) or self._idempotent or not failure.reached

    async def _before_the_next(self, grant_request: GrantRequest, failure: Throttled | Transient
                               ) -> None:
        """Waits for the grant of the next attempt.

        If the endpoint said how long to wait, the broker delays the grants of all callers. After
        any other failure this call first pauses for a random time, with its slot still held.
        """
        if not isinstance(failure, Throttled) and not failure.retry_after:
            pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0 ** min(self._tries, 10))
            await self._in_time(asyncio.sleep(self._rng.uniform(0.0, pause_s)))
        grant_request.again(str(failure), failure)
        await self._in_time(grant_request.wait())

    async def _in_time(self, what: Awaitable[Any]) -> Any:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(what)
        try:
            done, _ = await asyncio.wait([task], timeout=max(0.0, self._deadline - loop.time()))
        except asyncio.CancelledError:
            await _cancelled(task)
            raise
        if not done:
            await _cancelled(task)
            raise _OutOfTime
        return task.result()


class _OutOfTime(Exception):
    """Raised when the timeout of the call is over; `run` turns it into an ActionTimeout."""


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancels a task and waits for its end; its result or exception is dropped."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


def _size(value: Any) -> int:
    """The number of characters that a tool returned."""
    return len(value if isinstance(value, str | bytes) else str(value))


def _end(grant_request: GrantRequest, error: BaseException | None, cost: float, returned: int = 0
         ) -> None:
    """Reports to the broker how the last attempt ended."""
    if error is None:
        return grant_request.end(ActionState.COMPLETED, cost=cost, returned=returned)
    if isinstance(error, asyncio.CancelledError):
        return grant_request.end(ActionState.CANCELLED, "by its caller")
    reason = described(error).splitlines()[0]
    grant_request.end(ActionState.FAILED, reason, failure=understood(error))
