"""Payloads and session archives that travel through the store instead of a frame.

Threads read and write the store, so that the worker's loop never waits for a file system. Functions
that were fetched stay in a small cache.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ...errors import InvalidInput
from ...ports import Store
from ...protocol.message import INLINE_MAX
from ...protocol.payload import Payload, SnapshotCall, Stored, decode, encode
from ..files import frozen_files, session_archive
from ..user_namespace import UserMap

_THREADS = 2
FUNCTIONS_MAX = 64  # functions that are cached here, and in each runner
_STORED = encode(Stored("", 0))[:2]  # the first bytes of every reference
_SNAPSHOT = encode(SnapshotCall(""))[:2]

_TOLD = (InvalidInput, OSError, session_archive.ArchiveError, frozen_files.Unfrozen)
Then = Callable[[bytes, str], None]  # called with the bytes and "", or b"" and a reason


def is_stored(payload: bytes | memoryview) -> bool:
    """Whether a payload is only a reference into the store."""
    return bytes(payload[:2]) == _STORED


def is_snapshot(payload: bytes | memoryview) -> bool:
    """Returns whether a payload asks for a snapshot, which the worker takes itself."""
    return bytes(payload[:2]) == _SNAPSHOT


class PayloadCache:
    """Reads and writes the store without blocking. Callbacks run on the event loop's thread."""

    def __init__(self, store: Store) -> None:
        self._loop = asyncio.get_running_loop()
        self._store = store
        self._threads = _started_threads()
        self._functions: dict[str, bytes] = {}
        self._asked: dict[str, list[Then]] = {}
        self._closed = False

    def fetch(self, payload: bytes, then: Then) -> None:
        """Fetches the payload that a reference names."""
        reference: Payload = decode(payload)
        assert isinstance(reference, Stored)
        self._go(self._store.get, reference.digest, then)

    def keep(self, payload: bytes, owner: str, then: Then) -> None:
        """Stores a payload above the inline limit for an owner; `then` gets the reference to it."""
        assert len(payload) > INLINE_MAX

        def put(data: bytes) -> bytes:
            return encode(Stored(self._store.put(data, owner), len(data)))

        self._go(put, payload, then)

    def function(self, digest: str, then: Then) -> None:
        """Fetches the pickle of a function; calls `then` at once when it is cached."""
        known = self._functions.pop(digest, None)
        if known is not None:
            self._functions[digest] = known  # moves it to the end, as the youngest
            then(known, "")
        elif digest in self._asked:
            self._asked[digest].append(then)
        else:
            self._asked[digest] = [then]
            self._go(self._store.get, digest, lambda blob, why: self._learned(digest, blob, why))

    def secrets(self, names: list[str], then: Then) -> None:
        """Reads secrets of the job; `then` gets their values as a msgpack list in this order."""
        def read(names: list[str]) -> bytes:
            known = self._store.secrets(names)
            return msgspec.msgpack.encode([known[name] for name in names])

        self._go(read, names, then)

    def pack(self, folder: str, owner: str, then: Then) -> None:
        """Stores the files of a scratch directory for an owner; `then` gets the archive's digest.
        """
        def put(folder: str) -> bytes:
            return session_archive.pack(folder, self._store, lambda: self._closed, owner).encode()

        self._go(put, folder, then)

    def unpack(self, digest: str, folder: str, users: tuple[str, ...], then: Then) -> None:
        """Makes a scratch directory from an archive; `then` gets no bytes. If the sandbox has
        several users, `users` are the fields of their `UserMap`; otherwise it is empty.
        """
        def get(digest: str) -> bytes:
            session_archive.unpack(digest, folder, self._store, lambda: self._closed,
                                   UserMap(*users) if users else None)
            return b""

        self._go(get, digest, then)

    def freeze(self, origin: str, folder: str, then: Then) -> None:
        """Freezes the files of a scratch directory in a folder; `then` gets their size in MiB as
        decimal digits.
        """
        self._go(lambda origin: str(frozen_files.freeze(origin, folder)).encode(), origin, then)

    def unpack_frozen(self, digest: str, folder: str, users: tuple[str, ...], then: Then) -> None:
        """Makes a folder of frozen files from an archive; `then` gets their size as from `freeze`.
        `users` are as for `unpack`.
        """
        def get(digest: str) -> bytes:
            session_archive.unpack(digest, folder, self._store, lambda: self._closed,
                                   UserMap(*users) if users else None)
            return str(frozen_files.size_mib(folder)).encode()

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
            if isinstance(error, _TOLD):
                then(b"", str(error))
            elif error is not None:  # a bug: the caller that waits must be told all the same
                then(b"", f"unexpected {type(error).__name__}: {error}")
                raise error
            else:
                then(future.result(), "")

        self._loop.run_in_executor(self._threads, call, argument).add_done_callback(finished)

    def close(self) -> None:
        """Gives up all transfers that are under way."""
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)


def _started_threads() -> ThreadPoolExecutor:
    """Makes the threads now. Later the sandboxes may have used up the node's or the job's limit of
    processes, and a worker that cannot start a thread then would end with all of its sessions.
    """
    threads, all_run = ThreadPoolExecutor(_THREADS, "tangram-store"), threading.Barrier(_THREADS)
    try:
        for _ in range(_THREADS):
            threads.submit(all_run.wait)
    except BaseException:
        all_run.abort()
        raise
    return threads
