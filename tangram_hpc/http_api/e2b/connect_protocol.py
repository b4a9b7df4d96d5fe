"""The Connect protocol over HTTP/1.1, as far as the E2B wire uses it: JSON, no compression. No I/O.

A single call is a POST with a JSON body. A stream is a sequence of envelopes. Each envelope has one
byte of flags, four bytes of length (big endian) and as many bytes of JSON as the length says. The
last envelope of an answer has the flag 2 and tells whether the stream ended well.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response

from .wire_errors import RpcError

MESSAGE_MAX = 8 << 20  # bytes of one envelope that a client may send
MESSAGES_MAX = 4096  # of one request; small ones would cost much more memory than they have bytes
STREAM_JSON = "application/connect+json"
_COMPRESSED, _LAST = 1, 2
_HEAD = struct.Struct(">BI")
_TIMEOUT_DIGITS = 10  # of Connect-Timeout-Ms, by the protocol


def envelope(message: Mapping[str, Any]) -> bytes:
    """Returns one message of a stream in its envelope."""
    return _framed(0, message)


def last_envelope(error: RpcError | None = None) -> bytes:
    """Returns the envelope that ends a stream; it holds the error if the stream has failed."""
    return _framed(_LAST, {} if error is None else {"error": error.told()})


def error_answer(error: RpcError, headers: Mapping[str, str]) -> Response:
    """Returns the answer to a call that has failed. If the call's answer is a stream, the protocol
    has the error in the last envelope: some clients read only the status of another answer.

    Args:
        error: why the call has failed.
        headers: the request's headers.
    """
    if streams(headers):
        return Response(last_envelope(error), media_type=STREAM_JSON)
    return error.response()


def streams(headers: Mapping[str, str]) -> bool:
    """Whether a request is a call that is answered by a stream."""
    return headers.get("content-type", "").partition(";")[0].strip() == STREAM_JSON


async def on_rpc_error(request: Request, error: Exception) -> Response:
    """Answers a call that has raised an RpcError."""
    assert isinstance(error, RpcError)
    return error_answer(error, request.headers)


def _framed(flags: int, message: Mapping[str, Any]) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    return _HEAD.pack(flags, len(data)) + data


def read_envelopes(data: bytes) -> list[dict[str, Any]]:
    """Returns the messages of a whole stream that a client has sent.

    Raises:
        RpcError: an envelope is cut off, too large or compressed, or does not hold a JSON object;
            or there are too many envelopes.
    """
    messages: list[dict[str, Any]] = []
    at = 0
    while at < len(data):
        if len(data) - at < _HEAD.size:
            raise RpcError("invalid_argument", "the stream ends within the head of an envelope")
        flags, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if size > MESSAGE_MAX:
            raise RpcError("resource_exhausted", f"an envelope says it has {size} bytes; at most "
                                                 f"{MESSAGE_MAX} are read")
        if size > len(data) - at:
            raise RpcError("invalid_argument", f"an envelope says it has {size} bytes, and the "
                                               f"stream ends after {len(data) - at}")
        if flags & _COMPRESSED:
            raise RpcError("unimplemented", "compressed envelopes are not read; send identity")
        if flags & ~_LAST:
            raise RpcError("invalid_argument", f"an envelope has the unknown flags {flags}")
        if not flags & _LAST:
            if len(messages) == MESSAGES_MAX:
                raise RpcError("resource_exhausted", f"the stream has more than {MESSAGES_MAX} "
                                                     "messages; send the rest in another request")
            messages.append(read_object(data[at:at + size]))
        at += size
    return messages


def read_object(data: bytes) -> dict[str, Any]:
    """Returns the object that a JSON text holds; an empty text is an empty object.

    Raises:
        RpcError: the text is not a JSON object.
    """
    try:
        value = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise RpcError("invalid_argument", "the message is not JSON") from None
    if not isinstance(value, dict):
        raise RpcError("invalid_argument", "the message is not a JSON object")
    return value


def timeout_s(headers: Mapping[str, str]) -> float | None:
    """Returns the time that a call may take, in seconds; None for no limit.

    Args:
        headers: the request's headers, with lower-case names.

    Raises:
        RpcError: the header Connect-Timeout-Ms is not a whole number of milliseconds.
    """
    text = headers.get("connect-timeout-ms", "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _TIMEOUT_DIGITS):
        raise RpcError("invalid_argument", f"Connect-Timeout-Ms: {text!r:.20} is not a whole "
                                           "number of at most 10 digits")
    return int(text) / 1000 or None
