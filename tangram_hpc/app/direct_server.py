"""Serves a client's direct calls in a runner, while one action holds the units for them.

The client submits `serve_direct_calls` as a function. It connects to the client, which listens for
it with a key that is used once, and runs what the client sends, one call after the other. For the
broker it is one action of this client, with its limits and its accounting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

from ..errors import AccessError, BrokerUnreachable, ProtocolError
from ..protocol.direct_frames import (
    DirectCall,
    DirectReply,
    read_call,
    receive_message,
    send_message,
)
from ..protocol.payload import DirectReturn, ErrorReturn, Payload, encode
from ..sandbox.process.function_calls import (
    call_function,
    failure_of,
    forget_output,
    unpickled_function,
)
from ..transport.socket.dial import dial
from ..transport.socket.socket_connection import SocketConnection

# How long the client may stop in the middle of a message. A client that is gone closes the
# connection, and one whose host is gone is noticed by TCP.
_STALL_S = 60.0
_FIRST_S = 5.0  # how long the first call is waited for at least


def serve_direct_calls(addresses: Sequence[str], key: bytes, job: str, idle_s: float, term_s: float
                       ) -> DirectReturn:
    """Connects to a client and serves its calls, until the client closes the connection, sends none
    for a while, or the term is over.

    Args:
        addresses: where the client listens, in the order in which they are tried.
        key: the secret that both sides prove.
        job: the job's name, which is part of the proof.
        idle_s: how long to wait for a call, in seconds.
        term_s: after how many seconds it ends; a call that runs then is finished.

    Returns:
        How many calls have begun; or why the client could not be reached.
    """
    try:
        connection = dial(addresses, key, job, "the node cannot connect to the client's process")
    except (BrokerUnreachable, AccessError) as error:
        return DirectReturn(unreachable=str(error))
    with closing(connection):
        return _Server(connection, time.monotonic() + term_s).serve(idle_s)


class _Server:
    """The server's end of one connection.

    Attributes:
        _functions: by number, the pickle of each function, or the function once it was called.
        _calls: how many calls have begun.
    """

    def __init__(self, connection: SocketConnection, until: float) -> None:
        self._connection, self._until = connection, until
        self._functions: dict[int, bytes | Callable[..., Any]] = {}
        self._calls = self._run_ns = 0
        connection.limit(_STALL_S)

    def serve(self, idle_s: float) -> DirectReturn:
        """Serves until it is over; a connection that broke ends it as one that was closed."""
        call = self._next(max(idle_s, _FIRST_S))
        while call is not None and self._answer(call):
            call = self._next(min(idle_s, max(0.0, self._until - time.monotonic())))
        return DirectReturn(self._calls, self._run_ns)

    def _next(self, wait_s: float) -> DirectCall | None:
        """Waits for a call; None if there is no further one."""
        with suppress(OSError, ProtocolError):
            if self._connection.readable(wait_s):
                message = receive_message(self._connection)
                return None if message is None else read_call(message)
        return None

    def _answer(self, call: DirectCall) -> bool:
        """Runs one call; returns whether another one may follow."""
        self._calls += 1  # first of all: what was counted is never run again elsewhere
        began = time.monotonic_ns()
        returned = self._run(call)
        run_ns = time.monotonic_ns() - began
        self._run_ns += run_ns
        over = time.monotonic() > self._until
        with suppress(OSError):
            forget_output()
        try:
            send_message(self._connection, DirectReply(call.number, encode(returned), run_ns, over))
        except OSError:
            return False
        return not over

    def _run(self, call: DirectCall) -> Payload:
        for number in call.dropped:
            self._functions.pop(number, None)
        try:
            if call.pickled_function:
                self._functions[call.function] = call.pickled_function
            return call_function(self._function(call.function), call.arguments, call.trusted)
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            failure: ErrorReturn = failure_of(error)[0]
            return failure

    def _function(self, number: int) -> Callable[..., Any]:
        known = self._functions[number]
        if isinstance(known, bytes):
            known = self._functions[number] = unpickled_function(known)
        return known
