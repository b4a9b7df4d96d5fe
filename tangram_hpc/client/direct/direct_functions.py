"""The functions of a stream of direct calls, each pickled once and known by a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..functions import FUNCTION_BYTES_MAX, FUNCTIONS_MAX, pickled_function


class KnownFunction(NamedTuple):
    """A function, as it was at its first call.

    Attributes:
        function: it is kept, so that no other function gets its id().
        number: its number in the stream.
        pickled: its pickle.
    """

    function: Callable[..., Any]
    number: int
    pickled: bytes


class DirectFunctions:
    """The functions that were called last, up to a number and a total size.

    Attributes:
        by_number: the functions by number, oldest first.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, KnownFunction] = {}
        self._by_id: dict[int, KnownFunction] = {}
        self._bytes = self._last = 0

    def known(self, function: Callable[..., Any]) -> KnownFunction:
        """Returns what is known of a function, and drops the oldest ones if it is new and they are
        too many.

        Raises:
            InvalidInput: it cannot be pickled, or is too large.
        """
        found = self._by_id.get(id(function))
        if found is not None:
            return found
        pickled = pickled_function(function)
        self._last += 1
        self._bytes += len(pickled)
        found = KnownFunction(function, self._last, pickled)
        self._by_id[id(function)] = self.by_number[found.number] = found
        while len(self.by_number) > 1 and (
                len(self.by_number) > FUNCTIONS_MAX or self._bytes > FUNCTION_BYTES_MAX):
            old = self.by_number.pop(next(iter(self.by_number)))
            del self._by_id[id(old.function)]
            self._bytes -= len(old.pickled)
        return found
