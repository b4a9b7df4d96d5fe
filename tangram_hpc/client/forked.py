"""What becomes of clients in the child of a fork: their copies there do nothing, and say so.

A fork copies every object of its process, but only the thread that forked. A client's copy has no
thread of its own, shares its socket with the parent, and may have been copied while another thread
held a lock. So right after a fork, in the child, each copy lets go of what it shares with the
parent, its open futures end with an error, and whatever is asked of it later raises that error.
Nothing here may send a byte, wait, or take a lock that the parent's threads take.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import weakref
from concurrent.futures._base import FINISHED, PENDING, RUNNING
from typing import Any, Protocol

from ..errors import ClientClosed
from .future import Future


class Forkable(Protocol):
    """What this module needs of a client."""

    def _disown(self) -> None: ...


_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(client: Forkable) -> None:
    """From now on this client is disowned in every child of a fork."""
    _clients.add(client)


def _in_child() -> None:
    for client in _clients:
        client._disown()


os.register_at_fork(after_in_child=_in_child)


def not_ours(what: str, owner: int, remedy: str) -> ClientClosed:
    """The error of who uses what process `owner` made and a fork copied into this one."""
    return ClientClosed(
        f"this {what} belongs to process {owner}, from which process {os.getpid()} was forked; "
        f"call {remedy} in process {os.getpid()} for a client of its own")


def end_copy(future: concurrent.futures.Future[Any], error: Exception) -> None:
    """Ends a copy of an open future. Its condition may be held by a thread that is not here, so it
    gets another one; who waited or wanted to be called was in the parent."""
    if isinstance(future, Future):
        future.end_in_child(error)
        return
    future._condition = threading.Condition()
    future._waiters = []
    future._done_callbacks = []  # type: ignore[attr-defined]
    if future._state in (PENDING, RUNNING):
        future._exception, future._state = error, FINISHED
