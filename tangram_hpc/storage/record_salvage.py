"""Reads all that can be read of a damaged file of records, for a person who repairs it. Pure.

A broker that starts never reads behind damage (`record_file.py`). A repair may, as far as it is
certain where a record begins and that its content is as it was written:

- One flipped bit is set right. In a header, three things must then agree: the header's checksum,
  that of the body, and the end; or else the file ends within the record, which is torn. In a body
  of at most `BODY_MAX` bytes the checksum says which bit it was; damage of several bits is taken
  for one bit with a chance below 1 in 30 000.
- Behind a record whose header is right, the next record begins where the length says.
- Behind any other damage, records are believed only if they follow each other without a gap to the
  very end of the file. A payload may itself contain what looks like records, but is then followed
  by the rest of its own record, which does not.

Everything else is a hole. The earlier format has no checksum over the length, so nothing behind a
hole is believed there.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from ..protocol.frame import Buffer
from .one_bit import flip, flipped_bit
from .record_file import (
    END,
    HEAD,
    UNGUARDED_HEAD,
    Found,
    Look,
    look,
    look_unguarded,
    one_bit_off,
    unguarded_size,
)

BODY_MAX = 1 << 14


@dataclass
class Salvage:
    """What can be read of a file.

    Attributes:
        records: Offset and body of each record, in the order of the file.
        corrected: Offsets of those records in which one flipped bit was set right, and of a torn
            one whose header had a flipped bit.
        holes: Offset and size of each part that cannot be read, bytes.
        torn: Size of the torn end, bytes.
    """

    records: list[tuple[int, Buffer]] = field(default_factory=list)
    corrected: list[int] = field(default_factory=list)
    holes: list[tuple[int, int]] = field(default_factory=list)
    torn: int = 0

    @property
    def damaged_at(self) -> int:
        """Returns the offset of the first damage; -1 if there is none."""
        return min((*self.corrected, *(at for at, _ in self.holes)), default=-1)


def salvage(data: Buffer, start: int, examine: Look = look) -> Salvage:
    """Reads the records of a file from the offset `start` on. O(size), but O(size of the hole more)
    for each hole without a right header.

    Args:
        data: The whole file.
        start: How many bytes at its beginning are no records.
        examine: `look`, or `look_unguarded` for a file of the earlier format.
    """
    view, at, result = memoryview(data), start, Salvage()
    while at < len(view):
        found, body, end = examine(view, at)
        if found is Found.TORN:
            result.torn = len(view) - at
            break
        if found is Found.WHOLE:
            result.records.append((at, body))
            at = end
            continue
        right = (_corrected if examine is look else _corrected_unguarded)(view, at)
        if right is not None:
            result.corrected.append(at)
            if right[1] > len(view):
                result.torn = len(view) - at
                break
            result.records.append((at, right[0]))
            at = right[1]
            continue
        if found is not Found.BAD_BODY or examine is look_unguarded:
            end = _next_chain(view, at + 1) if examine is look else len(view)
        result.holes.append((at, end - at))
        at = end
    return result


def _corrected(view: memoryview, at: int) -> tuple[Buffer, int] | None:
    """Returns the body of a record with one flipped bit, and the offset behind the record. This is
    behind the end of the file if the record is torn, too.
    """
    head = bytes(view[at : at + HEAD])
    if len(head) < HEAD:
        return None
    if zlib.crc32(head[:8]) != int.from_bytes(head[8:], "little"):
        for bit in range(8 * HEAD):
            right = flip(head, bit)
            if zlib.crc32(right[:8]) == int.from_bytes(right[8:], "little"):
                size = int.from_bytes(right[:4], "little")
                rest = bytes(view[at + HEAD : at + HEAD + size + 1])
                found, body, end = look(memoryview(right + rest), 0)
                if found is Found.TORN:
                    return body, len(view) + 1
                return (body, at + end) if found is Found.WHOLE else None
        return None
    size, crc = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:8], "little")
    body, end = view[at + HEAD : at + HEAD + size], at + HEAD + size
    if view[end] != END:
        one = (view[end] ^ END).bit_count() == 1 and zlib.crc32(body) == crc
        return (body, end + 1) if one else None
    wrong = flipped_bit(body, crc) if size <= BODY_MAX else None
    return (flip(body, wrong), end + 1) if wrong is not None else None


def _corrected_unguarded(view: memoryview, at: int) -> tuple[Buffer, int] | None:
    """Does what `_corrected` does, for a record of the earlier format."""
    begin = at + UNGUARDED_HEAD
    if size := unguarded_size(view, at):
        return view[begin : begin + size], begin + size
    size, crc = (int.from_bytes(view[n : n + 4], "little") for n in (at, at + 4))
    body = view[begin : begin + size]
    if not size or size > BODY_MAX or len(body) < size or not one_bit_off(body, crc):
        return None
    wrong = flipped_bit(body, crc)
    return body if wrong is None else flip(body, wrong), begin + size


def _next_chain(view: memoryview, at: int) -> int:
    """Returns the first offset from which whole records lead to the very end; else the end."""
    for begin in range(at, len(view) - HEAD):
        if zlib.crc32(view[begin : begin + 8]) != int.from_bytes(view[begin + 8 : begin + HEAD],
                                                                 "little"):
            continue
        end, found = begin, Found.WHOLE
        while end < len(view) and found is Found.WHOLE:
            found, _, end = look(view, end)
        if end == len(view) and found is Found.WHOLE:
            return begin
    return len(view)
