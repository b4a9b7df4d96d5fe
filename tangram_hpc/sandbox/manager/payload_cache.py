"""Owns: what travels through the store instead of a frame - fetching and storing it in threads, so
that the worker's loop never waits for a file system - and the functions that were fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...errors import InvalidInput
from ...ports import Store
from ...protocol.message import INLINE_MAX
from ...protocol.payload import Payload, Stored, decode, encode
from ..files import session_archive

FUNCTIONS_MAX = 64  # functions kept at once, here and in each runner
_STORED = encode(Stored("", 0))[:2]  # how every reference begins

Then = Callable[[bytes, str], None]  # called with the bytes, or with why there are none


def is_stored(payload: bytes | memoryview) -> bool:
    """Whether a payload is only a reference into the store."""
    return bytes(payload[:2]) == _STORED


class PayloadCache:
    """The store, asynchronously; all callbacks come on the loop's own thread."""

    def __init__(self, store: Store) -> None:
        self._loop = asyncio.get_running_loop()
        self._store = store
        self._threads = ThreadPoolExecutor(2, "tangram-store")
        self._functions: dict[str, bytes] = {}
        self._asked: dict[str, list[Then]] = {}
        self._closed = False

    def fetch(self, payload: bytes, then: Then) -> None:
        """Follows a reference."""
        reference: Payload = decode(payload)
        assert isinstance(reference, Stored)
        self._go(self._store.get, reference.digest, then)

    def keep(self, payload: bytes, owner: str, then: Then) -> None:
        """Stores a payload over the inline limit for an owner; `then` gets the reference."""
        assert len(payload) > INLINE_MAX

        def put(data: bytes) -> bytes:
            return encode(Stored(self._store.put(data, owner), len(data)))

        self._go(put, payload, then)

    def function(self, digest: str, then: Then) -> None:
        """The pickle of a function; at once when it is known."""
        known = self._functions.pop(digest, None)
        if known is not None:
            self._functions[digest] = known  # the youngest again
            then(known, "")
        elif digest in self._asked:
            self._asked[digest].append(then)
        else:
            self._asked[digest] = [then]
            self._go(self._store.get, digest, lambda blob, why: self._learned(digest, blob, why))

    def pack(self, folder: str, owner: str, then: Then) -> None:
        """Stores what a scratch directory holds for an owner; `then` gets its name."""
        def put(folder: str) -> bytes:
            return session_archive.pack(folder, self._store, lambda: self._closed, owner).encode()

        self._go(put, folder, then)

    def unpack(self, digest: str, folder: str, then: Then) -> None:
        """Makes a scratch directory of what was packed; `then` gets nothing."""
        def get(digest: str) -> bytes:
            session_archive.unpack(digest, folder, self._store, lambda: self._closed)
            return b""

        self._go(get, digest, then)

    def _learned(self, digest: str, blob: bytes, why: str) -> None:
        if not why:
            self._functions[digest] = blob
            while len(self._functions) > FUNCTIONS_MAX:
                del self._functions[next(iter(self._functions))]
        for then in self._asked.pop(digest, []):
            then(blob, why)

    def _go(self, call: Callable[..., bytes], argument: object, then: Then) -> None:
        def finished(future: asyncio.Future[bytes]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if isinstance(error, (InvalidInput, OSError, session_archive.ArchiveError)):
                then(b"", str(error))
            elif error is not None:
                raise error
            else:
                then(future.result(), "")

        self._loop.run_in_executor(self._threads, call, argument).add_done_callback(finished)

    def close(self) -> None:
        """Gives up what is under way."""
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
