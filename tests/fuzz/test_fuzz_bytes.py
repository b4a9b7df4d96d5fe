"""Bytes from another process: each decoder gives a value or its own error, and what it gives is
encoded and decoded again to the same value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
from helpers.fuzz_inputs import (
    LEAVES,
    SHORT,
    STEPS,
    any_of,
    edited_bytes,
    edited_text,
    members,
    packed,
    samples,
)
from hypothesis import given
from hypothesis import strategies as st

from tangram_hpc.errors import ProtocolError
from tangram_hpc.http_api.e2b.connect_protocol import envelope, last_envelope, read_envelopes
from tangram_hpc.http_api.e2b.multipart import read_files
from tangram_hpc.http_api.e2b.wire_errors import ApiError, RpcError
from tangram_hpc.protocol import gradient_messages as gradients
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol import payload, process_frames, service_frames
from tangram_hpc.protocol.frame import FRAME_MAX, Inbox, Outbox
from tangram_hpc.protocol.value import decode_value, encode_value

encode = msgspec.msgpack.encode
WRONG = (ProtocolError, msgspec.DecodeError)


def is_same(found: Any, again: Any) -> bool:
    """Whether two values are equal, where NaN equals itself; compared as bytes."""
    return encode(found) == encode(again)


def decoded(read: Callable[[bytes], Any], body: bytes) -> None:
    """A decoder's law, of one input."""
    try:
        found = read(body)
    except WRONG:
        return
    assert is_same(found, read(encode(found)))


def any_encoded(*unions: Any) -> st.SearchStrategy[bytes]:
    """Encoded values of these unions' classes: right ones with edits, and any."""
    kinds = members(*unions)
    seeds = [seed for kind in kinds for seed in samples(kind)]
    return (st.builds(packed, st.sampled_from(seeds), STEPS)
            | st.one_of([any_of(kind) for kind in kinds]).map(encode)
            | edited_bytes([encode(seed) for seed in seeds]))


@SHORT
@given(st.lists(any_encoded(ms.AnyMessage), max_size=3),
       st.lists(st.binary(max_size=20), max_size=3), st.lists(st.integers(1, 30), max_size=6),
       st.none() | st.lists(LEAVES, max_size=3))
def test_frames(bodies: list[bytes], payloads: list[bytes], cuts: list[int],
                lengths: list[Any] | None) -> None:
    """However a frame arrives in pieces, it gives the same messages."""
    sizes = [len(one) for one in payloads] if lengths is None else lengths
    meta = b"\x92" + bytes((0x90 + len(bodies),)) + b"".join(bodies) + encode(sizes)
    rest = len(meta).to_bytes(4, "little") + meta + b"".join(payloads)
    data = len(rest).to_bytes(4, "little") + rest
    whole, pieces, at = _envelopes([data]), [], 0
    for cut in cuts:
        pieces.append(data[at : at + cut])
        at += cut
    again = _envelopes([*pieces, data[at:]])
    assert (whole is None and again is None) or is_same(whole, again)
    if whole is not None:
        outbox = Outbox()
        for message, content in whole:
            outbox.put(message, content)
        assert is_same(_envelopes([b"".join(outbox.take())]), whole)


def _envelopes(pieces: list[bytes]) -> list[tuple[Any, bytes | None]] | None:
    inbox, found = Inbox(), []
    try:
        for piece in pieces:
            found += [(m, None if p is None else bytes(p)) for m, p in inbox.feed(piece)]
    except ProtocolError:
        return None
    return found


@SHORT
@given(st.lists(edited_bytes([b"\x08\0\0\0\x04\0\0\0\x92\x90\x90", b"\xff" * 12, b""]), max_size=3))
def test_streams_of_bytes(pieces: list[bytes]) -> None:
    """A length is refused, or waited for, without memory for what it announces."""
    for inbox in (Inbox(), process_frames.ProcessInbox(), process_frames.WorkerInbox()):
        try:
            for piece in pieces:
                list(inbox.feed(piece))
        except ProtocolError:
            continue
        assert len(inbox._kept) <= sum(map(len, pieces)) <= FRAME_MAX
    for read in (service_frames.size, gradients.sizes):
        try:
            read(b"".join(pieces)[:8].ljust(12 if read is gradients.sizes else 4, b"\xff")[
                : gradients.HEAD.size if read is gradients.sizes else service_frames.HEAD.size])
        except ProtocolError:
            pass


@SHORT
@given(any_encoded(payload.AnyPayload))
def test_payloads(body: bytes) -> None:
    decoded(payload.decode, body)


@SHORT
@given(any_encoded(process_frames.ToProcess, process_frames.FromProcess,
                   process_frames.ToForkServer, process_frames.FromForkServer))
def test_process_frames(body: bytes) -> None:
    for inbox in (process_frames.ProcessInbox, process_frames.WorkerInbox):
        decoded(lambda one, inbox=inbox: next(inbox().feed(
            len(one).to_bytes(4, "little") + one)), body)
    decoded(process_frames.decode_to_fork_server, body)
    decoded(process_frames.decode_from_fork_server, body)


@SHORT
@given(any_encoded(service_frames.RunnerOrder, service_frames.RunnerAnswer,
                   gradients.AnyMemberMessage))
def test_service_and_gradient_frames(body: bytes) -> None:
    for read in (service_frames.order, service_frames.answer, gradients.unpack,
                 gradients.unpack_plan):
        decoded(read, body)


_VALUES = [None, [1, "a", b"b", (2, 3.5)], {"a": [1 << 70, -(1 << 70)], 1: (), None: True}]


@SHORT
@given(edited_bytes([encode_value(value) for value in _VALUES]
                    + [b"\xc7\x0b\x02\x08\x92\xa3<i4\x91\x01\0\0\0\0",
                       b"\xc7\x06\x03\x05\x92\xa3<i2\x90\0"])
       | LEAVES.map(encode))
def test_values(body: bytes) -> None:
    try:
        found = decode_value(body)
        again = encode_value(found)
    except (msgspec.DecodeError, TypeError):
        return
    assert encode_value(decode_value(again)) == again


@SHORT
@given(edited_bytes([envelope({"a": 1}) + envelope({}) + last_envelope(),
                     b"\0\xff\xff\xff\xff", b"\1\0\0\0\2{}"])
       | edited_text(['{"a": {"b": [1, 2.5, "c", null]}}']).map(
           lambda text: b"\0" + len(text).to_bytes(4, "big") + text))
def test_connect_streams(data: bytes) -> None:
    try:
        found = read_envelopes(data)
    except RpcError:
        return
    assert all(isinstance(message, dict) for message in found)
    assert json.dumps(read_envelopes(b"".join(map(envelope, found)))) == json.dumps(found)


_FORM = (b'--B\r\nContent-Disposition: form-data; name="file"; filename="a%22.txt"\r\n\r\nhello'
         b'\r\n--B\r\nContent-Disposition: form-data; name="other"\r\n\r\n1\r\n--B--\r\n')


@SHORT
@given(edited_bytes([_FORM]), edited_text(["multipart/form-data; boundary=B",
                                           'multipart/form-data; boundary="B"']))
def test_uploaded_forms(body: bytes, content_type: bytes) -> None:
    try:
        found = read_files(content_type.decode("latin-1"), body)
    except ApiError:
        return
    assert math.fsum(len(content) for _, content in found) <= len(body)
