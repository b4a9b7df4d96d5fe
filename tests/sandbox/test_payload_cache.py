"""Threads that carry payloads between a worker and the store."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from tangram_hpc.protocol.message import INLINE_MAX
from tangram_hpc.sandbox.manager.payload_cache import PayloadCache
from tangram_hpc.storage.store import FolderStore


def test_payloads_are_carried_where_no_thread_can_be_started_any_more(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes had used up `pids.max`, and the first large result ended the worker."""
    def start(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    async def carry() -> bytes:
        loop = asyncio.get_running_loop()
        cache = PayloadCache(FolderStore(str(tmp_path)))
        monkeypatch.setattr(threading.Thread, "start", start)
        kept: asyncio.Future[tuple[bytes, str]] = loop.create_future()
        fetched: asyncio.Future[tuple[bytes, str]] = loop.create_future()
        cache.keep(bytes(INLINE_MAX + 1), "one", lambda *got: kept.set_result(got))
        cache.fetch((await kept)[0], lambda *got: fetched.set_result(got))
        data, why = await fetched
        cache.close()
        assert not why
        return data

    assert asyncio.run(carry()) == bytes(INLINE_MAX + 1)
