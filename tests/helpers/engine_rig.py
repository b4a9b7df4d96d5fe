"""A backend for an engine behind HTTP beside the fake engine that it talks to, for the tests of
both files and for whatever goes through all backends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from helpers.fake_engines import MODEL, FakeEngine, FakePlain, FakeSglang, FakeVllm
from tangram_hpc.config.services import service_spec
from tangram_hpc.ports import ServiceBackend, ServicePlace, ServiceReply, ServiceRequest
from tangram_hpc.protocol.value import decode_value, encode_value
from tangram_hpc.services.http.engines import make_engine

PLACE = ServicePlace((0,), "cuda", "")
FAKES: dict[str, type[FakeEngine]] = {"vllm": FakeVllm, "sglang": FakeSglang, "http": FakePlain}
MODELS = ("vllm", "sglang")
KINDS = (*MODELS, "http")


def options(kind: str, fake: FakeEngine, **more: Any) -> dict[str, Any]:
    own = {"wake_path": "/wake", "park_path": "/park"} if kind == "http" else {"model": MODEL}
    return {"backend": kind, "url": fake.url, "timeout_s": 10, "weights_mib": 7, **own, **more}


@contextmanager
def engine_factory(
    kind: str, fake_options: dict[str, Any] | None = None, **more: Any
) -> Iterator[tuple[ServiceBackend, FakeEngine]]:
    """A backend that was not loaded yet, and the fake engine that it will talk to: `control.fail`
    (phase, how), `die`, `start`, `asleep`, `arrived`, `open_now`."""
    control = FAKES[kind](**(fake_options or {}))
    try:
        yield make_engine(service_spec("judge", options(kind, control, **more)), PLACE), control
    finally:
        control.die()


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work(), 30)

    return asyncio.run(bounded())


def ask(method: str, **arguments: Any) -> ServiceRequest:
    return ServiceRequest(method, encode_value(arguments))


def value(reply: ServiceReply) -> Any:
    assert reply.error == ""
    return decode_value(reply.value)


def one_line(text: str) -> bool:
    return bool(text) and "\n" not in text and "Traceback" not in text


def anew(kind: str, control: FakeEngine) -> ServiceBackend:
    """Another backend for the same engine, as after a death."""
    return make_engine(service_spec("judge", options(kind, control)), PLACE)
