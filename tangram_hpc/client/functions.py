"""The functions that a client has shipped: each is pickled once and lies in the job's store once.

A call carries the digest of its function and its pickled arguments. The book remembers what it may
ship again. An entry leaves the store when the book has forgotten its function and no open action
needs it any more. The count of open actions is kept without a lock between the threads that submit
and the client's own thread, since both are on the way of every call.

Law: this is the only place on the client that pickles; nothing here unpickles.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import InvalidInput
from ..protocol import payload as pl
from .shelf import Shelf

FUNCTIONS_MAX = 1024  # shipped functions that are remembered
FUNCTION_BYTES_MAX = 32 << 20  # what they may take in the store, where no open action needs them
_NO_ARGUMENTS = pickle.dumps(((), {}), protocol=5)


class Shipped:
    """A function in the job's store, and who needs it there.

    Attributes:
        function, name, size: the function, its name in the store, its bytes.
        entry: its name once more, until somebody has taken it to let the store's entry go.
        taken: how many actions were submitted with it; changed under the book's lock.
        over: how many of these are over; changed by the client's own thread alone.
        forgotten: whether the book has let it go; it leaves the store with the last of them.
    """

    __slots__ = ("entry", "forgotten", "function", "name", "over", "size", "taken")

    def __init__(self, function: Callable[..., Any], name: str, size: int) -> None:
        self.function, self.name, self.size = function, name, size
        self.entry = [name]
        self.taken = self.over = 0
        self.forgotten = False


class FunctionBook:
    """Functions that were shipped: each is pickled once and stored once, by digest. The book holds
    what it may ship again: the youngest, up to a number and an amount of bytes."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf, self._lock = shelf, threading.Lock()
        self._known: dict[int, Shipped] = {}  # by id() of the function, oldest first
        self._bytes = 0

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
             pickled: bool) -> tuple[pl.FunctionCall, Shipped]:
        """The payload of one call, and its function, which stays in the store for it until `over`
        or `not_sent` is called with it.

        Raises:
            InvalidInput: the function or an argument cannot be pickled.
        """
        arguments = _NO_ARGUMENTS
        if args or kwargs:
            try:
                arguments = pickle.dumps((args, kwargs), protocol=5)
            except (pickle.PicklingError, AttributeError, TypeError):
                arguments = _cloudpickled((args, kwargs), "arguments")
        with self._lock:
            known = self._known.get(id(function))
            if known is None or known.function is not function:
                known = self._learn(function)
            known.taken += 1
        return pl.FunctionCall(known.name, arguments, pickled), known

    def over(self, shipped: Shipped) -> None:
        """Called when an action with this function is over, by the client's own thread. It waits
        for no lock: `_forget` sets `forgotten` before it looks at the counts, and this counts
        before it looks at `forgotten`, so that one of the two, or both, see the last action."""
        shipped.over += 1
        if shipped.forgotten:
            self._release(shipped)

    def not_sent(self, shipped: Shipped | None) -> None:
        """Called when an action, of a function or not, was not submitted after all."""
        if shipped is None:
            return
        with self._lock:
            shipped.taken -= 1
            if shipped.forgotten:
                self._release(shipped)

    def _learn(self, function: Callable[..., Any]) -> Shipped:
        data = _cloudpickled(function, "function")
        old = self._known.pop(id(function), None)  # of a function that is gone
        if old is not None:
            self._forget(old)
        known = self._known[id(function)] = Shipped(function, self._shelf.put(data), len(data))
        self._bytes += len(data)
        while len(self._known) > FUNCTIONS_MAX or (
                self._bytes > FUNCTION_BYTES_MAX and len(self._known) > 1):
            self._forget(self._known.pop(next(iter(self._known))))
        return known

    def _forget(self, known: Shipped) -> None:
        self._bytes -= known.size
        known.forgotten = True
        self._release(known)

    def _release(self, known: Shipped) -> None:
        if known.over == known.taken:
            with suppress(IndexError):  # another thread has taken it
                self._shelf.release(known.entry.pop())


def _cloudpickled(value: Any, field: str) -> bytes:
    import cloudpickle  # only function actions need it

    try:
        return bytes(cloudpickle.dumps(value))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidInput(f"{field}: cannot be pickled ({error})") from None
