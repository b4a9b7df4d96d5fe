"""The results that a worker keeps until its broker confirms them.

A broker that is killed loses the results that it has received and not yet passed on. So the worker
keeps each result until a `Confirmed` of the broker names its lease, and sends the results that are
left to a broker that comes back, in the order in which the attempts ended.

A result costs one insertion into a dict and one removal, and no payload is copied. Payloads that
exceed the limit on memory go to spill files. A file takes `FILE_BYTES`, and is removed when all of
its results are confirmed, so a client that never reads keeps few files from being removed.

Invariant: a result that waits to be sent again is never reported as released beside that, because
the result itself then says `clean`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..ports import SpillFiles
from ..protocol.message import Finished

MEMORY_MAX = 64 << 20  # bytes of payloads that are kept in memory
FILE_BYTES = 64 << 20  # after so many bytes the next spill file begins
_MESSAGE = 256  # bytes that a result without a payload takes in a frame, roughly


class _Spilled(NamedTuple):
    """Where a payload is: the number of the spill file, and the offset and size in bytes."""

    file: int
    offset: int
    size: int


class KeptResults:
    """The results without a confirmation, and which of them must be sent again.

    Args:
        spill: takes the payloads for which memory has no room; None to keep all in memory.
        memory_max: bytes of payloads in memory. Payloads that no spill file can take stay in
            memory beyond this limit, because a lost result costs more than memory.
        file_bytes: the size at which a spill file is left for the next one.

    Attributes:
        results: the kept results and where their payloads are, by lease, in the order in which the
            attempts ended. Only this class changes it; others ask it for leases.
    """

    def __init__(self, spill: SpillFiles | None = None, memory_max: int = MEMORY_MAX,
                 file_bytes: int = FILE_BYTES) -> None:
        self._spill, self._memory_max, self._file_bytes = spill, memory_max, file_bytes
        self._file = 0  # the number of the spill file that is written
        self._in_file: dict[int, int] = {}  # by file: how many kept payloads it has, at least 1
        self.results: dict[int, tuple[Finished, bytes | _Spilled | None]] = {}
        self._memory = 0  # bytes of the payloads in memory
        # Leases whose results the present connection has not carried, in order. Empty while a
        # connection lasts and nothing is left of an earlier one.
        self._unsent: dict[int, None] = {}

    @property
    def unsent(self) -> int:
        """How many results must still be sent on the present or the next connection."""
        return len(self._unsent)

    def add(self, result: Finished, payload: bytes | None, sent: bool) -> None:
        """Keeps a result; `sent` says whether the present connection carries it."""
        kept: bytes | _Spilled | None = payload
        if payload is not None:
            if self._memory + len(payload) > self._memory_max and self._spill is not None:
                kept = self._spilled(self._spill, payload)
            if kept is payload:
                self._memory += len(payload)
        self.results[result.lease] = result, kept
        if not sent:
            self._unsent[result.lease] = None

    def _spilled(self, spill: SpillFiles, payload: bytes) -> bytes | _Spilled:
        """Writes a payload into a spill file; returns the payload itself if that is impossible."""
        file = self._file
        offset = spill.put(file, payload)
        if offset < 0:
            return payload
        self._in_file[file] = self._in_file.get(file, 0) + 1
        if offset + len(payload) >= self._file_bytes:
            self._file += 1
        return _Spilled(file, offset, len(payload))

    def confirm(self, leases: tuple[int, ...]) -> None:
        """Forgets the results of these leases; unknown leases are ignored."""
        for lease in leases:
            found = self.results.pop(lease, None)
            if found is None:
                continue
            kept = found[1]
            if isinstance(kept, bytes):
                self._memory -= len(kept)
            elif kept is not None and self._spill is not None:
                self._in_file[kept.file] -= 1
                if not self._in_file[kept.file]:
                    del self._in_file[kept.file]
                    self._spill.drop(kept.file)
            if self._unsent:
                self._unsent.pop(lease, None)

    def release(self, lease: int) -> bool:
        """Notes that the units of a lease are free, so that its result says so when it is sent
        again. Returns whether the result is still to be sent: then no other report is needed.
        """
        found = self.results.get(lease)
        if found is None:
            return False
        result, kept = found
        self.results[lease] = Finished(lease, result.outcome, True, result.n), kept
        return lease in self._unsent

    def connection_lost(self) -> None:
        """Notes that all kept results must be sent again."""
        self._unsent = dict.fromkeys(self.results)

    def take_unsent(self, size: int) -> Iterator[tuple[Finished, bytes | None]]:
        """Yields the next results that must be sent again, with their payloads, until they take
        `size` bytes. They then count as sent.

        Raises:
            OSError: a spill file cannot be read.
        """
        while self._unsent and size > 0:
            lease = next(iter(self._unsent))
            del self._unsent[lease]
            result, kept = self.results[lease]
            if isinstance(kept, _Spilled) and self._spill is not None:
                payload: bytes | None = self._spill.get(*kept)
            else:
                payload = kept if isinstance(kept, bytes) else None
            size -= _MESSAGE + (0 if payload is None else len(payload))
            yield result, payload
