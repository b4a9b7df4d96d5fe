"""Pure. The messages between the core trainer and the members of hybrid replicas, and their frames.

There are two kinds of connection, each authenticated before its first frame. A member's connection
to the *coordinator* (rank 0) carries orders and events. Its connection to a *gradient channel* (a
rank of its core) carries parameters to the member and gradients back.

A frame is a head of fixed size, one message, and at most one payload of raw bytes, which the
receiver reads straight into place. Layout, little endian: u32 length of the message, u64 length of
the payload, message, payload.
"""

from __future__ import annotations

import struct
from typing import Union

import msgspec

from ..domain.hybrid import GradientHeader, MemberDone, MemberFailed, StageOrder, StepPlan
from ..errors import ProtocolError
from .reading import reader

HEAD = struct.Struct("<IQ")
MESSAGE_MAX = 1 << 20
PAYLOAD_MAX = 1 << 40


class MemberMessage(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Base class of all messages."""


class MemberHello(MemberMessage, frozen=True, tag="hello"):
    """Member to coordinator, first: which member it is. `incarnation` grows with each restart."""

    member: int
    incarnation: int


class Alive(MemberMessage, frozen=True, tag="alive"):
    """Member to coordinator: heartbeat."""


class OrderMessage(MemberMessage, frozen=True, tag="told"):
    """Coordinator to member: an order, and the addresses of the gradient channel that it names."""

    order: StageOrder
    channel: tuple[str, ...]


class MemberReport(MemberMessage, frozen=True, tag="word"):
    """Member to coordinator: an event about this member."""

    event: Union[MemberDone, MemberFailed]  # noqa: UP007


class JoinMessage(MemberMessage, frozen=True, tag="enter"):
    """Member to gradient channel, first: whose gradients will arrive on this connection."""

    replica: int
    generation: int


class GradientWork(MemberMessage, frozen=True, tag="work"):
    """Gradient channel to member: the parameters of a step, then its samples, as one payload.

    Samples are encoded by `protocol.value`; a member that only follows gets none. The answer is a
    `Gradient` with the same header.
    """

    header: GradientHeader


class Gradient(MemberMessage, frozen=True, tag="gradient"):
    """Member to gradient channel: the sum over its samples; zeros if it only follows."""

    header: GradientHeader


class GradientReceipt(MemberMessage, frozen=True, tag="heard"):
    """Gradient channel to member: why a gradient was refused; "" if it was accepted."""

    header: GradientHeader
    refusal: str


AnyMemberMessage = Union[MemberHello, Alive, OrderMessage, MemberReport, JoinMessage,  # noqa: UP007
                         GradientWork, Gradient, GradientReceipt]
_encoder = msgspec.msgpack.Encoder()
_read = reader(AnyMemberMessage)
_read_plan = reader(StepPlan)


def pack(message: MemberMessage, payload: int = 0) -> bytes:
    """The head and the message of a frame that a payload of `payload` bytes follows."""
    body = _encoder.encode(message)
    return HEAD.pack(len(body), payload) + body


def sizes(head: bytes) -> tuple[int, int]:
    """The lengths of the message and the payload, in bytes.

    Raises:
        ProtocolError: A length is above its limit.
    """
    message, payload = HEAD.unpack(head)
    if message > MESSAGE_MAX or payload > PAYLOAD_MAX:
        raise ProtocolError(f"a frame of {message} + {payload} bytes is not in the protocol")
    return message, payload


def unpack(body: bytes) -> AnyMemberMessage:
    """Decodes a message.

    Raises:
        ProtocolError: The bytes are no message of this protocol.
    """
    try:
        message: AnyMemberMessage = _read(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a message is not in the protocol: {error}") from None
    return message


def pack_plan(plan: StepPlan) -> bytes:
    """Encodes a plan, for rank 0 to broadcast to the other ranks."""
    return _encoder.encode(plan)


def unpack_plan(data: bytes) -> StepPlan:
    """Decodes a plan that this core trainer's own rank 0 has broadcast."""
    plan: StepPlan = _read_plan(data)
    return plan
