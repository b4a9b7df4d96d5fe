"""The spool: for each idempotency key, its action's call, or its result when there is one.

A spool is a folder of segments that only grow. Each start of a broker begins a new segment, so that
nothing is ever written behind a torn end. A segment is 8 bytes of magic and then records
(`record_file.py`), each a msgpack array. The newest record of a key counts. Segments are removed,
oldest first, when no record in them counts any more. One key that is kept for long would keep all
segments behind its own. So when much of the spool counts no more, the records that count in the
oldest segments are written again at the end, and these segments are removed.

Invariants: a call or result is committed here before the journal has its event. A torn end is
ignored, since its commit was not over. A record that is not as it was written is an error that
names the file, the offset and the remedy, at the start as well as when the record is read later.
The size is bounded: when the spool is full, no new keys are taken.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import msgspec

from ..errors import InvalidInput
from ..protocol.frame import Buffer
from ..protocol.message import ActionResult
from ..protocol.reading import reader
from .record_file import HEAD, Damaged, Look, framed, look, look_unguarded, read_records

MAGIC = b"TGSPOL\x01\0"
# Segments of the earlier format have no magic: they begin with a record length below this.
_LENGTH_MAX = 1 << 28
SEGMENT = 64 << 20
CALL, RESULT, DELETED = 1, 2, 3


class _Record(msgspec.Struct, array_like=True, frozen=True):
    kind: int
    once: str
    result: ActionResult | None = None
    payload: bytes | None = None
    # The last two are empty in records of earlier releases.
    work: str = ""  # which work a result is of
    action: int = 0  # whose call this is


_encoder = msgspec.msgpack.Encoder()
_read = reader(_Record)
_Place = tuple[int, int, int, int, int]  # segment; offset, size and crc32 of the body; kind


class FileSpool:
    """A job's spool in a folder of its own; see `ports.Spool`.

    Args:
        folder: The folder, which is made if need be.
        limit: Size of all segments beyond which no new key is taken, bytes.
        segment: Size beyond which a new segment is begun, bytes.

    Raises:
        InvalidInput: The folder cannot be written or read, or has another release's format.
    """

    def __init__(self, folder: Path, limit: int, segment: int = SEGMENT) -> None:
        self._folder, self._limit, self._segment = folder, limit, min(segment, limit // 8)
        self._places: dict[str, _Place] = {}
        self._live: dict[int, int] = {}  # segment -> records in it that count, oldest first
        self._live_bytes = 0  # of all records that count
        self._sizes: dict[int, int] = {}
        self._pending: list[bytes] = []
        self._fresh: dict[str, _Record] = {}  # key -> its record that is not committed yet
        self._dropped = False  # keys were dropped since the last commit
        self._fd, self._lock = -1, threading.Lock()  # guards `_fd`: a sync may run in a thread
        self._readers: dict[int, int] = {}  # segment -> file descriptor for reading
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            old = sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal())
            for number in old:
                self._index(number)
            self._begin(old[-1] + 1 if old else 0)
            self._remove_unused()
        except OSError as error:
            raise InvalidInput(f"spool {folder}: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise InvalidInput(f"spool {folder}: this release cannot read it ({error}); move the "
                               "folder away to begin anew") from None

    # ---- what the broker asks --------------------------------------------------------------------

    def keep_call(self, once: str, payload: Buffer, action: int) -> bool:
        """Keeps a call, unless the spool is full; see `ports.Spool.keep_call`."""
        if sum(self._sizes.values()) + len(payload) > self._limit:
            return False
        self._add(_Record(CALL, once, payload=bytes(payload), action=action))
        return True

    def keep_result(self, once: str, result: ActionResult, payload: Buffer | None,
                    work: str) -> None:
        """Keeps a result in place of its call; see `ports.Spool.keep_result`."""
        data = None if payload is None else bytes(payload)
        self._add(_Record(RESULT, once, result, data, work))

    def call(self, once: str, action: int) -> bytes | None:
        """Returns the call of a key's action; see `ports.Spool.call`."""
        found = self._find(once, CALL)
        return found.payload if found is not None and found.action in (0, action) else None

    def result(self, once: str) -> tuple[ActionResult, bytes | None, str] | None:
        """Returns the result of a key; see `ports.Spool.result`."""
        found = self._find(once, RESULT)
        if found is None or found.result is None:
            return None
        return found.result, found.payload, found.work

    def has_result(self, once: str) -> bool:
        """Returns whether a key has a result, without reading the file; see
        `ports.Spool.has_result`.
        """
        return self._places.get(once, (0, 0, 0, 0, 0))[4] == RESULT

    def names(self) -> list[str]:
        """Returns all keys, oldest record first; see `ports.Spool.names`."""
        return list(self._places)

    def drop(self, names: Iterable[str]) -> None:
        """Forgets these keys; see `ports.Spool.drop`."""
        for once in names:
            if once in self._places:
                self._add(_Record(DELETED, once))
        while self._wasteful():
            self._move_oldest()
        self._dropped = bool(self._pending)

    def commit(self) -> None:
        """Writes all pending records; see `ports.Spool.commit`."""
        if not self._pending:
            return
        data = b"".join(self._pending)
        self._pending, self._fresh = [], {}
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view):]
        size, live = self._sizes[self._number], self._live[self._number]
        if size > self._segment or (not live and 8 * size > self._segment):
            self._begin(self._number + 1)
            self._remove_unused()
            while self._wasteful():
                self._move_oldest()
        elif self._dropped:
            self._remove_unused()  # not in `drop`: what replaces the records was not written then
        self._dropped = False

    def sync(self) -> None:
        """Syncs what was committed to the disk; may be called from any thread."""
        with self._lock:
            if self._fd >= 0:
                os.fdatasync(self._fd)

    def close(self, remove: bool) -> None:
        """Commits and closes; with `remove`, or if no key is kept, the files are removed."""
        self.commit()
        with self._lock:
            os.close(self._fd)
            self._fd = -1
        while self._readers:
            os.close(self._readers.popitem()[1])
        if remove or not self._places:
            for number in list(self._sizes):
                self._path(number).unlink(missing_ok=True)
            with suppress(OSError):  # the folder is not empty: somebody put another file there
                self._folder.rmdir()

    # ---- inside ----------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self._folder / str(number)

    def _begin(self, number: int) -> None:
        with self._lock:
            if self._fd >= 0:
                os.fdatasync(self._fd)
                os.close(self._fd)
            self._fd = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL
                               | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(self._fd, MAGIC)
        self._number = number
        self._live[number], self._sizes[number] = 0, len(MAGIC)

    def _add(self, record: _Record) -> None:
        body = _encoder.encode(record)
        frame = framed(body)
        self._pending.append(frame)
        at = self._sizes[self._number]
        self._sizes[self._number] = at + len(frame)
        self._fresh[record.once] = record
        self._set_place(record, (self._number, at + HEAD, len(body), zlib.crc32(body), record.kind))

    def _set_place(self, record: _Record, place: _Place) -> None:
        old = self._places.pop(record.once, None)
        if old is not None:
            self._live[old[0]] -= 1
            self._live_bytes -= HEAD + old[2]
        if record.kind != DELETED:
            self._places[record.once] = place  # behind all older ones: `_move_oldest` needs that
            self._live[place[0]] += 1
            self._live_bytes += HEAD + place[2]

    def _find(self, once: str, kind: int) -> _Record | None:
        place = self._places.get(once)
        if place is None or place[4] != kind:
            return None
        if once in self._fresh:
            return self._fresh[once]
        number, at, size, check, _ = place
        if number not in self._readers:
            self._readers[number] = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC)
        body = os.pread(self._readers[number], size, at)
        if zlib.crc32(body) != check:
            raise Damaged(f"spool {self._path(number)}: damaged at byte {at}: what was kept for "
                          f"{once!r} is not as it was written. {self._remedy()}")
        record: _Record = _read(body)
        return record

    def _remove_unused(self) -> None:
        """Removes the oldest segments as long as nothing in them counts.

        The order matters: a record that deletes a key must never be removed before the record that
        it deletes.
        """
        for number in list(self._live):
            if self._live[number] or number == self._number:
                return
            self._path(number).unlink(missing_ok=True)
            del self._live[number], self._sizes[number]
            if number in self._readers:
                os.close(self._readers.pop(number))

    def _wasteful(self) -> bool:
        """Returns whether the spool takes more than half of its limit, and a quarter of the limit
        is for records that count no more. The bytes that `_move_oldest` writes are then at most
        three times those that it frees, over time.
        """
        size = sum(self._sizes.values())
        return (len(self._sizes) > 1 and 2 * size > self._limit
                and 4 * (size - self._live_bytes) > self._limit)

    def _move_oldest(self) -> None:
        """Writes the records that count in the oldest segment again, and removes the segment once
        they are on the disk. O(records that count in it).
        """
        oldest = next(iter(self._live))
        moved = list(takewhile(lambda kept: kept[1][0] == oldest, self._places.items()))
        for once, place in moved:
            record = self._find(once, place[4])
            assert record is not None
            self._add(record)
        self.commit()
        self.sync()
        self._remove_unused()

    def _index(self, number: int) -> None:
        data = self._path(number).read_bytes()
        self._live[number], self._sizes[number] = 0, len(data)
        where = f"spool {self._path(number)}"
        if len(data) < len(MAGIC) and MAGIC.startswith(data):
            return  # its writer died before it had written the magic
        if (frame := framing(data)) is None:
            raise Damaged(f"{where}: damaged at byte 0: it does not begin as a segment does. "
                          f"{self._remedy()}")
        found = read_records(data, frame[0], where, self._remedy(), frame[1])
        for at, body in found:
            record: _Record = _read(body)
            self._set_place(record, (number, at, len(body), zlib.crc32(body), record.kind))

    def _remedy(self) -> str:
        """Returns what a person can do about a damaged spool."""
        job = self._folder.parent.name
        return (f"Put back a copy of the file; or run `tangram journal repair -j {job}`, which "
                "keeps all that can be read and says what is lost; or begin anew without what was "
                f"kept: `mv {self._folder} {self._folder}.damaged` (`once` names then run again)")


def framing(data: Buffer) -> tuple[int, Look] | None:
    """Returns where the records of a segment begin and how they are framed; None if it does not
    begin as a segment does.
    """
    if bytes(data[:8]) == MAGIC:
        return len(MAGIC), look
    return (0, look_unguarded) if int.from_bytes(data[:4], "little") < _LENGTH_MAX else None


def read_kept(body: Buffer) -> tuple[int, str]:
    """Returns the kind (`CALL`, `RESULT` or `DELETED`) and the key of a record.

    Raises:
        msgspec.DecodeError: Another release wrote it.
    """
    record: _Record = _read(body)
    return record.kind, record.once


def deletion(once: str) -> bytes:
    """Returns the body of a record that says that nothing is kept for a key."""
    return _encoder.encode(_Record(DELETED, once))
