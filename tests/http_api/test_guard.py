"""The guard of the HTTP server: unknown clients, large and slow bodies, keys in the path."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tangram_hpc.http_api.e2b import upload_memory
from tangram_hpc.http_api.e2b.upload_memory import UploadMemory
from tangram_hpc.http_api.guard import Guard
from tangram_hpc.http_api.keys import ClientKeys

KEY = "k" * 16


class Served:
    """Sends one request through a guard, and keeps what the application saw and what came back."""

    def __init__(self, path: str = "/x", headers: dict[str, str] | None = None,
                 messages: list[dict[str, Any]] | None = None, **bounds: Any) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.sent: list[dict[str, Any]] = []
        self._messages = messages or [{"type": "http.request", "body": b"body"}]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
                 "headers": [
            (name.encode(), value.encode()) for name, value in (headers or {}).items()]}
        guard = Guard(self._app, ClientKeys({"verl": KEY}), **({"rest_s": 0.05} | bounds))
        asyncio.run(guard(scope, self._receive, self._send))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.seen.append((scope["path"], scope["state"]["client"], message["body"]))

    async def _receive(self) -> dict[str, Any]:
        if not self._messages:
            await asyncio.sleep(60)
        return self._messages.pop(0)

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def refusal(self) -> tuple[int, str]:
        """The status and the text of the answer of the guard itself."""
        assert not self.seen
        told = json.loads(self.sent[1]["body"])
        return self.sent[0]["status"], told.get("detail") or told["message"]


def test_a_known_client_is_served_and_named() -> None:
    assert Served(headers={"x-api-key": KEY}).seen == [("/x", "verl", b"body")]


def test_a_key_in_the_path_is_cut_off_before_anybody_sees_it() -> None:
    assert Served(f"/{KEY}/run_code").seen == [("/run_code", "verl", b"body")]
    assert Served(f"/{KEY}/x", {"x-api-key": KEY}).seen == [("/x", "verl", b"body")]


@pytest.mark.parametrize("path", ["/x", f"/{KEY}", f"/x/{KEY}", f"/{KEY}x/run_code", "/", ""])
@pytest.mark.attack("network", "sessions")
def test_without_a_known_key_no_request_reaches_the_application(path: str) -> None:
    status, text = Served(path, {"x-api-key": "wrong"}).refusal
    assert status == 401 and "no known key" in text and KEY not in text


def test_a_body_in_parts_arrives_whole() -> None:
    parts = [{"type": "http.request", "body": b"a", "more_body": True},
             {"type": "http.request", "body": b"", "more_body": True},
             {"type": "http.request", "body": b"b", "more_body": False}]
    assert Served(headers={"x-api-key": KEY}, messages=parts).seen == [("/x", "verl", b"ab")]


@pytest.mark.attack("network", "memory")
def test_a_body_that_is_too_large_is_refused_before_it_is_kept() -> None:
    announced = Served(headers={"x-api-key": KEY, "content-length": "9"}, body_max=8,
                       messages=[{"type": "http.request", "body": b"", "more_body": True}])
    assert announced.refusal == (413, "the body has more than 8 bytes")
    chunks = [{"type": "http.request", "body": b"12345", "more_body": True}] * 3
    assert Served(headers={"x-api-key": KEY}, body_max=8, messages=chunks).refusal[0] == 413


@pytest.mark.parametrize("key, bounds, status", [
    ("wrong", {}, 401), (KEY, {"body_max": 4}, 413)])
def test_a_refused_body_is_read_to_its_end_so_that_the_client_sees_the_answer(
        key: str, bounds: dict[str, Any], status: int) -> None:
    parts = [{"type": "http.request", "body": b"12345", "more_body": more}
             for more in (True, True, False)]
    served = Served(headers={"x-api-key": key}, messages=parts, rest_s=60.0, **bounds)
    assert served.refusal[0] == status and parts == []


def test_a_client_that_waits_to_be_asked_for_its_body_is_refused_at_once() -> None:
    parts = [{"type": "http.request", "body": b"1", "more_body": True}]
    served = Served(headers={"x-api-key": "wrong", "expect": "100-continue"}, messages=parts)
    assert served.refusal[0] == 401 and len(parts) == 1


@pytest.mark.attack("network", "broker")
def test_a_body_that_never_ends_is_refused_in_time() -> None:
    parts = [{"type": "http.request", "body": b"1", "more_body": True}]
    assert Served(headers={"x-api-key": KEY}, messages=parts, body_s=0.05).refusal[0] == 408


def test_a_client_that_hangs_up_in_its_body_costs_nothing() -> None:
    parts = [{"type": "http.request", "body": b"1", "more_body": True}, {"type": "http.disconnect"}]
    served = Served(headers={"x-api-key": KEY}, messages=parts)
    assert not served.seen and not served.sent


class Room:
    """The access to one sandbox, which is always free for an action."""

    def __init__(self) -> None:
        self.processes, self.asked = self, 0

    async def __call__(self, scope: Any, headers: Any) -> Any:
        return self

    async def make_room(self) -> None:
        self.asked += 1


@pytest.mark.parametrize("headers", [{"content-length": "5"}, {}])
@pytest.mark.attack("network", "memory")
def test_an_upload_waits_for_memory_before_its_body_is_read(
        monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]) -> None:
    monkeypatch.setattr(upload_memory, "BODIES", UploadMemory(4, 0.0))
    parts, room = [{"type": "http.request", "body": b"12345"}], Room()
    waits: list[Any] = []
    monkeypatch.setattr(Guard, "_body", lambda *_: waits.append(1))
    served = Served("/files", headers, list(parts), access=room)
    status, text = served.refusal
    assert status == 503 and "other uploads hold the memory" in text and not waits
    assert (b"retry-after", b"1") in served.sent[0]["headers"] and room.asked == 1


def test_an_upload_that_is_too_large_is_refused_for_good_and_waits_for_no_memory(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_memory, "BODIES", UploadMemory(0, 0.0))
    served = Served("/files", {"content-length": "5"}, access=Room(), body_max=4)
    assert served.refusal == (413, "the body has more than 4 bytes")


def test_uploads_that_fit_and_other_requests_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_memory, "BODIES", memory := UploadMemory(4, 0.0))
    parts = [{"type": "http.request", "body": b"1234"}]
    for path, headers in (("/files", {"content-length": "4"}), ("/filesystem.Filesystem/Stat", {})):
        served = Served(path, headers, list(parts), access=Room())
        assert served.seen == [(path, "", b"1234")]

    async def all_is_given_back() -> None:
        async with memory.held(4):
            pass

    asyncio.run(all_is_given_back())
