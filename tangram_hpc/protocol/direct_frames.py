"""The messages of direct calls: between a client and the process that serves it on a node. Pure.

An action that serves direct calls holds its units and runs one function of this package
(`app/direct_server.py`). That connects to the client, and then takes one call after the other from
it, past the broker and the worker. Before a message there are four bytes with its length, in little
endian. The client sends a `DirectCall` and waits for the `DirectReply`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ..errors import ProtocolError
from .frame import Buffer
from .process_frames import FRAME_MAX
from .reading import reader

_HEAD = struct.Struct("<I")
_STEP = 16 << 20  # bytes for which memory is taken before the ones before them have come
_encoder = msgspec.msgpack.Encoder()


class DirectCall(msgspec.Struct, frozen=True, array_like=True):
    """One call of a function.

    Attributes:
        number: the number of the call on this connection, from 1 on.
        function: the number of the function.
        pickled_function: the function, with its first call on this connection; empty afterwards.
        arguments: pickle of (args, kwargs).
        trusted: whether the result may travel as a pickle.
        dropped: numbers of functions that will not be called any more.
    """

    number: int
    function: int
    pickled_function: bytes
    arguments: bytes
    trusted: bool
    dropped: tuple[int, ...] = ()


class DirectReply(msgspec.Struct, frozen=True, array_like=True):
    """The end of one call.

    Attributes:
        number: the number of the call.
        returned: the payload, a `ValueReturn` or an `ErrorReturn`.
        run_ns: the run time of the call.
        over: whether this was the last call, as the term of the action is over.
    """

    number: int
    returned: bytes
    run_ns: int
    over: bool


_read_call, _read_reply = reader(DirectCall), reader(DirectReply)


class ByteStream(Protocol):
    """What a connection must offer to carry these messages."""

    def send(self, data: Buffer) -> None:
        """Sends all of these bytes. Raises OSError: the peer is gone."""

    def receive_into(self, view: memoryview) -> int:
        """Waits for bytes, and returns how many it has put into `view`; 0 if the peer is gone.

        Raises:
            OSError: the connection broke.
        """


def send_message(stream: ByteStream, message: DirectCall | DirectReply) -> None:
    """Sends one message.

    Raises:
        OSError: the peer is gone.
    """
    body = _encoder.encode(message)
    stream.send(_HEAD.pack(len(body)) + body)


def receive_message(stream: ByteStream) -> bytearray | None:
    """Waits for the next message and returns its bytes; None if the peer has closed the connection.

    Raises:
        OSError: the connection broke.
        ProtocolError: the message is too long.
    """
    head = _receive(stream, _HEAD.size)
    if head is None:
        return None
    size = _HEAD.unpack(head)[0]
    if size > FRAME_MAX:
        raise ProtocolError(f"a message of {size} bytes is not in the protocol")
    return _receive(stream, size)


def read_call(message: bytearray) -> DirectCall:
    """Returns the call in these bytes. Raises ProtocolError: they hold none."""
    call: DirectCall = _read(_read_call, message)
    return call


def read_reply(message: bytearray) -> DirectReply:
    """Returns the reply in these bytes. Raises ProtocolError: they hold none."""
    reply: DirectReply = _read(_read_reply, message)
    return reply


def _read(read: Callable[[bytearray], Any], message: bytearray) -> Any:
    try:
        return read(message)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a direct call or its reply is not in the protocol: {error}"
                            ) from None


def _receive(stream: ByteStream, size: int) -> bytearray | None:
    data, at = bytearray(min(size, _STEP)), 0
    while at < size:
        if at == len(data):
            data.extend(bytes(min(_STEP, size - at)))
        with memoryview(data) as view, view[at:] as rest:
            got = stream.receive_into(rest)
        if not got:
            return None
        at += got
    return data
