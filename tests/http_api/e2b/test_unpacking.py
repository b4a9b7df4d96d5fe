"""Compressed uploads: whole, damaged, such as would fill the memory, and several at a time."""

from __future__ import annotations

import asyncio
import gzip
import struct
import threading
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from tangram_hpc.client.file_calls import write_calls
from tangram_hpc.http_api.e2b import file_routes, unpacking
from tangram_hpc.http_api.e2b.multipart import read_files
from tangram_hpc.http_api.e2b.unpacking import unpacked, unpacked_size
from tangram_hpc.http_api.e2b.upload_memory import UploadMemory
from tangram_hpc.http_api.e2b.wire_errors import ApiError


@given(st.binary(max_size=200), st.integers(1, 500))
def test_what_was_packed_comes_out(data: bytes, times: int) -> None:
    assert unpacked(gzip.compress(data * times), "gzip") == data * times


def refusal(body: bytes, encoding: str = "gzip") -> int:
    with pytest.raises(ApiError) as caught:
        unpacked(body, encoding)
    return caught.value.status


@pytest.mark.parametrize("told", [16 << 20, 0, 100, 4096])
def test_a_bomb_is_refused_while_it_is_small(monkeypatch: pytest.MonkeyPatch, told: int) -> None:
    """Whatever size it tells; the true one is the first."""
    monkeypatch.setattr(unpacking, "UNPACKED_MAX", 4096)
    bomb = gzip.compress(bytes(16 << 20))[:-4] + struct.pack("<I", told)
    tracemalloc.start()
    try:
        assert refusal(bomb) == (413 if told > 4096 else 400)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


WHOLE = gzip.compress(b"content")


@pytest.mark.parametrize("body", [
    b"", b"no gzip at all, but long enough", WHOLE[:-1], WHOLE[:12], WHOLE + WHOLE, WHOLE + b"\0",
    WHOLE[:-8] + b"\0\0\0\0" + WHOLE[-4:], WHOLE[:-4] + b"\6\0\0\0", WHOLE[:-4] + b"\x08\0\0\0"],
    ids=["empty", "text", "cut off", "half", "two members", "more", "checksum", "short", "long"])
def test_a_body_that_is_not_one_whole_member_is_refused(body: bytes) -> None:
    assert refusal(body) == 400


def test_only_gzip_is_read() -> None:
    assert refusal(WHOLE, "br") == 415


async def free() -> None:
    """Nothing runs in the sandbox."""


async def upload(body: bytes, make_room: Any = free, **headers: str) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    sandbox = SimpleNamespace(processes=SimpleNamespace(make_room=make_room))
    request = Request({"type": "http", "method": "POST", "path": "/files", "query_string": b"",
                       "headers": [(name.replace("_", "-").encode(), value.encode())
                                   for name, value in headers.items()],
                       "state": {"sandbox": sandbox}}, receive)
    await file_routes.upload(request)


@pytest.mark.parametrize(("name", "body", "headers", "refused"), [
    ("unpacked", b"no gzip", {"content_encoding": "gzip"}, "not gzip"),
    ("read_files", b"no parts", {"content_type": "multipart/form-data; boundary=b"},
     "does not begin with its boundary")])
def test_an_upload_is_read_beside_the_event_loop(
        monkeypatch: pytest.MonkeyPatch, name: str, body: bytes, headers: dict[str, str],
        refused: str) -> None:
    threads, true = [], getattr(file_routes, name)

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return true(*arguments)

    monkeypatch.setattr(file_routes, name, noted)
    with pytest.raises(ApiError, match=refused):
        asyncio.run(upload(body, **headers))
    assert threads and threading.main_thread() not in threads


# ---- several uploads ----------------------------------------------------------------------------


def test_an_upload_that_does_not_fit_is_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_routes, "UPLOADS", UploadMemory(len(b"content") - 1, 0.0))
    with pytest.raises(ApiError, match="other uploads hold the memory") as caught:
        asyncio.run(upload(WHOLE, content_encoding="gzip"))
    assert caught.value.status == 503 and caught.value.retry_after_s


def test_an_upload_holds_no_bytes_while_a_terminal_runs_in_its_sandbox(
        monkeypatch: pytest.MonkeyPatch) -> None:
    async def two() -> None:
        seven, asked = UploadMemory(7, 0.0), asyncio.Event()
        monkeypatch.setattr(file_routes, "UPLOADS", seven)

        async def busy() -> None:
            asked.set()
            await asyncio.Event().wait()

        waits = asyncio.create_task(upload(WHOLE, busy, content_encoding="gzip"))
        await asked.wait()
        async with seven.held(7):
            waits.cancel()

    asyncio.run(two())


def test_uploads_wait_in_order_for_their_bytes() -> None:
    async def several() -> None:
        ten, held = UploadMemory(10, 60.0), []

        async def hold(size: int) -> None:
            async with ten.held(size):
                held.append(size)

        async with ten.held(6):
            waits = [asyncio.create_task(hold(size)) for size in (5, 7, 1)]
            await asyncio.sleep(0.01)
            assert held == []
            waits[0].cancel()
        await asyncio.wait(waits)
        assert held == [7, 1] and waits[0].cancelled()
        await hold(10)  # all have given theirs back

    asyncio.run(several())


def test_a_refused_upload_holds_nothing() -> None:
    async def two() -> None:
        ten = UploadMemory(10, 0.0)
        async with ten.held(6):
            with pytest.raises(ApiError):
                async with ten.held(5):
                    pass
        async with ten.held(10):
            pass

    asyncio.run(two())


def test_a_content_is_not_copied_as_a_whole_while_it_is_read_and_sent() -> None:
    data, mib = bytes(32 << 20), 1 << 20
    head = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
    body = bytearray(head + data + b"\r\n--b--")
    tracemalloc.start()
    try:
        [(_, content)] = read_files("multipart/form-data; boundary=b", body)
        sent = sum(len(call.data) for call in write_calls("path", content, 0o644))
        assert sent == len(data) and tracemalloc.get_traced_memory()[1] < 17 * mib
    finally:
        tracemalloc.stop()


def test_what_will_be_refused_waits_for_no_bytes() -> None:
    assert unpacked_size(gzip.compress(b"content")) == 7
    assert unpacked_size(WHOLE[:-4] + b"\xff" * 4) == unpacked_size(b"short") == 0
