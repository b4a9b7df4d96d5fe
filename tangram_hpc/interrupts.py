"""Locks and futures that ^C leaves usable.

Python raises the KeyboardInterrupt of a ^C in the main thread, after any call of a function that is
written in C, and at the beginning of any function of Python. If that comes just after a lock was
taken and before the code that gives it back is in force, the lock stays taken. A program that goes
on after a ^C, as a notebook does, then has a client whose own thread waits for this lock for ever.

A `with` statement over a lock of C is safe, since Python does not look for signals between the two.
`threading.Condition` and what is made of it are not, as their `__enter__` is a function of Python.
"""

from __future__ import annotations

import concurrent.futures
import operator
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class InterruptibleCondition(threading.Condition):
    """A condition that ^C does not leave locked: `with` finds the methods of its lock, in C."""

    __enter__ = property(operator.attrgetter("_lock.__enter__"))
    __exit__ = property(operator.attrgetter("_lock.__exit__"))


class PlainFuture(concurrent.futures.Future[_T]):
    """A future for which one thread waits and which another one ends; ^C in the wait does not keep
    the other thread from ending it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = InterruptibleCondition()


def if_free(lock: Any, work: Callable[[], _T]) -> _T | None:
    """Calls a function under a lock if the lock is free; never waits for it.

    Returns:
        What the function returned; None if the lock was not free.
    """
    taken: list[bool] = []
    try:
        taken.extend(map(lock.acquire, (False,)))  # one step: ^C comes when `taken` is right
        return work() if taken[0] else None
    finally:
        if True in taken:
            lock.release()
