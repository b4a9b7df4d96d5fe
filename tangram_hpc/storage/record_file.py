"""Records in a file that only grows: how they are framed, and how a torn end is told from damage.

Problem: a broker that is killed while it writes leaves the beginning of a record at the end of its
file. Nothing in that record was promised, so readers drop it silently. A disk that flips a bit
damages a record that was promised, and readers must report it. A checksum over the body alone
cannot tell the two apart: a flipped length makes the rest of the file look like one torn record.

A record is: u32 length of the body, u32 crc32 of the body, u32 crc32 of those eight bytes, the
body, and one byte `END`. All numbers are little endian. The header has a checksum of its own, so a
length is used only if it is as it was written. `END` is not zero, and no single bit flip makes it
zero; what a torn end may look like is described at `look`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from typing import Any

import msgspec

from ..errors import InvalidInput
from ..protocol.frame import Buffer
from ..protocol.reading import reader
from .one_bit import flipped_bit

END = 0xA5
HEAD = 12  # bytes in front of a body
UNGUARDED_HEAD = 8
_decode = reader(Any)


class Damaged(InvalidInput):
    """Raised when a record that was completely written is not as it was written; the text names the
    file, the offset and the remedy.
    """


def framed(body: bytes) -> bytes:
    """Returns a body with its header and its end, as it goes into a file."""
    front = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little")
    return b"".join((front, zlib.crc32(front).to_bytes(4, "little"), body, bytes((END,))))


class Found(Enum):
    """What stands at an offset of a file: a whole record; the torn end of the file; or a record
    whose header, or whose body, is not as it was written.
    """

    WHOLE = "whole"
    TORN = "torn"
    BAD_HEADER = "the checksum of its header is wrong"
    BAD_BODY = "its checksum is wrong"


# Of the file and an offset: what stands there, and the body with the offset behind the record. The
# last two mean something for WHOLE, and for BAD_BODY of a record with a header of its own.
Look = Callable[[memoryview, int], tuple[Found, memoryview, int]]


def look(view: memoryview, at: int) -> tuple[Found, memoryview, int]:
    """Examines one record.

    A file system that lost its power may show zeros where the end of a file was never written. So a
    record of which everything from some inner byte to the end of the file is zero was never
    completely written, and is a torn end. Everything else that does not fit is damage.
    """
    head = view[at : at + HEAD]
    front, check = head[:8], head[8:]
    if len(head) < HEAD or zlib.crc32(front) != int.from_bytes(check, "little"):
        # torn: its writer, or the machine, died inside this header
        return Found.TORN if _written(view, at) < HEAD else Found.BAD_HEADER, head[:0], at
    size = int.from_bytes(front[:4], "little")
    end = at + HEAD + size
    if end >= len(view):
        return Found.TORN, head[:0], at  # its writer died inside this record
    body = view[at + HEAD : end]
    if view[end] == END and zlib.crc32(body) == int.from_bytes(front[4:], "little"):
        return Found.WHOLE, body, end + 1
    # torn: the file had its full size, but not yet its last blocks
    return Found.TORN if _written(view, at) <= HEAD + size else Found.BAD_BODY, body, end + 1


def look_unguarded(view: memoryview, at: int) -> tuple[Found, memoryview, int]:
    """Does what `look` does, for files of the earlier format, which are still read.

    A record of that format is: u32 length, u32 crc32 of the body, body. There is no checksum over
    the length. What looks like a torn end is therefore taken for damage in two cases: only the
    length is wrong (some beginning of the rest has the checksum and is a whole msgpack value), or
    only one bit is wrong.
    """
    begin = at + UNGUARDED_HEAD
    if begin > len(view):
        return Found.TORN, view[:0], at
    size, crc = (int.from_bytes(view[n : n + 4], "little") for n in (at, at + 4))
    end = begin + size
    body = view[begin:end]
    if size and len(body) == size and zlib.crc32(body) == crc:
        return Found.WHOLE, body, end
    written = _written(view, at)
    if not size and written:
        return Found.BAD_HEADER, view[:0], at
    if size and end < len(view):
        return Found.BAD_BODY, view[:0], at
    if end == len(view) and (written == UNGUARDED_HEAD + size or one_bit_off(body, crc)):
        return Found.BAD_BODY, view[:0], at
    if unguarded_size(view, at):
        return Found.BAD_HEADER, view[:0], at
    return Found.TORN, view[:0], at


def one_bit_off(body: Buffer, crc: int) -> bool:
    """Returns whether a body and its checksum differ in one bit of either."""
    return (zlib.crc32(body) ^ crc).bit_count() == 1 or flipped_bit(body, crc) is not None


def unguarded_size(view: memoryview, at: int) -> int:
    """Returns the size of the body of a record of the earlier format whose length is wrong; 0 if
    there is no whole body. O(bytes up to the end of that body, or of the file).
    """
    wanted, crc = int.from_bytes(view[at + 4 : at + 8], "little"), 0
    rest = view[at + UNGUARDED_HEAD :]
    for n in range(len(rest)):
        crc = zlib.crc32(rest[n : n + 1], crc)
        if crc == wanted:
            with suppress(msgspec.DecodeError):
                _decode(rest[: n + 1])
                return n + 1
    return 0


def read_records(data: Buffer, start: int, where: str, remedy: str, examine: Look = look
                 ) -> Iterator[tuple[int, memoryview]]:
    """Yields the offset and the content of each body, oldest first. O(size of the data).

    Args:
        data: The whole file.
        start: How many bytes at its beginning are no records.
        where: Names the file in an error.
        remedy: What the reader of an error can do.
        examine: `look`, or `look_unguarded` for a file of the earlier format.

    Raises:
        Damaged: A record is not as it was written, and is not the torn end of the file.
    """
    view, at = memoryview(data), start
    while at < len(view):
        found, body, end = examine(view, at)
        if found is Found.TORN:
            return
        if found is not Found.WHOLE:
            raise _damaged(where, at, found.value, remedy)
        yield end - len(body) - (examine is look), body
        at = end


def _written(view: memoryview, at: int) -> int:
    """Returns how many bytes there are from an offset to the last byte that is not zero."""
    return len(bytes(view[at:]).rstrip(b"\0"))


def _damaged(where: str, at: int, why: str, remedy: str) -> Damaged:
    return Damaged(f"{where}: damaged at byte {at}: the record there is not as it was written "
                   f"({why}), so nothing from there on can be relied on. {remedy}")
