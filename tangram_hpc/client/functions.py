"""The functions that a client has shipped: each is pickled once and lies in the job's store once.

A call carries the digest of its function and its pickled arguments. The book remembers what it may
ship again. An entry leaves the store when the book has evicted its function and no open action
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
        function: what the caller submits.
        name: of its entry in the store.
        size: bytes of that entry.
        submitted: how many actions were submitted with it; changed under the book's lock.
        ended: how many of these actions have ended; changed by the client's own thread alone.
        evicted: whether the book no longer remembers it. Its entry is then removed with the last
            of its actions.
        token: holds the name until the entry is removed. Two threads may both see the last action
            end; only the one that pops the name removes the entry.
    """

    __slots__ = ("ended", "evicted", "function", "name", "size", "submitted", "token")

    def __init__(self, function: Callable[..., Any], name: str, size: int) -> None:
        self.function, self.name, self.size = function, name, size
        self.submitted = self.ended = 0
        self.evicted, self.token = False, [name]


class FunctionBook:
    """Functions that were shipped: each is pickled once and stored once, by digest. The book holds
    what it may ship again: the youngest, up to a number and an amount of bytes."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf, self._lock = shelf, threading.Lock()
        self._known: dict[int, Shipped] = {}  # by id() of the function, oldest first
        self._bytes = 0

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
             pickled: bool) -> tuple[pl.FunctionCall, Shipped]:
        """Returns the payload of one call, and its function, which stays in the store until
        `ended` or `not_submitted` was called for this call.

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
            known.submitted += 1
        return pl.FunctionCall(known.name, arguments, pickled), known

    def ended(self, shipped: Shipped) -> None:
        """Called by the client's own thread when an action with this function has ended. It waits
        for no lock: `_evict` sets `evicted` before it looks at the counts, and this method counts
        before it looks at `evicted`, so at least one of the two sees that no action is left."""
        shipped.ended += 1
        if shipped.evicted:
            self._release(shipped)

    def not_submitted(self, shipped: Shipped | None) -> None:
        """Called when a call was prepared and could not be submitted; None for a command."""
        if shipped is None:
            return
        with self._lock:
            shipped.submitted -= 1
            if shipped.evicted:
                self._release(shipped)

    def _learn(self, function: Callable[..., Any]) -> Shipped:
        data = _cloudpickled(function, "function")
        old = self._known.pop(id(function), None)  # of a function that is gone
        if old is not None:
            self._evict(old)
        known = self._known[id(function)] = Shipped(function, self._shelf.put(data), len(data))
        self._bytes += len(data)
        while len(self._known) > FUNCTIONS_MAX or (
                self._bytes > FUNCTION_BYTES_MAX and len(self._known) > 1):
            self._evict(self._known.pop(next(iter(self._known))))
        return known

    def _evict(self, known: Shipped) -> None:
        self._bytes -= known.size
        known.evicted = True
        self._release(known)

    def _release(self, known: Shipped) -> None:
        if known.ended == known.submitted:
            with suppress(IndexError):  # another thread has popped the name
                self._shelf.release(known.token.pop())


def _cloudpickled(value: Any, field: str) -> bytes:
    import cloudpickle  # only function actions need it

    try:
        return bytes(cloudpickle.dumps(value))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidInput(f"{field}: cannot be pickled ({error})") from None
