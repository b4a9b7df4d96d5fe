"""The journal's file: events in commit order, written in groups, readable after any crash.

Law: append-only. Layout: 8 bytes magic, then records of u32 length, u32 crc32, msgpack list of
events. A torn last record is ignored by readers (the crash came before its commit); a damaged one
in the middle is an error. Modes: `none` hands the data to the kernel (survives the broker's death,
not the machine's), `batch` replies only after an fdatasync that many commits share, `always` syncs
each commit before going on.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ..domain.event import JOURNAL_VERSION, JOURNAL_VERSIONS, AnyEvent, Event
from ..errors import InvalidInput
from ..wire.reading import reader

_NAME = b"TGJRNL"
MAGIC = _NAME + bytes([JOURNAL_VERSION, 0])
_READABLE = tuple(_NAME + bytes([version, 0]) for version in JOURNAL_VERSIONS)
MODES = ("none", "batch", "always")
_encoder = msgspec.msgpack.Encoder()
_read = reader(list[AnyEvent])


class FileJournal:
    """One writer's journal. `wake` runs a callable on the driver's loop, from any thread; `first`
    is called before each sync: what must be on the disk before this is."""

    def __init__(self, path: Path, mode: str, wake: Callable[[Callable[[], None]], object],
                 first: Callable[[], None] = lambda: None) -> None:
        assert mode in MODES, mode
        self.mode = mode
        self._wake, self._first = wake, first
        self._pending: list[Event] = []
        self._count = 0
        self._waiting: list[Callable[[], None]] = []
        self._syncing = False
        self._thread = ThreadPoolExecutor(1)  # kept: starting one a sync costs more than a sync
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.fstat(self._fd).st_size == 0:
            os.write(self._fd, MAGIC)

    def append(self, events: Iterable[Event]) -> int:
        """See `ports.Journal.append`."""
        before = len(self._pending)
        self._pending.extend(events)
        self._count += len(self._pending) - before
        return self._count

    def commit(self, then: Callable[[], None]) -> None:
        """See `ports.Journal.commit`."""
        if self._pending:
            body = _encoder.encode(self._pending)
            self._pending = []
            _write_all(self._fd, len(body).to_bytes(4, "little")
                       + zlib.crc32(body).to_bytes(4, "little") + body)
        if self.mode == "batch":
            self._waiting.append(then)
            self._start_sync()
            return
        if self.mode == "always":
            self._first()
            os.fdatasync(self._fd)
        then()

    def close(self) -> None:
        """See `ports.Journal.close`."""
        if self._fd < 0:
            return
        mode, self.mode = self.mode, "always" if self.mode == "batch" else self.mode
        self.commit(lambda: None)
        self.mode = mode
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()
        self._thread.shutdown()
        os.close(self._fd)
        self._fd = -1

    def _start_sync(self) -> None:
        if self._syncing or not self._waiting:
            return
        self._syncing = True
        covered, self._waiting = self._waiting, []
        self._thread.submit(self._sync, covered)

    def _sync(self, covered: list[Callable[[], None]]) -> None:
        try:
            self._first()
            os.fdatasync(self._fd)
        except OSError as error:  # a quota on a shared file system is often told only here
            failed = error
            self._wake(lambda: self._failed(failed))
        else:
            self._wake(lambda: self._synced(covered))

    def _failed(self, error: OSError) -> None:
        """On the loop, which ends the process: nothing that waits for this sync may be promised."""
        raise error

    def _synced(self, covered: list[Callable[[], None]]) -> None:
        self._syncing = False
        for then in covered:
            then()
        self._start_sync()


def journals(folder: Path) -> list[Path]:
    """The journals of a job, one for each start of its broker, oldest first: `journal`,
    `journal-1`, and so on."""
    found = [(int(p.name[8:] or 0), p) for p in folder.glob("journal*")
             if p.name == "journal" or p.name[8:].isdigit()]
    return [path for _, path in sorted(found)]


def next_journal(folder: Path) -> Path:
    """Where the next broker of this job writes; never behind what an earlier one wrote, whose last
    record may be torn, and which may not have noticed yet that it is dead."""
    earlier = journals(folder)
    if not earlier:
        return folder / "journal"
    return folder / f"journal-{int(earlier[-1].name[8:] or 0) + 1}"


def read_journals(folder: Path) -> Iterator[Event]:
    """The events of all starts of a job's broker, oldest first.

    Raises:
        InvalidInput: there is none, or one cannot be read; see `read_journal`.
    """
    try:
        found = journals(folder)
    except PermissionError:
        found = []  # somebody else's: the reader says so
    for path in found or [folder / "journal"]:
        yield from read_journal(path)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


def read_journal(path: Path) -> Iterator[Event]:
    """The events of a journal, oldest first.

    Raises:
        InvalidInput: it is missing, of another version or release, or damaged before its end.
    """
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidInput(f"journal {path}: {error.strerror}; nothing ran under this name here, "
                           "name another with -j or set TANGRAM_HOME") from None
    except OSError as error:
        raise InvalidInput(f"journal {path}: {error.strerror}") from None
    if len(data) < 8 and any(magic.startswith(data) for magic in _READABLE):
        return  # its writer died before its first word
    if bytes(data[:8]) not in _READABLE:
        raise InvalidInput(f"journal {path}: not a journal of version {JOURNAL_VERSION}")
    at = 8
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        body = data[at + 8 : at + 8 + size]
        last = at + 8 + size >= len(data)
        if len(body) < size or not size:
            return  # torn: the writer died inside this record
        if zlib.crc32(body) != int.from_bytes(data[at + 4 : at + 8], "little"):
            if last:
                return
            raise InvalidInput(f"journal {path}: damaged at byte {at}")
        try:
            events = _read(body)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"journal {path}: this release cannot read it ({error}); use the "
                               "one that wrote it") from None
        yield from events
        at += 8 + size
