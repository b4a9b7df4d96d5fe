"""Locks and futures that ^C leaves usable, and that do not let a signal handler wait for ever.

Python raises the KeyboardInterrupt of a ^C in the main thread, after any call of a function that is
written in C, and at the beginning of any function of Python. If that comes just after a lock was
taken and before the code that gives it back is in force, the lock stays taken. A program that goes
on after a ^C, as a notebook does, then has a client whose own thread waits for this lock for ever.

A `with` statement over a lock of C is safe, since Python does not look for signals between the two.
`threading.Condition` and what is made of it are not, as their `__enter__` is a function of Python.
Python 3.14 does look there (CPython's issue 148874, mended in 3.15). For it there is a lock that
gives itself back, `InterruptibleLockOf314`.

A handler of the user's own runs in the same places. What it calls may need a lock that the
interrupted thread holds, which goes on only after the handler. A `CallersLock` raises then.
"""

from __future__ import annotations

import concurrent.futures
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .errors import WouldDeadlock

_T = TypeVar("_T")
_RLock: Any = type(threading.RLock())


class ReleasingExit:
    """The end of a lock that `with` fetches before it takes the lock. `with` drops this object when
    it is over, and also if ^C comes after the lock was taken and before the block. Then the lock is
    given back.
    """

    __slots__ = ("__weakref__", "_dropped")
    # `with` calls its end with three arguments, and raises the block's error if the answer is
    # false. This function answers so and does nothing. It is one of C, because ^C could come at the
    # beginning of one of Python.
    __call__ = "".format

    def __init__(self, release: Callable[..., object]) -> None:
        """Makes the end of a lock.

        Args:
            release: a function of C that gives the lock back, whatever its arguments.
        """
        self._dropped = weakref.ref(self, release)


class InterruptibleLockOf314(_RLock):  # type: ignore[misc]
    """An RLock that ^C does not leave taken by `with`, for Python 3.14."""

    @property
    def __exit__(self) -> Callable[..., object]:
        release: Callable[..., object] = super().__exit__
        return release if self._is_owned() else ReleasingExit(release)


InterruptibleLock: Any = InterruptibleLockOf314 if sys.version_info[:2] == (3, 14) else _RLock

# Held while a future without a condition ends, and while a condition is made. A signal handler may
# take it once more in the thread that it has interrupted.
futures_lock: Any = InterruptibleLock()


def _forked() -> None:
    # A thread that held the lock does not exist in the child and would never release it.
    if not futures_lock._is_owned():
        futures_lock._at_fork_reinit()


os.register_at_fork(after_in_child=_forked)


class CallersLock(InterruptibleLock):  # type: ignore[misc]
    """A lock for `with` and `if_free`. A thread that holds it already gets an error, where it would
    wait for itself with a `threading.Lock`.

    Attributes:
        served_by: the id of the client's own thread, which ends the futures of the connection that
            this lock belongs to; 0 for the locks of other things.
        needed: the further locks of the client that this thread waits for.
    """

    served_by = 0
    needed: Sequence[CallersLock] = ()

    @property
    def __enter__(self) -> Callable[[], bool]:
        # `with` calls what this returns, a function of C, so ^C does not leave the lock taken
        if self._is_owned():
            self._refuse()
        return self.acquire  # type: ignore[no-any-return]

    @property
    def served_here(self) -> bool:
        """Whether the calling thread is the thread `served_by`."""
        return threading.get_ident() == self.served_by

    def check_wait(self, besides: Any = None) -> None:
        """Called before a wait for a future that the thread `served_by` ends.

        Args:
            besides: a lock that the wait gives back.

        Raises:
            WouldDeadlock: this is that thread, or it needs a lock which the calling thread holds
                since a signal handler has interrupted it.
        """
        if self.served_here:
            raise WouldDeadlock("a callback (of add_done_callback, on_output or the like) cannot "
                                "wait for its own client, whose thread calls it; let it put what "
                                "is to be done into a queue, and wait in another thread")
        held = (self, futures_lock, *self.needed, *InterruptibleCondition.entered)
        if any(lock._is_owned() for lock in held if lock is not besides):
            self._refuse()

    def _refuse(self) -> None:
        raise WouldDeadlock("a signal handler has interrupted a call of the same client in this "
                            "thread, which cannot go on before the handler returns; let the "
                            "handler set a flag, and call the client where the program sees it")


class InterruptibleCondition(threading.Condition):
    """A condition that ^C does not leave locked: `with` finds the methods of its lock, in C.

    Attributes:
        entered: the locks of the conditions that the main thread has entered, and may have left.
            Signal handlers run in that thread. While it holds one of these locks a handler must not
            wait, because the thread that would end the wait needs the lock first.
    """

    entered: tuple[Any, ...] = ()

    def __init__(self, callers: CallersLock | None = None) -> None:
        """Makes a condition.

        Args:
            callers: the lock of the connection whose thread notifies it; None if waits need no
                check.
        """
        super().__init__(InterruptibleLock())
        self._callers = callers

    @property
    def __enter__(self) -> Callable[[], bool]:
        if threading.get_ident() == threading.main_thread().ident:
            held = [lock for lock in InterruptibleCondition.entered if lock._is_owned()]
            InterruptibleCondition.entered = (*held, self._lock)  # type: ignore[attr-defined]
        return self._lock.__enter__  # type: ignore[attr-defined,no-any-return]

    def wait(self, timeout: float | None = None) -> bool:
        """As in the base class, but it raises `WouldDeadlock` where the wait could not end."""
        if self._callers is not None and timeout != 0:
            self._callers.check_wait(besides=self._lock)  # type: ignore[attr-defined]
        return super().wait(timeout)

    __exit__ = property(operator.attrgetter("_lock.__exit__"))


class PlainFuture(concurrent.futures.Future[_T]):
    """A future for which one thread waits and which another one ends; ^C in the wait does not keep
    the other thread from ending it.
    """

    def __init__(self, lock: CallersLock | None = None) -> None:
        """Makes a future that has not ended.

        Args:
            lock: the lock of the connection whose thread ends the future; None if waits for it need
                no check.
        """
        super().__init__()
        self._condition = InterruptibleCondition()
        self._lock = lock

    def result(self, timeout: float | None = None) -> _T:
        """As in the base class, but it raises `WouldDeadlock` where the wait could not end."""
        check_wait(self, self._lock, timeout)
        return super().result(timeout)


def check_wait(future: concurrent.futures.Future[Any], lock: CallersLock | None,
               timeout: float | None) -> None:
    """Raises `WouldDeadlock` where a wait for a future could not end.

    Args:
        future: the future; nothing is checked if it has ended.
        lock: the lock of the connection whose thread ends it; None for no check.
        timeout: the longest wait in seconds; 0 is none.
    """
    if lock is not None and timeout != 0 and not future.done():
        lock.check_wait()


def if_free(lock: CallersLock, work: Callable[[], _T]) -> _T | None:
    """Calls a function under a lock if the lock is free, also of this thread; never waits for it.

    Returns:
        What the function returned; None if the lock was not free.
    """
    if lock._is_owned():
        return None
    taken: list[bool] = []
    try:
        taken.extend(map(lock.acquire, (False,)))  # one step: ^C comes when `taken` is right
        return work() if taken[0] else None
    finally:
        if True in taken:
            lock.release()
