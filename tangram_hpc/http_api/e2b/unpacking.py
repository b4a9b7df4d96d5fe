"""Unpacks compressed uploads within bounds of memory.

A gzip member ends with the size that it has unpacked, modulo 2**32 (RFC 1952). That size is the
bound: if it is larger than `UNPACKED_MAX`, nothing is unpacked; if more than that comes out, the
body is wrong, and zlib checks the rest.

The content of a small body may really have `UNPACKED_MAX` bytes. So all uploads of this process
share the memory that `UPLOADS` counts: an upload that does not fit waits for those before it, and
is refused after `WAIT_S`. Copies that are made while a content is split and sent are not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import deque
from collections.abc import AsyncIterator

from .wire_errors import ApiError

UNPACKED_MAX = 512 << 20  # bytes of one upload
TOGETHER_MAX = 1 << 30  # bytes of all uploads at a time
WAIT_S = 10.0
_MEMBER_MIN = 18  # bytes of a gzip member's head and trailer
_MAGIC = b"\x1f\x8b"
_GZIP = 31  # zlib's number for a window of 32 KiB with gzip's head and trailer


class UnpackedBytes:
    """How many unpacked bytes uploads may hold at a time; for one event loop.

    Args:
        most: the bytes of all uploads together.
        wait_s: how long an upload waits for those before it, in seconds.
    """

    def __init__(self, most: int, wait_s: float) -> None:
        self._left, self._wait_s = most, wait_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def held(self, size: int) -> AsyncIterator[None]:
        """Holds `size` bytes within the context, after all who asked before have got theirs.

        Raises:
            ApiError: they are not free in time; the client may try again.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._admit()
        try:
            await asyncio.wait([turn], timeout=self._wait_s)
            if not turn.done():
                raise ApiError(503, f"other uploads hold the memory for the {size} bytes that the "
                                    "body has unpacked; try again", retry_after_s=1)
            yield
        finally:
            if turn.done():
                self._left += size
            else:
                self._waiting.remove((size, turn))
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._left:
            size, turn = self._waiting.popleft()
            self._left -= size
            turn.set_result(None)


UPLOADS = UnpackedBytes(TOGETHER_MAX, WAIT_S)


def unpacked_size(body: bytes) -> int:
    """Returns how many bytes `unpacked` may make of a body; 0 if it will refuse the body."""
    size = _told_size(body)
    return size if size <= UNPACKED_MAX else 0


def _told_size(body: bytes) -> int:
    return int.from_bytes(body[-4:], "little") if len(body) >= _MEMBER_MIN else 0


def unpacked(body: bytes, encoding: str) -> bytes:
    """Returns the content of a compressed body. It may take a second; call it in a thread.

    Args:
        body: the whole body.
        encoding: the request's Content-Encoding.

    Raises:
        ApiError: the encoding is not gzip, the body is not one whole gzip member, or its content
            is larger than `UNPACKED_MAX`.
    """
    if encoding != "gzip":
        raise ApiError(415, f"Content-Encoding: {encoding!r:.20} is not read; send gzip")
    if len(body) < _MEMBER_MIN or not body.startswith(_MAGIC):
        raise ApiError(400, "the body is not gzip, as its Content-Encoding says, or is cut off")
    size = _told_size(body)
    if size > UNPACKED_MAX:
        raise ApiError(413, f"the body has {size} bytes unpacked; at most {UNPACKED_MAX} are read")
    unpacker = zlib.decompressobj(wbits=_GZIP)
    try:
        data = unpacker.decompress(body, size + 1)  # one byte of room, so that zlib goes to the end
    except zlib.error:
        raise ApiError(400, "the body is not gzip, as its Content-Encoding says, or is damaged"
                       ) from None
    if len(data) != size or not unpacker.eof or unpacker.unused_data:
        raise ApiError(400, "the body is cut off, or is not a single member of gzip")
    return data
