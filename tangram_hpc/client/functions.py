"""The functions that a client has uploaded to the job's store.

Each function is pickled once and stored once. A call carries the digest of its function and its
pickled arguments. The cache remembers the functions that may be called again. An entry leaves the
store when the cache has evicted its function and no open action needs it any more. Threads that
submit and the connection's thread count open actions without a common lock, because every call
passes through both.

This is the only module of the client that pickles, and it never unpickles.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..errors import InvalidInput, described
from ..interrupts import CallersLock
from ..protocol import payload as pl
from ..protocol.process_frames import PAYLOAD_MAX
from .request import check_size
from .stored_payloads import StoredPayloads

FUNCTIONS_MAX = 1024  # functions that the cache remembers
FUNCTION_BYTES_MAX = 32 << 20  # largest size in the store of functions that no open action needs
_NO_FILE = "<dynamic-code>"  # what cloudpickle writes instead of the name of a file
# The module of a script, which no other process can import, is __main__; in a process that
# multiprocessing has spawned, it also has this name.
_SPAWNED = "__mp_main__"
_OF_SCRIPT, _OF_SPAWNED = b"\x8c\x08__main__", b"\x8c\x0b__mp_main__"  # as a pickle names them
_NO_ARGUMENTS = pickle.dumps(((), {}), protocol=5)


class UploadedFunction:
    """A function in the job's store, and the actions that need it there.

    Attributes:
        function: what the caller submits.
        name: the name of its entry in the store.
        size: the size of that entry, in bytes.
        submitted: how many actions were submitted with it; changed under the cache's lock.
        ended: how many of these actions have ended; changed by the connection's thread alone.
        evicted: whether the cache no longer remembers it. Its entry is then removed with the last
            of its actions.
        token: holds the name until the entry is removed. Two threads may both see the last action
            end; only the one that pops the name removes the entry.
    """

    __slots__ = ("ended", "evicted", "function", "name", "size", "submitted", "token")

    def __init__(self, function: Callable[..., Any], name: str, size: int) -> None:
        self.function, self.name, self.size = function, name, size
        self.submitted = self.ended = 0
        self.evicted, self.token = False, [name]


class FunctionCache:
    """The most recently uploaded functions, up to a number and a total size."""

    def __init__(self, store: StoredPayloads) -> None:
        self._store, self._lock = store, CallersLock()
        self._known: dict[int, UploadedFunction] = {}  # by id() of the function, oldest first
        self._bytes = 0  # the sum of their sizes

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
             pickled: bool) -> tuple[pl.FunctionCall, UploadedFunction]:
        """Prepares one call and uploads the function if the cache does not know it.

        Args:
            function: the function, as it is at its first call.
            args, kwargs: its arguments; they are pickled.
            pickled: whether the result may come back as a pickle.

        Returns:
            The call's payload, and the function. The function stays in the store until `ended` or
            `not_submitted` is called for this call.

        Raises:
            InvalidInput: the function or an argument cannot be pickled, or is too large.
        """
        arguments = pickled_arguments(args, kwargs)
        with self._lock:
            known = self._known.get(id(function))
            if known is None or known.function is not function:
                known = self._upload(function)
            known.submitted += 1
        return pl.FunctionCall(known.name, arguments, pickled), known

    def ended(self, uploaded: UploadedFunction) -> None:
        """Called by the connection's thread when an action with this function has ended. It waits
        for no lock: `_evict` sets `evicted` before it reads the counts, and this method counts
        before it reads `evicted`, so at least one of the two sees that no action is left."""
        uploaded.ended += 1
        if uploaded.evicted:
            self._release(uploaded)

    def not_submitted(self, uploaded: UploadedFunction | None) -> None:
        """Called when a call was prepared and was never sent; None for a command."""
        if uploaded is None:
            return
        with self._lock:
            uploaded.submitted -= 1
            if uploaded.evicted:
                self._release(uploaded)

    def _upload(self, function: Callable[..., Any]) -> UploadedFunction:
        data = pickled_function(function)
        old = self._known.pop(id(function), None)  # a former function that had the same id()
        if old is not None:
            self._evict(old)
        known = self._known[id(function)] = UploadedFunction(function, self._store.put(data),
                                                             len(data))
        self._bytes += len(data)
        while len(self._known) > FUNCTIONS_MAX or (
                self._bytes > FUNCTION_BYTES_MAX and len(self._known) > 1):
            self._evict(self._known.pop(next(iter(self._known))))
        return known

    def _evict(self, known: UploadedFunction) -> None:
        self._bytes -= known.size
        known.evicted = True
        self._release(known)

    def _release(self, known: UploadedFunction) -> None:
        if known.ended == known.submitted:
            with suppress(IndexError):  # another thread has popped the name
                self._store.release(known.token.pop())


@functools.cache
def _pickler_class() -> type[pickle.Pickler]:
    """cloudpickle's pickler, but code keeps the name of its file. It is made here because only
    function actions need cloudpickle, whose import takes time."""
    import cloudpickle

    if _SPAWNED in sys.modules:  # cloudpickle takes it for a module that others can import
        cloudpickle.register_pickle_by_value(sys.modules[_SPAWNED])
    reducers = cloudpickle.Pickler.dispatch_table
    reduced = reducers[types.CodeType]

    def code_with_file(code: types.CodeType) -> tuple[Any, ...]:
        make, parts = reduced(code)
        return make, tuple(code.co_filename if part == _NO_FILE else part for part in parts)

    class _NamingPickler(cloudpickle.Pickler):  # type: ignore[misc]  # the base has no types
        dispatch_table = ChainMap({types.CodeType: code_with_file}, reducers)

    return _NamingPickler


def pickled_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickles the arguments of one call. What belongs to the caller's script, such as an object of
    a class that is defined there, travels by value.

    Raises:
        InvalidInput: an argument cannot be pickled, or they are too large.
    """
    if not args and not kwargs:
        return _NO_ARGUMENTS
    # a large argument is refused before it is copied: a GiB takes seconds
    size = 0
    for one in (*args, *kwargs.values()) if kwargs else args:
        if type(one) is bytes or type(one) is str:
            size += len(one)
    check_size(size, "arguments", PAYLOAD_MAX)
    try:
        arguments = pickle.dumps((args, kwargs), protocol=5)
        # a search takes about a second for each GiB, so there is no more than one where one will do
        by_value = _OF_SCRIPT in arguments or (_SPAWNED in sys.modules and _OF_SPAWNED in arguments)
    except Exception:  # noqa: BLE001 - an argument pickles itself by its own code
        by_value = True
    if by_value:
        arguments = pickled_by_value((args, kwargs), "arguments")
    check_size(len(arguments), "arguments", PAYLOAD_MAX)
    return arguments


def pickled_function(function: Callable[..., Any]) -> bytes:
    """Pickles a function.

    Raises:
        InvalidInput: it cannot be pickled, or is too large.
    """
    data = pickled_by_value(function, "function")
    check_size(len(data), "function", PAYLOAD_MAX)
    return data


def pickled_by_value(value: Any, field: str) -> bytes:
    """Pickles what another process may not be able to import, such as a function of a script. Code
    keeps the name of its file, by which a traceback finds its lines; from version 3.1.3 on,
    cloudpickle itself drops it.

    Args:
        value: what to pickle.
        field: its name in an error.

    Raises:
        InvalidInput: it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _pickler_class()(file)
    try:
        pickler.dump(value)
    except Exception as error:  # noqa: BLE001 - a value pickles itself by its own code
        raise InvalidInput(f"{field}: cannot be pickled ({described(error)})") from None
    return file.getvalue()
