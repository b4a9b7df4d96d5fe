"""Pure. What a worker and the runner of a copy say to each other, and how it is framed.

Law: nothing here leaves the machine or is kept. One order, one answer; each is a little-endian u32
length and one msgpack message; never a pickle. What a request holds is opaque here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Union

import msgspec

from ..errors import ProtocolError
from .reading import reader

FRAME_MAX = 1 << 30  # bytes of requests or replies
_SLACK = 64  # bytes; what a message is around them
HEAD = struct.Struct("<I")


class Frame(msgspec.Struct, frozen=True, array_like=True, tag_field="k"):
    """The common head of all messages of this file."""


# ---- worker -> runner ------------------------------------------------------------------------


class Load(Frame, frozen=True, tag=1):
    """First order: which model, and as what. `threads`: of CPU; `max_len` in tokens; `fresh`: where
    newer weights of it are published, if anywhere."""

    model: str
    task: str
    dtype: str
    max_len: int
    device: str
    threads: int
    fresh: str = ""


class Wake(Frame, frozen=True, tag=2):
    """Bring it onto the device of this number, as the runner's process counts them."""

    device: int = 0


class Park(Frame, frozen=True, tag=3):
    """Leave the device."""


class Call(Frame, frozen=True, tag=4):
    """Carry these out as one batch: each a method and its arguments."""

    requests: tuple[tuple[str, bytes], ...]


class Close(Frame, frozen=True, tag=5):
    """Exit; nothing is answered."""


# ---- runner -> worker ------------------------------------------------------------------------


class Loaded(Frame, frozen=True, tag=20):
    """It is ready, parked, and takes so much host memory."""

    host_mib: int


class Done(Frame, frozen=True, tag=21):
    """Wake or Park is carried out."""


class Answers(Frame, frozen=True, tag=22):
    """Of each request its value, or why it was wrong."""

    replies: tuple[tuple[bytes, str], ...]


class NoRoom(Frame, frozen=True, tag=23):
    """The device's memory does not suffice; all is as it was before the order."""

    text: str


class Refused(Frame, frozen=True, tag=24):
    """The model can never be served so."""

    text: str


Order = Union[Load, Wake, Park, Call, Close]  # noqa: UP007 - by tag
Answer = Union[Loaded, Done, Answers, NoRoom, Refused]  # noqa: UP007

_encoder = msgspec.msgpack.Encoder()
_read_order = reader(Order)
_read_answer = reader(Answer)


def frame(message: Frame) -> bytes:
    """A message as it goes through the socket.

    Raises:
        ProtocolError: it is too large.
    """
    body = _encoder.encode(message)
    if len(body) > FRAME_MAX + _SLACK:
        raise ProtocolError(f"a frame of {len(body)} bytes is not in the protocol")
    return HEAD.pack(len(body)) + body


def size(head: bytes) -> int:
    """How many bytes follow this head.

    Raises:
        ProtocolError: more than a frame may have.
    """
    told: int = HEAD.unpack(head)[0]
    if told > FRAME_MAX + _SLACK:
        raise ProtocolError(f"a frame of {told} bytes is not in the protocol")
    return told


def order(body: bytes) -> Order:
    """The order in a frame.

    Raises:
        ProtocolError: it is none.
    """
    told: Order = _told(_read_order, body, "an order")
    return told


def answer(body: bytes) -> Answer:
    """The answer in a frame.

    Raises:
        ProtocolError: it is none.
    """
    told: Answer = _told(_read_answer, body, "an answer")
    return told


def _told(read: Callable[[bytes], Any], body: bytes, what: str) -> Any:
    try:
        return read(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{what} is not in the protocol: {error}") from None
