"""Reads and writes files of a session in parts, so that no message and no sandbox has to hold a
large file several times.

A sandbox's init works within the session's memory limit and holds a message four times while it
encodes it. So a file travels in parts of `PART` bytes. A write submits all of its parts at once,
because what is submitted to a session runs in order: nothing that is submitted later comes between.
A read learns the file's size with its first part and asks for each further one then. Other work of
the session may come between, so a file that has changed meanwhile is an error and never a mixture.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

from ..errors import FileFailed, InvalidInput
from ..protocol import payload as pl
from ..protocol.process_frames import FILE_MAX
from .future import Future

PART = 8 << 20  # bytes of a file in one message


class PartialRead:
    """A read that needs several calls.

    Args:
        path: the file.
        offset: the first byte.
        length: the most bytes; negative for all that follow.
        ask: submits a call of this read, with which the given future ends; None for a new future.
            It must not hold this read: a cycle would keep the content until a garbage collection.
    """

    def __init__(self, path: str, offset: int, length: int,
                 ask: Callable[[pl.FileCall, PartialRead, Future | None], Future]) -> None:
        self._path, self._ask = path, ask
        self._at, self._left = offset, length if length >= 0 else FILE_MAX
        self._whole = length < 0
        self._pieces: list[bytes] = []
        self._first: tuple[int, int] | None = None

    def ask_next(self, future: Future | None) -> Future:
        """Submits the call that asks for the next part of the file.

        Raises:
            TangramError: it could not be submitted.
        """
        call = pl.FileCall(self._path, offset=self._at, length=min(PART, self._left))
        return self._ask(call, self, future)

    def take(self, piece: pl.FileReturn, future: Future) -> bytes | None:
        """Takes an answer.

        Args:
            piece: the answer.
            future: the future of the whole read.

        Returns:
            The content if it is complete; None if another call was submitted.

        Raises:
            FileFailed: the file is too large, has changed since the first part, or the answer holds
                more than was asked for.
            TangramError: the next call could not be submitted.
        """
        seen = piece.size, piece.stamp
        if len(piece.data) > min(PART, self._left):
            raise _failed(f"{self._path}: its sandbox sent more than it was asked for", errno.EIO)
        if self._first is None:
            self._first = seen
            if self._whole and piece.size - self._at > FILE_MAX:
                raise _failed(f"{self._path}: {piece.size} bytes are more than one read returns "
                              f"({FILE_MAX}); give an offset and a length", errno.EFBIG)
        elif seen != self._first:
            raise _failed(f"{self._path}: it has changed while it was read; read it again",
                          errno.EAGAIN)
        self._pieces.append(piece.data)
        self._at += len(piece.data)
        self._left -= len(piece.data)
        if not piece.data or self._left <= 0 or self._at >= piece.size:
            return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self.ask_next(future)
        return None


def write_calls(path: str, data: bytes | bytearray | memoryview, mode: int
                ) -> Iterator[pl.FileCall]:
    """The calls that write a file; at least one. Each is made when it is asked for, so that no more
    than a part of the content is copied at a time."""
    view = memoryview(data)
    if view.ndim != 1 or view.itemsize != 1:
        view = memoryview(bytes(view))
    return (pl.FileCall(path, bytes(view[at:at + PART]), mode, offset=at)
            for at in range(0, max(1, len(view)), PART))


def span(offset: int, length: int | None) -> tuple[int, int]:
    """Checks which part of a file is asked for; the length is -1 for all that follow.

    Raises:
        InvalidInput: a number is negative or not whole.
    """
    for name, value in (("offset", offset), ("length", length)):
        if value is not None and (type(value) is not int or value < 0):
            raise InvalidInput(f"{name}: {value!r} is not a whole number of bytes >= 0")
    return offset, -1 if length is None else length


def _failed(text: str, number: int) -> FileFailed:
    error = FileFailed(text)
    error.code = errno.errorcode[number]
    return error
