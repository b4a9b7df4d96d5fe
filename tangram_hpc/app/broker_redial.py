"""Brings a worker back to a broker that was lost, for as long as its patience lasts.

A broker that is killed may be started again, on the same host or on another one, with other
addresses and another key. So each attempt reads the access file anew. An attempt blocks, for
seconds if a host does not answer, so it runs in a thread of its own, and the loop goes on serving
the worker's executor. The thread is a daemon: a worker that must end does not wait for it.

The patience counts from the loss until a broker has welcomed the worker, and only the time in which
this process ran. A broker that has ended in order is not waited for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import AccessError, BrokerUnreachable, TangramError
from ..protocol.liveness import Patience
from ..transport.socket.dial import dial
from ..transport.socket.socket_connection import SocketConnection
from ..unawaited import raise_failure
from ..worker.driver import WorkerDriver
from .access_dial import AccessFileDialer

# Seconds. An attempt takes less; if one took longer, this process was stopped meanwhile.
_ATTEMPT_S = 20.0
_PAUSE_S, _PAUSE_MAX_S = 0.05, 1.0  # the first and the longest pause between two attempts


class _Attempt(NamedTuple):
    """What came of one attempt: a connection, or why there is none.

    `ended` says that the job has ended, so that no other attempt is of use, and `shut` that the
    broker's host did not answer at all.
    """

    connection: SocketConnection | None
    problem: str = ""
    ended: bool = False
    shut: bool = False


class BrokerRedial:
    """Dials again whenever the worker's connection is lost.

    Args:
        access: the path of the access file.
        grace_s: how long to try, in seconds.
        driver: the worker, which is told of the loss at once, and with `lost` when the patience is
            over.
        attach: makes a link of a new connection and gives it to the driver (`rejoin`).

    Attributes:
        given_up: whether the worker was ended (`lost`) because no broker came back.
        shut: whether the broker's host did not answer in the last attempt.
    """

    def __init__(self, access: Path, grace_s: float, driver: WorkerDriver,
                 attach: Callable[[SocketConnection], None]) -> None:
        self._dialer, self._grace_s = AccessFileDialer(access), grace_s
        self._driver, self._attach = driver, attach
        self._task: asyncio.Task[None] | None = None
        self._reason = ""
        self.given_up = self.shut = False

    def connection_lost(self, reason: str) -> None:
        """Tells the driver, and begins to dial. A connection that is lost again before the broker
        has welcomed the worker does not renew the patience.
        """
        self._driver.connection_lost(reason)
        if not self._driver.over:
            self._reason, self.shut = reason, False
            if self._task is None:
                self._task = asyncio.ensure_future(self._come_back())
                self._task.add_done_callback(raise_failure)

    def close(self) -> None:
        """Makes no further attempt."""
        if self._task is not None:
            self._task.cancel()

    async def _come_back(self) -> None:
        patience, pause = Patience(time.monotonic(), self._grace_s, _ATTEMPT_S), _PAUSE_S
        while True:
            if not self._driver.connected:
                await self._try()
            if self._driver.over or self._driver.joined:
                break
            if patience.over(time.monotonic()):
                self._give_up(self._reason)
                break
            await asyncio.sleep(pause)
            pause = min(_PAUSE_MAX_S, 2 * pause)
        self._task = None

    async def _try(self) -> None:
        attempt = await _in_thread(lambda: _reach(self._dialer))
        if attempt.connection is not None:
            self.shut = False
            if self._driver.over:
                attempt.connection.close()
            else:
                self._attach(attempt.connection)
            return
        self.shut = attempt.shut
        if attempt.ended:
            self._give_up(f"{self._reason}; {attempt.problem}")

    def _give_up(self, reason: str) -> None:
        if not self._driver.over:
            self.given_up = True
            self._driver.lost(reason)


def _reach(dialer: AccessFileDialer) -> _Attempt:
    """Reads the access file and dials. Blocks."""
    try:
        access = dialer.read()
    except AccessError as error:
        return _Attempt(None, str(error), ended=True)
    try:
        return _Attempt(dial(access.addresses, access.key, access.job))
    except BrokerUnreachable as error:
        return _Attempt(None, str(error), shut=bool(access.addresses) and not error.refused)
    except TangramError as error:  # a broker that dies in the handshake looks like a wrong key
        return _Attempt(None, str(error))


async def _in_thread(work: Callable[[], _Attempt]) -> _Attempt:
    """Runs an attempt in a daemon thread. If this call is cancelled, the thread closes its
    connection.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Attempt] = loop.create_future()

    def settle(attempt: _Attempt) -> None:
        if not future.done():
            future.set_result(attempt)
        elif attempt.connection is not None:
            attempt.connection.close()

    def run() -> None:
        attempt = _Attempt(None, "the attempt was not carried out")
        try:
            attempt = work()
        finally:
            with suppress(RuntimeError):  # the loop is closed, since the worker has ended
                loop.call_soon_threadsafe(settle, attempt)
                attempt = _Attempt(None)
            if attempt.connection is not None:
                attempt.connection.close()

    threading.Thread(target=run, name="tangram-redial", daemon=True).start()
    return await future
