"""Records in a file that only grows: how they are framed, and how a torn end is told from damage.

Problem: a broker that is killed while it writes leaves the beginning of a record at the end of its
file. Nothing in that record was promised, so readers drop it silently. A disk that flips a bit
damages a record that was promised, and readers must report it. A checksum over the body alone
cannot tell the two apart: a flipped length makes the rest of the file look like one torn record.

A record is: u32 length of the body, u32 crc32 of the body, u32 crc32 of those eight bytes, the
body, and one byte `END`. All numbers are little endian. The header has a checksum of its own, so a
length is used only if it is as it was written. `END` is not zero, and no single bit flip makes it
zero; what a torn end may look like is described at `read_records`.
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
    """Raised when a record that was completely written is not as it was written; the text names the
    file, the offset and the remedy.
    """


def framed(body: bytes) -> bytes:
    """Returns a body with its header and its end, as it goes into a file."""
    front = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little")
    return b"".join((front, zlib.crc32(front).to_bytes(4, "little"), body, bytes((END,))))


def read_records(data: Buffer, start: int, where: str, remedy: str
                 ) -> Iterator[tuple[int, memoryview]]:
    """Yields the offset and the content of each body, oldest first. O(size of the data).

    A file system that lost its power may show zeros where the end of a file was never written. So a
    record of which everything from some inner byte to the end of the file is zero was never
    completely written, and is a torn end. Everything else that does not fit is damage.

    Args:
        data: The whole file.
        start: How many bytes at its beginning are no records.
        where: Names the file in an error.
        remedy: What the reader of an error can do.

    Raises:
        Damaged: A record is not as it was written, and is not the torn end of the file.
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
                return  # torn: the file had its full size, but not yet its last blocks
            raise _damaged(where, at, "its checksum is wrong", remedy)
        yield at + HEAD, body
        at = end + 1


def read_unguarded(data: Buffer, start: int, where: str, remedy: str
                   ) -> Iterator[tuple[int, memoryview]]:
    """Does what `read_records` does, for files of the earlier format, which are still read.

    A record of that format is: u32 length, u32 crc32 of the body, body. There is no checksum over
    the length, so a damaged length looks like a torn end; a damaged body is reported.

    Raises:
        Damaged: A body that is not the last one differs from what was written.
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
    """Returns how many bytes there are from an offset to the last byte that is not zero."""
    return len(bytes(view[at:]).rstrip(b"\0"))


def _damaged(where: str, at: int, why: str, remedy: str) -> Damaged:
    return Damaged(f"{where}: damaged at byte {at}: the record there is not as it was written "
                   f"({why}), so nothing from there on can be relied on. {remedy}")
