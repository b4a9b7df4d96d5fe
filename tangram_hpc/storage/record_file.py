"""Records in a file that only grows: how they are framed, and how a torn end is told from damage.

Problem: a broker that is killed while it writes leaves the beginning of a record at the end of its
file. Nothing that was promised is in that record, so readers drop it without a word. A disk that
flips a bit damages a record that was promised, and readers must say so, loudly. A checksum over the
body alone cannot tell the two apart: a flipped length makes the rest of the file look like one torn
record.

A record is: u32 length of the body, u32 crc32 of the body, u32 crc32 of those eight bytes, the
body, and one byte `END`. All numbers are little endian.

- The header has a checksum of its own, so a length is believed only when it is as it was written.
- `END` is not zero and no single bit flip makes it zero. A file system that lost its power may show
  zeros where the end of a file was never written. A record from whose inside on everything to the
  end of the file is zero was therefore never written whole.
- Everything else that does not fit is damage.

Files of the format before this one (`read_unguarded`) had no checksum over the length. They are
still read, with what that format can tell.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ..errors import InvalidInput
from ..protocol.frame import Buffer

END = 0xA5
HEAD = 12  # bytes in front of a body
_UNGUARDED_HEAD = 8


class Damaged(InvalidInput):
    """A record that was written whole is not as it was written; the message names file, offset and
    remedy."""


def framed(body: bytes) -> bytes:
    """A body as it stands in a file."""
    front = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little")
    return b"".join((front, zlib.crc32(front).to_bytes(4, "little"), body, bytes((END,))))


def read_records(data: Buffer, start: int, where: str, remedy: str
                 ) -> Iterator[tuple[int, memoryview]]:
    """The offset and the content of each body, oldest first. O(size of the data).

    Args:
        data: the whole file.
        start: bytes at its beginning that are no records.
        where: names the file in an error.
        remedy: what the reader of an error can do.

    Raises:
        Damaged: a record is not as it was written, and it is not the torn end of the file.
    """
    view, at = memoryview(data), start
    while at < len(view):
        head = view[at : at + HEAD]
        front, check = head[:8], head[8:]
        if len(head) < HEAD or zlib.crc32(front) != int.from_bytes(check, "little"):
            if _written(view, at) < HEAD:
                return  # its writer, or the machine, died inside this header
            raise _damaged(where, at, "the checksum of its header is wrong", remedy)
        size = int.from_bytes(front[:4], "little")
        end = at + HEAD + size
        if end >= len(view):
            return  # torn: its writer died inside this record
        body = view[at + HEAD : end]
        if view[end] != END or zlib.crc32(body) != int.from_bytes(front[4:], "little"):
            if _written(view, at) <= HEAD + size:
                return  # torn: the file had its size, but not yet its last blocks
            raise _damaged(where, at, "its checksum is wrong", remedy)
        yield at + HEAD, body
        at = end + 1


def read_unguarded(data: Buffer, start: int, where: str, remedy: str
                   ) -> Iterator[tuple[int, memoryview]]:
    """As `read_records`, for files of the format before this one: u32 length, u32 crc32 of the
    body, body. A length that was damaged looks like a torn end there; a damaged body is told.

    Raises:
        Damaged: a body in front of others is not as it was written.
    """
    view, at = memoryview(data), start
    while at + _UNGUARDED_HEAD <= len(view):
        size = int.from_bytes(view[at : at + 4], "little")
        begin = at + _UNGUARDED_HEAD
        body = view[begin : begin + size]
        if len(body) < size or not size:
            return
        if zlib.crc32(body) != int.from_bytes(view[at + 4 : begin], "little"):
            if begin + size == len(view):
                return
            raise _damaged(where, at, "its checksum is wrong", remedy)
        yield begin, body
        at = begin + size


def _written(view: memoryview, at: int) -> int:
    """Bytes from an offset on up to the last one that is not zero."""
    return len(bytes(view[at:]).rstrip(b"\0"))


def _damaged(where: str, at: int, why: str, remedy: str) -> Damaged:
    return Damaged(f"{where}: damaged at byte {at}: the record there is not as it was written "
                   f"({why}), so nothing from there on can be relied on. {remedy}")
