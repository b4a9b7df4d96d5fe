"""The broker client that all adapters of one process share.

A trainer's process has many tools, environments and reward functions, and none of them is told when
the training begins or ends. They share one client, which connects when it is first needed and is
closed when the process ends, so that the broker frees at once what was left open. After the loss of
a broker the next caller connects again, because a later broker of the same job may be reachable. A
forked child gets a client of its own.

This module does not decide how the broker is found: `tangram_hpc.connect` does.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tangram_hpc import (
    AccessError,
    BrokerUnreachable,
    Client,
    Future,
    Session,
    TangramError,
    connect,
)
from tangram_hpc.errors import FileFailed

from .harness.session_options import session_options

_PAUSE_S = 1.0  # seconds between two attempts to reach a broker that has not come back yet


class _Shared:
    """The client of this process.

    Attributes:
        client: the client; None until one is needed.
        given: whether a user passed it to `use_client`; if so, it is not replaced or closed here.
        lock: is held while a client is made, and while the thread is started.
        calls: functions that are to be called because an object was garbage-collected.
        caller: the thread that makes these calls; None until `when_collected` is first called.
    """

    def __init__(self) -> None:
        self.client: Client | None = None
        self.given = False
        self.lock = threading.Lock()
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.caller: threading.Thread | None = None


_shared = _Shared()


def process_client() -> Client:
    """Returns this process's client, and connects it if there is none or its broker is lost.

    Raises:
        AccessError, BrokerUnreachable: as for `tangram_hpc.connect`.
    """
    with _shared.lock:
        client = _shared.client
        if client is None or (client.failure is not None and not _shared.given):
            client = _shared.client = connect()
        return client


def use_client(client: Client | None) -> None:
    """Makes the adapters of this process use a client that the caller closes.

    Args:
        client: the client, such as `LocalCluster().client`; None lets the adapters make one
            themselves again.
    """
    with _shared.lock:
        former, was_given = _shared.client, _shared.given
        _shared.client, _shared.given = client, client is not None
    if former is not None and former is not client and not was_given:
        former.close()


async def lasting(submit: Callable[[Client], Future], patience_s: float = 600.0) -> Any:
    """Awaits an action that has no state, and submits it again if its broker is lost for good.

    If a broker comes back within `grace_s`, the client itself reconnects and the action goes on.
    This function is for the other case, such as a job that was requeued to other nodes. With a
    client that `use_client` has set, nothing is submitted again, because this module cannot replace
    that client.

    Args:
        submit: submits the action with the client that it is given.
        patience_s: how long to look for another broker of the job, in seconds.

    Raises:
        BrokerUnreachable, AccessError: no broker was reached within `patience_s`, or the broker of
            a client that `use_client` has set is gone.
        TangramError: the action itself failed.
    """
    until = 0.0  # when to give up; 0 while the last attempt reached a broker
    while True:
        try:
            client = await asyncio.to_thread(process_client)
            until = 0.0
            future = submit(client)
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                future.cancel()
                raise
        except (BrokerUnreachable, AccessError):
            now = time.monotonic()
            until = until or now + patience_s
            if _shared.given or now >= until:
                raise
            await asyncio.sleep(_PAUSE_S)


@contextlib.contextmanager
def first_files(session: Session) -> Iterator[list[Future]]:
    """Gives the futures of the files that a session was opened with, to be awaited.

    `with session` awaits them too, but the adapters open sessions without waiting for them. If
    nobody asked, a policy would work, and be judged, in a sandbox that lacks files of its task.

    Args:
        session: the session. It is closed if a file cannot be written.

    Raises:
        FileFailed: as soon as it is awaited, the future of a file that cannot be written; the data
            or the options of the session are wrong.
    """
    try:
        yield session.first
    except FileFailed:
        session.first = []  # the error's traceback would keep the session's owner from its end
        with contextlib.suppress(TangramError):
            session.close()
        raise


def when_collected(owner: object, call: Callable[[], None]) -> None:
    """Calls a function soon after an object was garbage-collected, in a thread of this module.

    A garbage collection may begin anywhere, even in a thread that holds a lock of the client. So no
    session may be closed by the collection itself; it only puts the call into a queue, which is
    safe at such a moment.

    Args:
        owner: the object. `call` must hold no reference that leads to it.
        call: the function. It may raise a TangramError, which is dropped.
    """
    with _shared.lock:
        if _shared.caller is None:
            _shared.caller = threading.Thread(target=_make_calls, args=(_shared.calls,),
                                              name="tangram-hooks", daemon=True)
            _shared.caller.start()
    # no call at the end of the process: the client is closed then, and all of its sessions with it
    weakref.finalize(owner, _shared.calls.put, call).atexit = False


def _make_calls(calls: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        call = calls.get()
        with contextlib.suppress(TangramError):
            call()
        del call  # or the object to which it belongs would be kept until the next call


def _close() -> None:
    use_client(None)


def _after_fork() -> None:
    global _shared
    _shared = _Shared()


atexit.register(_close)
os.register_at_fork(after_in_child=_after_fork)


class SessionSlot:
    """Holds the session of one owner, such as an environment: at most one session at a time.

    The session is closed when another one takes its place, when `close` is called, and when the
    owner is garbage-collected, because most trainers never tell an environment that it has ended.

    Args:
        owner: the object whose garbage collection closes the session; None for no such object.
    """

    def __init__(self, owner: object | None = None) -> None:
        self._session: Session | None = None
        if owner is not None:
            when_collected(owner, self.close)

    @property
    def session(self) -> Session | None:
        """The open session; None before `open` and after `close`."""
        return self._session

    def open(self, options: Mapping[str, Any]) -> Session:
        """Opens a session instead of the former one; returns at once.

        Args:
            options: arguments of `Client.session`.

        Raises:
            InvalidInput: an option is wrong; the message names it.
            BrokerUnreachable: the broker is gone and cannot be reached again.
        """
        self.close()
        self._session = process_client().session(**session_options(options))
        return self._session

    def close(self) -> None:
        """Closes the session, if there is one; returns at once."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(TangramError):  # if the broker is gone, so is the session
                session.close()
