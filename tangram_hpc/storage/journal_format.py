"""The layout of a journal's file: its first bytes, its head, its records, and its compressed form.

A file begins with 8 bytes of magic, of which the seventh is the version. Since version 10 the first
record is the segment's head, a msgpack map; every other record is a msgpack list of events. How
records are framed is in `record_file.py`.

A segment to which nothing is written any more may be compressed: another magic, and the file in
pieces, each of which is a record whose body is one piece as zlib compresses it. An empty piece
marks the end. Pieces are small, so that a repair can set a flipped bit right. Readers see the file
as it was.
"""

from __future__ import annotations

import zlib
from itertools import islice
from pathlib import Path

import msgspec

from ..domain.event import JOURNAL_VERSION, AnyEvent, Event
from ..errors import InvalidInput
from ..protocol.frame import Buffer
from ..protocol.reading import reader
from .record_file import framed, read_records

MAGIC = b"TGJRNL" + bytes([JOURNAL_VERSION, 0])
COMPRESSED = b"TGJRNZ" + bytes([1, 0])
# older versions, which lack events, kinds of actions, or heads, of later ones: decisions 0058,
# 0068, 0069, 0086, 0089 and 0111
READ_TOO = (5, 6, 7, 8, 9, 10)
UNGUARDED = 5  # the records of this version have no checksum over their length
PIECE = 1 << 16
_encoder = msgspec.msgpack.Encoder()
_read = reader(list[AnyEvent])


class SegmentHead(msgspec.Struct, frozen=True):
    """What a segment of the journal says before its events.

    Attributes:
        epoch: the number of the broker that writes it (`folder_lock`); 0 if that is not known.
        read: how many records of events that broker has read, or written, of segments before this
            one, by file name. Whatever an earlier broker has added since counts for nobody.
    """

    epoch: int = 0
    read: dict[str, int] = {}


_read_head = reader(SegmentHead)


def version_of(data: Buffer) -> int:
    """Returns the version that a journal's first bytes tell; 0 if this release cannot read it."""
    magic = bytes(data[:8])
    if len(magic) < 8 or (magic[:6], magic[7:]) != (MAGIC[:6], MAGIC[7:]):
        return 0
    return magic[6] if magic[6] in (*READ_TOO, JOURNAL_VERSION) else 0


def is_newer(data: Buffer) -> bool:
    """Returns whether a magic is that of a later version; far later ones are damage."""
    magic = bytes(data[:8])
    return (magic[:6], magic[7:]) == (MAGIC[:6], MAGIC[7:]) and 0 < magic[6] - MAGIC[6] < 8


def is_torn_magic(data: Buffer) -> bool:
    """Returns whether the data is the beginning of a magic, and nothing else."""
    magic = bytes(data[:8])
    return len(data) < 8 and MAGIC[:6].startswith(magic[:6]) and (
        len(magic) < 7 or magic[6] in (*READ_TOO, JOURNAL_VERSION))


def is_head(body: Buffer) -> bool:
    """Returns whether the body of a record is that of a head: a msgpack map."""
    first = body[0] if len(body) else 0
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def decode_head(body: Buffer) -> SegmentHead:
    """Returns the head that is in the body of a record.

    Raises:
        msgspec.DecodeError: Another release wrote it.
    """
    head: SegmentHead = _read_head(body)
    return head


def beginning(head: SegmentHead) -> bytes:
    """Returns the first bytes of a new segment: its magic and its head."""
    return MAGIC + framed(_encoder.encode(head))


def decode_events(body: Buffer) -> list[Event]:
    """Returns the events of one record.

    Raises:
        msgspec.DecodeError: Another release wrote it.
    """
    events: list[Event] = _read(body)
    return events


def encode_events(events: list[Event]) -> bytes:
    """Returns events as the body of one record."""
    return _encoder.encode(events)


def compressed(data: Buffer) -> bytes:
    """Returns a whole segment in its compressed form. At zlib's level 6, a segment of 7 MB of
    functions took four times the CPU time and became 1 % smaller.
    """
    view = memoryview(data)
    pieces = [view[at : at + PIECE] for at in range(0, len(view), PIECE)]
    pieces.append(view[:0])
    return COMPRESSED + b"".join(framed(zlib.compress(piece, 1)) for piece in pieces)


def plain(data: bytes, path: Path, remedy: str, whole: bool = True) -> bytes:
    """Returns a segment as it was before it was compressed, if it was.

    Args:
        data: the content of the file, or its beginning if not `whole`; then only the first piece is
            returned.
        path: the file, for the error's text.
        remedy: what the reader of an error can do.

    Raises:
        InvalidInput: the compressed form is damaged.
    """
    if not is_compressed(data):
        return data
    where = f"journal {path}"
    bodies = read_records(data, len(COMPRESSED), where, remedy)
    pieces = [zlib.decompress(body) for _, body in (bodies if whole else islice(bodies, 1))]
    if not pieces or (pieces[-1] and whole):
        raise InvalidInput(f"{where}: damaged: it was compressed, and its end is missing. {remedy}")
    return b"".join(pieces)


def is_compressed(data: Buffer) -> bool:
    """Returns whether the first bytes are those of a compressed segment."""
    return bytes(data[: len(COMPRESSED)]) == COMPRESSED
