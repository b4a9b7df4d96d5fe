"""Decodes msgpack that came from another process or from a file. Pure.

Bytes that are not what was expected raise `msgspec.DecodeError`, whatever is wrong with them. By
itself msgspec lets other exceptions through: for a str that is not UTF-8, for a value that is
nested too deep, and for what numpy raises in an extension's hook. A caller would forget them. So
all decoders of msgpack are made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

_WRONG = (ValueError, TypeError, IndexError, RecursionError)


def reader(kind: Any, ext_hook: Callable[[int, memoryview], Any] | None = None
           ) -> Callable[[bytes | bytearray | memoryview], Any]:
    """Returns a function that decodes a value of type `kind`, or raises msgspec.DecodeError."""
    decode = msgspec.msgpack.Decoder(kind, ext_hook=ext_hook).decode

    def read(data: bytes | bytearray | memoryview) -> Any:
        try:
            return decode(data)
        except _WRONG as error:
            raise msgspec.DecodeError(str(error)) from None

    return read
