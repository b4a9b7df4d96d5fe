"""Pure. What passes between training's core and the members of hybrid replicas, and its frames.

Law: two kinds of conversation, each authenticated before its first frame. A *coordinator*
conversation (member and rank 0) carries orders and events; a *channel* conversation (member and its
core) carries parameters out and gradients in. A frame is a head of fixed size, one message, and at
most one payload of raw bytes, which its receiver reads straight into place.

Layout (little endian): u32 length of the message, u64 length of the payload, message, payload.
"""

from __future__ import annotations

import struct
from typing import Union

import msgspec

from ..domain.hybrid import Ask, GradientHeader, MemberDone, MemberFailed, StepPlan
from ..errors import ProtocolError
from .reading import reader

HEAD = struct.Struct("<IQ")
MESSAGE_MAX = 1 << 20
PAYLOAD_MAX = 1 << 40


class MemberMessage(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """The common head."""


class Hello(MemberMessage, frozen=True, tag="hello"):
    """Member to coordinator, first: who it is. `incarnation` ascends from one incarnation to the
    next."""

    member: int
    incarnation: int


class Alive(MemberMessage, frozen=True, tag="alive"):
    """Member to coordinator, now and then: it is still there."""


class Told(MemberMessage, frozen=True, tag="told"):
    """Coordinator to member: an order, and where the channel of the core it names listens."""

    order: Ask
    channel: tuple[str, ...]


class MemberReport(MemberMessage, frozen=True, tag="word"):
    """Member to coordinator: a event about itself."""

    event: Union[MemberDone, MemberFailed]  # noqa: UP007


class JoinMessage(MemberMessage, frozen=True, tag="enter"):
    """Member to channel, first: whose gradients will come this way."""

    replica: int
    generation: int


class Work(MemberMessage, frozen=True, tag="work"):
    """Lane to member: the parameters of a step, then its samples (`protocol.value`; none of one who
    only follows), as one payload; to be answered by a `Gradient` with this very header."""

    header: GradientHeader


class Gradient(MemberMessage, frozen=True, tag="gradient"):
    """Member to channel: the sum over its samples, as raw numbers; zeros of one who only follows.
    """

    header: GradientHeader


class GradientReceipt(MemberMessage, frozen=True, tag="heard"):
    """Lane to member: what became of a gradient; empty: it was taken."""

    header: GradientHeader
    refusal: str


AnyMemberMessage = Union[Hello, Alive, Told, MemberReport, JoinMessage, Work,  # noqa: UP007
                         Gradient, GradientReceipt]
_encoder = msgspec.msgpack.Encoder()
_read = reader(AnyMemberMessage)
_read_plan = reader(StepPlan)


def pack(message: MemberMessage, payload: int = 0) -> bytes:
    """Head and message of a frame whose payload of so many bytes follows."""
    body = _encoder.encode(message)
    return HEAD.pack(len(body), payload) + body


def sizes(head: bytes) -> tuple[int, int]:
    """Lengths of message and payload.

    Raises:
        ProtocolError: no frame begins so.
    """
    message, payload = HEAD.unpack(head)
    if message > MESSAGE_MAX or payload > PAYLOAD_MAX:
        raise ProtocolError(f"a frame of {message} + {payload} bytes is not in the protocol")
    return message, payload


def unpack(body: bytes) -> AnyMemberMessage:
    """The message.

    Raises:
        ProtocolError: it is none.
    """
    try:
        message: AnyMemberMessage = _read(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a message is not in the protocol: {error}") from None
    return message


def pack_plan(plan: StepPlan) -> bytes:
    """A plan as rank 0 tells it to the core."""
    return _encoder.encode(plan)


def unpack_plan(data: bytes) -> StepPlan:
    """The plan in these bytes, which come from the core's own rank 0."""
    plan: StepPlan = _read_plan(data)
    return plan
