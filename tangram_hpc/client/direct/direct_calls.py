"""`DirectCalls`: calls of functions that go straight to a process on a node.

A call through the broker wakes the client's thread, the broker, the worker and the runner, one
after the other, and on the way back again. That is much for a function of a millisecond that is
called thousands of times, such as a step of an environment. Here one action holds units for a
stream of calls: its runner connects to the client (`app/direct_server.py`), and each call wakes
that process and nobody else.

For the broker that is one action, called `direct`. It waits for its turn, counts for its tenant,
has its limits, and accounts for what it holds and uses until it ends. It ends when no call has come
for a while and when its term is over, so that others get their turn; the next call submits another
one.

A call returns, raises, or is sent again because it had not begun. When the connection ends without
an answer, the result of the action says how many calls had begun, and so whether this one had.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED
from typing import Any

import msgspec

from ...domain.action import Kind
from ...domain.outcome import too_long
from ...domain.states import ActionState
from ...errors import ActionFailed, ActionTimeout, ClientClosed, InvalidInput, ProtocolError
from ...interrupts import CallersLock, check_wait, if_free
from ...ports import DirectListener, DirectTransport
from ...protocol import payload as pl
from ...protocol.direct_frames import DirectReply
from ...protocol.process_frames import PAYLOAD_MAX
from ..connection import Connection
from ..forked import not_ours, watch_forks
from ..functions import pickled_arguments
from ..future import Future
from ..request import Options, check_size, make_action
from ..results import raised_error, returned_value
from .direct_functions import DirectFunctions, KnownFunction
from .direct_lease import CallTooLong, DirectLease

_log = logging.getLogger(__name__)
_SETTLE_S = 2.0  # how long an action may go on after its connection has ended
_AGAIN_MAX = 5  # how often a call is sent again that had not begun
_IDLE_MIN_S, _SECONDS_MAX = 0.01, 1e6


class DirectCalls:
    """A stream of calls that go straight to a process on a node; made by `Client.direct`.

    Use it as a context manager, or call `close`. Threads that share it take turns; a thread that
    must not wait for another one needs its own `DirectCalls`.

    Attributes:
        reason: why calls go through the broker; empty while they go to the node.

    Example:
        with client.direct() as direct:
            for action in actions:
                observation = direct.call(step, observation, action)
    """

    def __init__(self, connection: Connection, transport: DirectTransport | None, options: Options,
                 timeout: float | None, retries: int, idle_s: float, term_s: float) -> None:
        make_action(1, Kind.FUNCTION, options._replace(timeout=timeout, retries=retries), 0,
                    "direct")  # raises for what it would refuse
        _check_seconds("idle_s", idle_s, _IDLE_MIN_S)
        _check_seconds("term_s", term_s, 0)
        self.reason = "" if transport is not None else "this client has no way to listen"
        self._broker, self._transport, self._options = connection, transport, options
        self._timeout, self._retries = timeout, retries
        self._idle_s, self._term_s = float(idle_s), float(term_s)
        self._functions = DirectFunctions()
        self._lock = CallersLock()  # held during a call
        self._lease: DirectLease | None = None
        self._listener: DirectListener | None = None
        # ends when this object is closed, which ends all waits
        self._over: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._owner = os.getpid()
        watch_forks(self)

    @property
    def via(self) -> str:
        """Where calls go: "node", or "broker" where the node could not connect to this process."""
        return "broker" if self.reason else "node"

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function on the node and waits for its result.

        A call must not rely on what an earlier one has left in its process: the next one may run in
        another process, on another node.

        Args:
            function: the function, as it is at its first call.
            args, kwargs: its arguments.

        Returns:
            The function's value.

        Raises:
            InvalidInput: the function or an argument cannot be pickled, or they are too large.
            RemoteError: the function raised.
            UntrustedResult: the result needs a pickle, and `trusted=True` was not said.
            ActionTimeout: the call ran longer than `timeout`; its process was ended.
            ActionFailed: the call was lost: its process or its node ended, or it was cancelled.
            InfeasibleRequest: no node can ever run it.
            ProtocolError: what came back is no result.
            ClientClosed, BrokerUnreachable: this object or the client was closed, or the client has
                lost its broker.
        """
        if not callable(function):
            raise InvalidInput(f"function: {function!r:.60} cannot be called")
        arguments = pickled_arguments(args, kwargs)
        began, queue_ns, run_ns = time.monotonic_ns(), 0, 0
        told: pl.AnyPayload | None = None
        with self._lock:
            known = self._functions.known(function)
            check_size(len(arguments) + len(known.pickled), "function, arguments", PAYLOAD_MAX)
            try:
                reply, queue_ns = self._ask(known, arguments, began)
                if reply is not None:
                    told, run_ns = self._told(reply), reply.run_ns
            finally:
                if self._over.done():
                    self._drop()
                if not self.reason:
                    took_ns = time.monotonic_ns() - began
                    self._broker.windows.add_direct(took_ns, queue_ns,
                                                    max(0, min(run_ns, took_ns)),
                                                    not isinstance(told, pl.ValueReturn))
        if told is None:
            return self._by_broker(function, args, kwargs)
        return self._value(function, told)

    def close(self) -> None:
        """Ends the stream and gives the units back; a call that runs in another thread raises
        ClientClosed. A second call does nothing."""
        if self._owner != os.getpid() or self._over.done():
            return
        self._over.set_result(None)
        lease = self._lease
        if lease is not None:
            lease.connection.hang_up()
        # A call that runs now, maybe in this thread beneath a signal handler, drops the lease.
        if_free(self._lock, self._drop)

    def disown(self) -> None:
        """Closes the copies in the child of a fork; see `forked.Forkable`."""
        self._lock = CallersLock()
        lease, self._lease = self._lease, None
        listener, self._listener = self._listener, None
        if lease is not None:
            lease.connection.close()
        if listener is not None:
            listener.abandon()

    def __enter__(self) -> DirectCalls:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- one call; the lock is held ----------------------------------------------------------

    def _ask(self, known: KnownFunction, arguments: bytes, began: int
             ) -> tuple[DirectReply | None, int]:
        """Returns the reply, and the ns until units were held; no reply if the call must go through
        the broker."""
        losses = again = 0
        while True:
            lease, waited_ns = self._lease, 0
            if lease is not None and lease.has_ended():
                self._drop()  # the call has surely not begun
                lease = None
            try:
                if lease is None:
                    lease = self._lease = self._open()
                    waited_ns = time.monotonic_ns() - began
                self._check_open()  # from here on `close` ends the call
                if lease is None:
                    return None, 0
                reply = self._reply(lease, known, arguments)
                if reply is not None:
                    return reply, waited_ns
                self._drop()
                self._judge(lease)
            except _NodeFailed as failure:
                losses += 1
                if losses > self._retries:
                    raise failure.error from None
            else:
                again += 1
                if again > _AGAIN_MAX:
                    raise ActionFailed("direct call: its process ended before the call had begun, "
                                       f"{again} times")

    def _told(self, reply: DirectReply) -> pl.AnyPayload:
        """Returns what a reply holds, and drops the lease if that is over."""
        if reply.over:
            self._drop()
        try:
            return pl.decode(reply.returned)
        except msgspec.DecodeError as error:
            self._drop()  # who forged one reply may have forged the next one
            raise _no_result("direct call", error) from None

    def _value(self, function: Callable[..., Any], told: pl.AnyPayload) -> Any:
        name = f"direct call of {getattr(function, '__name__', 'a function')}"
        if isinstance(told, pl.ErrorReturn):
            raise raised_error(told, name)
        try:
            if isinstance(told, pl.ValueReturn):
                return returned_value(told, name, self._options.trusted)
            raise msgspec.DecodeError(f"a {type(told).__name__}")
        except msgspec.DecodeError as error:
            with self._lock:
                self._drop()
            raise _no_result(name, error) from None

    def _reply(self, lease: DirectLease, known: KnownFunction, arguments: bytes
               ) -> DirectReply | None:
        try:
            return lease.ask(known, self._functions.by_number, arguments, self._options.trusted,
                             self._timeout)
        except CallTooLong:
            self._drop()
            lease.future.cancel()
            raise self._late(lease) from None
        except BaseException:  # such as KeyboardInterrupt: a reply would be taken for the next one
            self._drop()
            lease.future.cancel()
            raise

    def _open(self) -> DirectLease | None:
        """Submits an action and waits until its process has connected; None if the process on the
        node cannot connect to this one.

        Raises:
            _NodeFailed: its node failed.
            TangramError: the action failed or can never run, or this object was closed.
        """
        self._check_open()
        if self.reason:
            return None
        assert self._transport is not None
        try:
            listener = self._listener = self._transport.listen()
        except OSError as error:
            self._use_broker(f"this process cannot listen: {error.strerror}")
            return None
        try:
            if not listener.addresses:
                self._use_broker("this process cannot listen for the node")
                return None
            future = self._submit(self._transport.server(), (
                listener.addresses, listener.key, self._broker.job, self._idle_s, self._term_s))
            try:
                self._wait(future, listener.accepted)
                return self._opened(future, listener)
            except BaseException:
                future.cancel()
                raise
        finally:
            self._listener = None
            listener.close()

    def _opened(self, future: Future, listener: DirectListener) -> DirectLease | None:
        listener.close()
        try:
            connection = listener.accepted.result()
        except OSError as error:
            future.cancel()
            self._use_broker(f"this process cannot listen: {error.strerror}")
            return None
        if connection is not None:
            return DirectLease(future, connection)
        self._check_open()
        told = _result(future)
        why = told.unreachable if isinstance(told, pl.DirectReturn) else ""
        self._use_broker(why or "the process on the node ended before it had connected")
        return None

    def _use_broker(self, why: str) -> None:
        self.reason = why
        _log.warning("job %s: direct calls go through the broker, which takes longer: %s",
                     self._broker.job, why)

    def _judge(self, lease: DirectLease) -> None:
        """Returns if a call had not begun whose connection ended without a reply.

        Raises:
            _NodeFailed: its node failed, and the call may have begun.
            ActionFailed: it had begun.
        """
        future = lease.future
        try:
            if not self._wait(future, timeout_s=_SETTLE_S):
                future.cancel()  # its process goes on with the call, as when the network broke
                self._wait(future)
        except BaseException:
            future.cancel()
            raise
        told = _result(future)
        if not isinstance(told, pl.DirectReturn) or told.calls != lease.answered:
            raise ActionFailed("direct call: its connection broke before its result had arrived")

    def _wait(self, *futures: concurrent.futures.Future[Any], timeout_s: float | None = None
              ) -> bool:
        """Waits until one of these has ended; returns False if none has within so many seconds.

        Raises:
            ClientClosed: this object was closed.
            WouldDeadlock: the wait could not end where it was begun.
        """
        for future in futures:
            check_wait(future, self._broker._lock, timeout_s)
        done = concurrent.futures.wait([*futures, self._over], timeout_s, FIRST_COMPLETED).done
        self._check_open()
        return bool(done)

    def _drop(self) -> None:
        """Closes the connection, with which the action ends."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.connection.close()

    def _late(self, lease: DirectLease) -> ActionTimeout:
        assert self._timeout is not None
        error = ActionTimeout(f"direct call: {too_long(self._timeout)} (action {lease.future.id} "
                              "was ended with it)")
        error.name, error.limit_s = self._options.name, self._timeout
        error.used_s = self._timeout
        return error

    def _check_open(self) -> None:
        if self._owner != os.getpid():
            raise not_ours("DirectCalls", self._owner, self._broker.again)
        if self._over.done():
            raise ClientClosed("these direct calls were closed; call Client.direct for others")
        if self._broker.failure is not None:
            raise self._broker.failure

    # ---- what is submitted -------------------------------------------------------------------

    def _submit(self, function: Callable[..., Any], args: tuple[Any, ...],
                kwargs: dict[str, Any] | None = None, **other: Any) -> Future:
        """Submits a function: that which serves direct calls, or with `other` options a call that
        goes through the broker."""
        options = self._options._replace(**(other or {"direct": True, "retries": 0}))
        call, uploaded = self._broker.functions.call(function, args, kwargs or {}, options.trusted)
        return self._broker.submit(Kind.FUNCTION, options, None, "direct", call, options.trusted,
                                   uploaded=uploaded)

    def _by_broker(self, function: Callable[..., Any], args: tuple[Any, ...],
                   kwargs: dict[str, Any]) -> Any:
        future = self._submit(function, args, kwargs, retries=self._retries, timeout=self._timeout)
        try:
            self._wait(future)
        except BaseException:
            future.cancel()
            raise
        return future.result()


class _NodeFailed(Exception):
    """The node of an action failed, of which `error` tells."""

    def __init__(self, error: ActionFailed) -> None:
        super().__init__(str(error))
        self.error = error


def _no_result(name: str, error: msgspec.DecodeError) -> ProtocolError:
    return ProtocolError(f"{name}: its result is not in the protocol ({error})")


def _result(future: Future) -> Any:
    """Returns the value of an action that has ended.

    Raises:
        _NodeFailed: its node failed.
        ActionFailed: it ended in another way.
    """
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise ActionFailed("direct call: the connection to its process broke while it ran"
                           ) from None
    except ActionFailed as error:
        details = future.details
        if details is not None and details.state is ActionState.NODE_FAIL:
            raise _NodeFailed(error) from None
        raise


def _check_seconds(name: str, value: float, least: float) -> None:
    """Raises InvalidInput if an argument is not a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (
            least <= value <= _SECONDS_MAX):
        raise InvalidInput(f"{name}: {value!r} is not a number of seconds from {least:g} to "
                           f"{_SECONDS_MAX:g}")
