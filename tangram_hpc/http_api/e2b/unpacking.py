"""Unpacks compressed uploads within bounds of memory.

A gzip member ends with the size that it has unpacked, modulo 2**32 (RFC 1952). That size is the
bound: if it is larger than `UNPACKED_MAX`, nothing is unpacked; if more than that comes out, the
body is wrong, and zlib checks the rest.

The content of a small body may really have `UNPACKED_MAX` bytes. So all compressed uploads of this
process share the memory that `UPLOADS` counts for their contents.
"""

from __future__ import annotations

import zlib

from .upload_memory import TOGETHER_MAX, WAIT_S, UploadMemory
from .wire_errors import ApiError

UNPACKED_MAX = 512 << 20  # bytes of one upload
_MEMBER_MIN = 18  # bytes of a gzip member's head and trailer
_MAGIC = b"\x1f\x8b"
_GZIP = 31  # zlib's number for a window of 32 KiB with gzip's head and trailer


UPLOADS = UploadMemory(TOGETHER_MAX, WAIT_S)


def unpacked_size(body: bytes | bytearray) -> int:
    """Returns how many bytes `unpacked` may make of a body; 0 if it will refuse the body."""
    size = _told_size(body)
    return size if size <= UNPACKED_MAX else 0


def _told_size(body: bytes | bytearray) -> int:
    return int.from_bytes(body[-4:], "little") if len(body) >= _MEMBER_MIN else 0


def unpacked(body: bytes | bytearray, encoding: str) -> bytes:
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
