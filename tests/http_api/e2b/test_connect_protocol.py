"""The framing of the Connect protocol: whole, cut off, too large, compressed, and random bytes."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_hpc.http_api.e2b.connect_protocol import (
    MESSAGE_MAX,
    MESSAGES_MAX,
    envelope,
    last_envelope,
    read_envelopes,
    read_object,
    timeout_s,
)
from tangram_hpc.http_api.e2b.multipart import read_files
from tangram_hpc.http_api.e2b.wire_errors import ApiError, RpcError

MESSAGES = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4), max_size=3)


@given(st.lists(MESSAGES, max_size=4))
def test_what_is_framed_is_read_again(messages: list[dict[str, Any]]) -> None:
    assert read_envelopes(b"".join(map(envelope, messages)) + last_envelope()) == messages


@given(st.lists(MESSAGES, min_size=1, max_size=3), st.data())
def test_a_stream_that_is_cut_off_is_refused(messages: list[dict[str, Any]], data: Any) -> None:
    whole = b"".join(map(envelope, messages))
    ends = {0}
    for message in messages:
        ends.add(max(ends) + len(envelope(message)))
    at = data.draw(st.integers(0, len(whole)).filter(lambda number: number not in ends))
    with pytest.raises(RpcError) as caught:
        read_envelopes(whole[:at])
    assert caught.value.code == "invalid_argument"


@settings(max_examples=300)
@given(st.binary(max_size=64) | st.builds(
    lambda flags, size, data: struct.pack(">BI", flags, size) + data,
    st.integers(0, 255), st.integers(0, 2**32 - 1) | st.integers(0, 8), st.binary(max_size=16)))
def test_random_bytes_are_read_or_refused_and_never_fail(data: bytes) -> None:
    try:
        assert all(isinstance(message, dict) for message in read_envelopes(data))
    except RpcError as error:
        assert error.code in ("invalid_argument", "resource_exhausted", "unimplemented")


@settings(max_examples=100, derandomize=True)
@given(st.lists(MESSAGES, min_size=1, max_size=3),
       st.lists(st.tuples(st.integers(0, 60), st.binary(max_size=3), st.integers(0, 3)),
                min_size=1, max_size=3))
def test_a_damaged_stream_is_read_or_refused(messages: list[dict[str, Any]],
                                             damages: list[tuple[int, bytes, int]]) -> None:
    """Bytes are put in, left out and changed, also in lengths and flags."""
    data = b"".join(map(envelope, messages)) + last_envelope()
    for at, new, count in damages:
        data = data[:at] + new + data[at + count:]
    try:
        assert all(isinstance(message, dict) for message in read_envelopes(data))
    except RpcError as error:
        assert error.code in ("invalid_argument", "resource_exhausted", "unimplemented")


def test_an_error_ends_a_stream() -> None:
    data = last_envelope(RpcError("not_found", "no such process"))
    assert data[0] == 2 and json.loads(data[5:]) == {
        "error": {"code": "not_found", "message": "no such process"}}


@pytest.mark.parametrize(("data", "code"), [
    (struct.pack(">BI", 0, MESSAGE_MAX + 1), "resource_exhausted"),
    (struct.pack(">BI", 1, 2) + b"{}", "unimplemented"),
    (struct.pack(">BI", 4, 2) + b"{}", "invalid_argument"),
    (struct.pack(">BI", 0, 2) + b"[]", "invalid_argument"),
    (struct.pack(">BI", 0, 2) + b"\xff\xff", "invalid_argument"),
    (struct.pack(">BI", 0, 100000) + b"[" * 100000, "invalid_argument")],
    ids=["too large", "compressed", "unknown flag", "no object", "no text", "deep"])
def test_an_envelope_that_is_wrong_is_refused(data: bytes, code: str) -> None:
    with pytest.raises(RpcError) as caught:
        read_envelopes(data)
    assert caught.value.code == code


def test_more_envelopes_than_a_request_may_have_are_refused() -> None:
    assert len(read_envelopes(envelope({}) * MESSAGES_MAX + last_envelope())) == MESSAGES_MAX
    with pytest.raises(RpcError, match=f"more than {MESSAGES_MAX} messages") as caught:
        read_envelopes(envelope({}) * (MESSAGES_MAX + 1))
    assert caught.value.code == "resource_exhausted"


@pytest.mark.parametrize(("text", "seconds"), [("", None), ("0", None), ("1500", 1.5)])
def test_a_timeout_is_in_milliseconds(text: str, seconds: float | None) -> None:
    assert timeout_s({"connect-timeout-ms": text} if text else {}) == seconds


@pytest.mark.parametrize("text", ["-1", "1.5", "x", "1" * 11, "١"])
def test_a_timeout_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(RpcError, match="Connect-Timeout-Ms"):
        timeout_s({"connect-timeout-ms": text})


def test_an_empty_body_is_an_empty_message() -> None:
    assert read_object(b"") == {}


# ---- multipart bodies ---------------------------------------------------------------------------


@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8", exclude_characters='"\\\r\n%'),
                                  min_size=1, max_size=20), st.binary(max_size=200)),
                max_size=4))
def test_uploads_of_any_bytes_are_read(files: list[tuple[str, bytes]]) -> None:
    mark = b"==boundary-that-no-content-has=="
    body = b"".join(
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n%b\r\n" % (mark, name.encode(), data)
        for name, data in files) + b"--%b--\r\n" % mark
    assert read_files(f"multipart/form-data; boundary={mark.decode()}", body) == files


@settings(max_examples=200)
@given(st.binary(max_size=100).map(lambda data: b"--b" + data))
def test_random_uploads_are_read_or_refused(body: bytes) -> None:
    try:
        read_files("multipart/form-data; boundary=b", body)
    except ApiError as error:
        assert error.status == 400


def test_too_many_parts_are_refused_before_they_are_made() -> None:
    body = b"--b" + b"xx\r\n--b" * 100_000
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="more than 1024 parts"):
            read_files("multipart/form-data; boundary=b", body)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("parts", "ok"), [(1024, True), (1025, False)])
def test_the_number_of_parts_is_bounded(parts: int, ok: bool) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n' * parts + b"--b--"
    if ok:
        assert read_files("multipart/form-data; boundary=b", body) == [("", b"x")] * parts
        return
    with pytest.raises(ApiError, match="more than 1024 parts"):
        read_files("multipart/form-data; boundary=b", body)


def test_a_quoted_file_name_is_unquoted() -> None:
    body = (b'--b\r\ncontent-disposition: form-data; name="file"; filename="/a%22b\\\\c"\r\n\r\n'
            b"x\r\n--b--")
    assert read_files('multipart/form-data; boundary="b"', body) == [('/a"b\\c', b"x")]
