"""Pure. Reading msgpack that another process or a file gives: the one door to msgspec's decoders.

Law: bytes that are not what was asked for are a `msgspec.DecodeError`, whatever is wrong with them.
By itself msgspec lets through what Python says of a str that is not UTF-8 and of what is nested too
deep, and an extension's hook lets through what numpy says; whoever reads would forget them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

_WRONG = (ValueError, TypeError, IndexError, RecursionError)


def reader(kind: Any, ext_hook: Callable[[int, memoryview], Any] | None = None
           ) -> Callable[[bytes | bytearray | memoryview], Any]:
    """A function that gives the `kind` in some bytes, or raises msgspec.DecodeError."""
    decode = msgspec.msgpack.Decoder(kind, ext_hook=ext_hook).decode

    def read(data: bytes | bytearray | memoryview) -> Any:
        try:
            return decode(data)
        except _WRONG as error:
            raise msgspec.DecodeError(str(error)) from None

    return read
