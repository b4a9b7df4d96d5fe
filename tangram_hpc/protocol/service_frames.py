"""Defines what a worker and the runner of a service copy send to each other. Pure.

Nothing of it leaves the machine or is stored. Each order has one answer. A frame is a little-endian
u32 length and one msgpack message, never a pickle. The arguments of a request are not read here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Union

import msgspec

from ..errors import ProtocolError
from .reading import reader

FRAME_MAX = 1 << 30  # bytes of requests or replies
_SLACK = 64  # bytes of a message around its requests or replies
HEAD = struct.Struct("<I")


class ServiceFrame(msgspec.Struct, frozen=True, array_like=True, tag_field="k"):
    """The base class of all messages of this file."""


# ---- worker -> runner ------------------------------------------------------------------------


class LoadModel(ServiceFrame, frozen=True, tag=1):
    """The first order: load a model.

    Attributes:
        model: name or path of the model.
        task: what it shall do.
        dtype: type of its numbers.
        max_len: longest input, in tokens.
        device: kind of device it will run on.
        threads: CPU threads that it may use.
        fresh: folder where newer weights of it are published; empty for none.
    """

    model: str
    task: str
    dtype: str
    max_len: int
    device: str
    threads: int
    fresh: str = ""


class Wake(ServiceFrame, frozen=True, tag=2):
    """Bring the model onto the device with this number, as the runner's process counts devices."""

    device: int = 0


class Park(ServiceFrame, frozen=True, tag=3):
    """Move the model away from its device."""


class CallBatch(ServiceFrame, frozen=True, tag=4):
    """Carry out these requests as one batch. Each is a method and its arguments."""

    requests: tuple[tuple[str, bytes], ...]


class ExitRunner(ServiceFrame, frozen=True, tag=5):
    """Exit. There is no answer."""


class StandBy(ServiceFrame, frozen=True, tag=6):
    """Free the device's memory except for the weights."""


# ---- runner -> worker ------------------------------------------------------------------------


class Loaded(ServiceFrame, frozen=True, tag=20):
    """The model is loaded and parked; `host_mib` is the host memory that it takes."""

    host_mib: int


class CopyMoved(ServiceFrame, frozen=True, tag=21):
    """A Wake, Park or StandBy has been carried out."""


class Answers(ServiceFrame, frozen=True, tag=22):
    """For each request its value, or what was wrong with it."""

    replies: tuple[tuple[bytes, str], ...]


class NoRoom(ServiceFrame, frozen=True, tag=23):
    """The device has too little memory. Everything is as it was before the order."""

    text: str


class ModelRefused(ServiceFrame, frozen=True, tag=24):
    """The model can never be served in this way."""

    text: str


RunnerOrder = Union[LoadModel, Wake, Park, CallBatch, ExitRunner, StandBy]  # noqa: UP007 - by tag
RunnerAnswer = Union[Loaded, CopyMoved, Answers, NoRoom, ModelRefused]  # noqa: UP007

_encoder = msgspec.msgpack.Encoder()
_read_order = reader(RunnerOrder)
_read_answer = reader(RunnerAnswer)


def frame(message: ServiceFrame) -> bytes:
    """Returns the bytes of a message's frame.

    Raises:
        ProtocolError: the message is too large.
    """
    body = _encoder.encode(message)
    if len(body) > FRAME_MAX + _SLACK:
        raise ProtocolError(f"a frame of {len(body)} bytes is not in the protocol")
    return HEAD.pack(len(body)) + body


def size(head: bytes) -> int:
    """Returns how many bytes follow this head.

    Raises:
        ProtocolError: the head announces more than a frame may have.
    """
    told: int = HEAD.unpack(head)[0]
    if told > FRAME_MAX + _SLACK:
        raise ProtocolError(f"a frame of {told} bytes is not in the protocol")
    return told


def order(body: bytes) -> RunnerOrder:
    """Returns the order in the body of a frame.

    Raises:
        ProtocolError: it is no order.
    """
    told: RunnerOrder = _told(_read_order, body, "an order")
    return told


def answer(body: bytes) -> RunnerAnswer:
    """Returns the answer in the body of a frame.

    Raises:
        ProtocolError: it is no answer.
    """
    told: RunnerAnswer = _told(_read_answer, body, "an answer")
    return told


def _told(read: Callable[[bytes], Any], body: bytes, what: str) -> Any:
    try:
        return read(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{what} is not in the protocol: {error}") from None
