"""Clients in the child of a fork: their copies are unusable and raise an error that says so.

A fork copies every object of its process, but only the thread that forked. The copy of a client has
no thread of its own, shares its socket with the parent, and may have been copied while another
thread held a lock. Right after a fork, in the child, each copy therefore lets go of what it shares
with the parent, its open futures end with an error, and every later call raises that error.

Nothing here may send a byte, wait, or take a lock that the parent's threads take.
"""

from __future__ import annotations

import concurrent.futures
import os
import weakref
from concurrent.futures._base import FINISHED, PENDING, RUNNING
from typing import Any, Protocol

from ..errors import ClientClosed
from ..interrupts import InterruptibleCondition
from .future import Future


class Forkable(Protocol):
    """The interface of a connection, or of a part with a lock of its own, towards this module."""

    def disown(self) -> None:
        """Closes or forgets everything that the copy shares with the parent."""


_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_forks(part: Forkable) -> None:
    """From now on, calls `disown` of this part in every child of a fork."""
    _watched.add(part)


def _in_child() -> None:
    for part in _watched:
        part.disown()


os.register_at_fork(after_in_child=_in_child)


def not_ours(what: str, owner: int, remedy: str) -> ClientClosed:
    """Makes the error for the use of a copy.

    Args:
        what: the kind of object.
        owner: the id of the process that made it.
        remedy: a Python call that makes one for this process.
    """
    return ClientClosed(
        f"this {what} belongs to process {owner}, from which process {os.getpid()} was forked; "
        f"call {remedy} in process {os.getpid()} for a client of its own")


def end_copy(future: concurrent.futures.Future[Any], error: Exception) -> None:
    """Ends the copy of an open future with an error. A thread of the parent may hold the future's
    condition, so the copy gets a new one; all waiting threads are in the parent."""
    if isinstance(future, Future):
        future.end_in_child(error)
        return
    future._condition = InterruptibleCondition()
    future._waiters = []
    future._done_callbacks = []  # type: ignore[attr-defined]
    if future._state in (PENDING, RUNNING):
        future._exception, future._state = error, FINISHED
