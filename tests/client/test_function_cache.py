"""Uploaded functions stay in the job's store while an open action needs them, and no longer."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tangram_hpc.client import functions
from tangram_hpc.client.functions import FunctionCache
from tangram_hpc.client.stored_payloads import StoredPayloads
from tangram_hpc.errors import InvalidInput


class Entries:
    """A store in memory (fills `ports.Store`)."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def put(self, data: bytes, owner: str = "") -> str:
        name = f"{hashlib.sha256(data).hexdigest()}.{owner}"
        self.held[name] = bytes(data)
        return name

    def get(self, name: str) -> bytes:
        return self.held[name]

    def drop(self, name: str) -> None:
        del self.held[name]  # a KeyError tells of an entry that is dropped twice


def made(number: int) -> Callable[[], int]:
    return lambda: number


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "FUNCTIONS_MAX", 2)


def cache_of(entries: Any) -> FunctionCache:
    return FunctionCache(StoredPayloads(entries, 7))


def test_an_evicted_function_stays_until_its_last_action_is_over(few: None) -> None:
    entries = Entries()
    cache, works = cache_of(entries), [made(n) for n in range(3)]
    first, uploaded = cache.call(works[0], (), {}, False)
    cache.call(works[0], (), {}, False)
    for work in works[1:]:  # the cache evicts the first
        cache.ended(cache.call(work, (), {}, False)[1])
    assert first.digest in entries.held
    cache.ended(uploaded)
    assert first.digest in entries.held
    cache.ended(uploaded)
    assert first.digest not in entries.held and len(entries.held) == 2


def test_an_evicted_function_that_nobody_needs_goes_at_once(few: None) -> None:
    entries = Entries()
    cache = cache_of(entries)
    for work in [made(n) for n in range(5)]:
        cache.ended(cache.call(work, (), {}, False)[1])
    assert len(entries.held) == 2


def test_a_call_that_was_not_submitted_holds_nothing(few: None) -> None:
    entries = Entries()
    cache, works = cache_of(entries), [made(n) for n in range(3)]
    call, uploaded = cache.call(works[0], (), {}, False)
    for work in works[1:]:
        cache.ended(cache.call(work, (), {}, False)[1])
    cache.not_submitted(uploaded)
    cache.not_submitted(None)
    assert call.digest not in entries.held


def test_ends_and_evictions_from_two_threads_drop_each_entry_once(few: None) -> None:
    entries = Entries()
    cache, works = cache_of(entries), [made(n) for n in range(300)]
    over: list[functions.Shipped] = []
    done = threading.Event()

    def client_thread() -> None:
        while not (done.is_set() and not over):
            if over:
                cache.ended(over.pop())

    thread = threading.Thread(target=client_thread)
    thread.start()
    for work in works:
        for _ in range(3):
            over.append(cache.call(work, (), {}, False)[1])
    done.set()
    thread.join(60)
    assert not thread.is_alive() and len(entries.held) == 2


class _Stubborn:
    def __reduce__(self) -> Any:
        raise NotImplementedError("no pickles of this")


@pytest.mark.parametrize("argument, told", [
    (threading.Lock(), "TypeError: cannot pickle"),
    (functools.reduce(lambda inner, _: [inner], range(100_000), []), "PicklingError: .*recursion"),
    (ctypes.pointer(ctypes.c_int(1)), "ValueError: ctypes objects containing pointers"),
    (_Stubborn(), "NotImplementedError: no pickles of this"),
], ids=["lock", "deep", "pointer", "stubborn"])
def test_whatever_cannot_be_pickled_is_refused_in_one_line(argument: Any, told: str) -> None:
    entries = Entries()
    for call in (lambda: cache_of(entries).call(len, (argument,), {}, False),
                 lambda: cache_of(entries).call(lambda: argument, (), {}, False)):
        with pytest.raises(InvalidInput, match=rf"^(arguments|function): .* pickled \({told}"):
            call()
    assert not entries.held
