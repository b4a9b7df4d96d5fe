"""Packs many messages and their payloads into one write, without copying large payloads. Pure.

A frame is, in little endian: u32 length of the rest, u32 length of the meta part, the meta part,
the payloads. The meta part is msgpack `[[message, ...], [payload length, ...]]`. Each message with
`n = 1` owns the next payload, in order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from ..errors import ProtocolError
from .message import AnyMessage, Message
from .reading import reader

FRAME_MAX = 256 * 1024 * 1024
# Bytes in one read. With twice as many, the C library maps new memory for every read: 20 us.
RECEIVE = 1 << 16
# A broker or worker that has handled so many messages since its last frame, or that has prefetched
# leases, is busy. It then waits for BUSY_GAP_S between two frames, so that these are few and large.
BUSY_MESSAGES = 16
BUSY_GAP_S = 0.002
_SMALL = 512  # bytes; up to this mean size, payloads cost less to copy than to list one by one
_HEAD = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()
_read = reader(tuple[list[AnyMessage], list[int]])

Buffer = bytes | bytearray | memoryview
Envelope = tuple[AnyMessage, memoryview | None]  # a message with its payload


class Outbox:
    """Collects messages until the next flush. It is not thread-safe, but an exception that a signal
    handler raises within `put`, such as KeyboardInterrupt, leaves it whole.
    """

    __slots__ = ("_envelopes",)

    def __init__(self) -> None:
        self._envelopes: list[tuple[Message, Buffer | None]] = []

    def put(self, message: Message, payload: Buffer | None = None) -> None:
        """Adds a message. `payload` must be given exactly if the message has `n = 1`."""
        if payload is None:
            assert not getattr(message, "n", 0), message
        else:
            assert message.n, message  # type: ignore[attr-defined]
        # in one step: a payload without its message would become that of the next message
        self._envelopes.append((message, payload))

    def take(self) -> list[Buffer]:
        """Returns one frame with all that was put, as buffers for a gathering write; [] if nothing
        was.
        """
        if not self._envelopes:
            return []
        payloads = [payload for _, payload in self._envelopes if payload is not None]
        lengths = [len(p) for p in payloads]
        size = sum(lengths)
        meta = _encoder.encode(([message for message, _ in self._envelopes], lengths))
        head = _HEAD.pack(4 + len(meta) + size, len(meta))
        # leave empty buffers out: a writer would wait for ever for an empty last buffer to be sent
        frame: list[Buffer] = [head + meta, *filter(len, payloads)]
        if size <= _SMALL * len(payloads):
            frame = [b"".join(frame)]
        self._envelopes = []
        return frame


class Inbox:
    """Cuts a stream of bytes into frames, and keeps the beginning of one that is incomplete."""

    __slots__ = ("_kept", "_need")

    def __init__(self) -> None:
        self._kept = bytearray()
        self._need = 8

    def feed(self, data: Buffer) -> Iterator[Envelope]:
        """Yields each message with its payload, a view of `data` that keeps those bytes alive.

        Raises:
            ProtocolError: the bytes are not frames.
        """
        if self._kept:
            self._kept += data
            if len(self._kept) < self._need:
                return
            data = bytes(self._kept)
            self._kept = bytearray()
        view, at, end = memoryview(data), 0, len(data)
        while end - at >= 8:
            rest, meta = _HEAD.unpack_from(view, at)
            if rest > FRAME_MAX or meta + 4 > rest:
                raise ProtocolError(f"a frame of {rest} bytes is not in the protocol")
            if end - at < 4 + rest:
                break
            yield from open_frame(view[at + 4 : at + 4 + rest])
            at += 4 + rest
        if at < end:
            self._kept = bytearray(view[at:])
            self._need = 4 + _HEAD.unpack_from(view, at)[0] if end - at >= 8 else 8


def open_frame(body: memoryview) -> list[Envelope]:
    """Returns the messages of one frame, given its body: all that follows the first length.

    Raises:
        ProtocolError: the bytes are not the body of a frame.
    """
    meta_len = int.from_bytes(body[:4], "little")
    try:
        messages, lengths = _read(body[4 : 4 + meta_len])
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a message is not in the protocol: {error}") from None
    at, end, next_payload = 4 + meta_len, len(body), iter(lengths)
    envelopes: list[Envelope] = []
    for message in messages:
        if getattr(message, "n", 0):
            size = next(next_payload, -1)
            after = at + size
            if size < 0 or after > end:
                raise ProtocolError("a frame lacks a payload that it announces")
            envelopes.append((message, body[at:after]))
            at = after
        else:
            envelopes.append((message, None))
    return envelopes
