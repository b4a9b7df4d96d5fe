"""The journal's file: events in commit order, written in groups, readable after any crash.

A file begins with 8 bytes of magic, after which records are appended (`record_file.py`), each a
msgpack list of events. Readers ignore a torn end, since the crash came before its commit. A record
that is not as it was written is an error that names the file, the offset and the remedy.

The mode says when a commit is done. `none` hands the data to the kernel: it survives the broker's
death and not the machine's. `batch` answers only after an fdatasync, which many commits share
(group commit). `always` syncs each commit before it goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ..domain.event import JOURNAL_VERSION, AnyEvent, Event
from ..errors import InvalidInput
from ..protocol.frame import Buffer
from ..protocol.reading import reader
from .record_file import framed, look, look_unguarded, read_records

MAGIC = b"TGJRNL" + bytes([JOURNAL_VERSION, 0])
# older versions, which lack events, or kinds of actions, of later ones: decisions 0058, 0068, 0069
# and 0086
_READ_TOO = (5, 6, 7, 8)
UNGUARDED = 5  # the records of this version have no checksum over their length
MODES = ("none", "batch", "always")
_encoder = msgspec.msgpack.Encoder()
_read = reader(list[AnyEvent])


class FileJournal:
    """The journal of one writer (serves `ports.Journal`).

    Args:
        path: The file, which is made or continued.
        mode: One of `MODES`.
        wake: Runs a callable on the driver's loop; may be called from any thread.
        first: Called before each sync, to write everything that must be on the disk before the
            journal.
        superseded: Says whether another writer has superseded this one.

    Attributes:
        mode: See above.
        superseded: See above.
    """

    def __init__(self, path: Path, mode: str, wake: Callable[[Callable[[], None]], object],
                 first: Callable[[], None] = lambda: None,
                 superseded: Callable[[], bool] = lambda: False) -> None:
        assert mode in MODES, mode
        self.superseded = superseded
        self.mode = mode
        self._wake, self._first = wake, first
        self._pending: list[Event] = []
        self._count = 0
        self._waiting: list[Callable[[], None]] = []
        self._syncing = False
        # kept for all syncs, as starting a thread costs more than a sync
        self._thread = ThreadPoolExecutor(1)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.fstat(self._fd).st_size == 0:
            os.write(self._fd, MAGIC)

    def append(self, events: Iterable[Event]) -> int:
        """Queues events for the next commit; see `ports.Journal.append`."""
        before = len(self._pending)
        self._pending.extend(events)
        self._count += len(self._pending) - before
        return self._count

    def commit(self, then: Callable[[], None]) -> None:
        """Writes the queued events as one record; see `ports.Journal.commit`."""
        if self._pending:
            body = _encoder.encode(self._pending)
            self._pending = []
            _write_all(self._fd, framed(body))
        if self.mode == "batch":
            self._waiting.append(then)
            self._start_sync()
            return
        if self.mode == "always":
            self._first()
            os.fdatasync(self._fd)
        then()

    def close(self) -> None:
        """Commits, syncs in the modes `batch` and `always`, and closes; see `ports.Journal.close`.
        """
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
        except OSError as error:  # a shared file system often reports a quota only here
            failed = error
            self._wake(lambda: self._failed(failed))
        else:
            self._wake(lambda: self._synced(covered))

    def _failed(self, error: OSError) -> None:
        """Raises the error on the event loop, which ends the process: no event that waits for this
        sync may be reported as stored.
        """
        raise error

    def _synced(self, covered: list[Callable[[], None]]) -> None:
        self._syncing = False
        for then in covered:
            then()
        self._start_sync()


def journals(folder: Path) -> list[Path]:
    """Returns a job's journals, one for each start of its broker, oldest first: `journal`,
    `journal-1`, and so on.
    """
    found = [(int(p.name[8:] or 0), p) for p in folder.glob("journal*")
             if p.name == "journal" or p.name[8:].isdigit()]
    return [path for _, path in sorted(found)]


def next_journal(folder: Path) -> Path:
    """Returns where the next broker of this job writes.

    It never appends to an earlier broker's file: that file's last record may be torn, and the
    earlier broker may not have noticed yet that it was superseded.
    """
    earlier = journals(folder)
    if not earlier:
        return folder / "journal"
    return folder / f"journal-{int(earlier[-1].name[8:] or 0) + 1}"


def read_journals(folder: Path) -> Iterator[Event]:
    """Yields the events of all starts of a job's broker, oldest first.

    Raises:
        InvalidInput: There is no journal, or one cannot be read; see `read_journal`.
    """
    try:
        found = journals(folder)
    except PermissionError:
        found = []  # the folder belongs to another user: `read_journal` reports it
    for path in found or [folder / "journal"]:
        yield from read_journal(path)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


def read_journal(path: Path) -> Iterator[Event]:
    """Yields the events of a journal, oldest first.

    Raises:
        InvalidInput: The file is missing, of another version or release, or damaged before its end.
    """
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidInput(f"journal {path}: {error.strerror}; nothing ran under this name here, "
                           "name another with -j or set TANGRAM_HOME") from None
    except OSError as error:
        raise InvalidInput(f"journal {path}: {error.strerror}") from None
    if is_torn_magic(data):
        return  # its writer died before it had written the magic
    version = version_of(data)
    if not version:
        read_too = ", ".join(map(str, _READ_TOO))
        raise InvalidInput(f"journal {path}: not a journal of version {read_too} or "
                           f"{JOURNAL_VERSION}, by its first 8 bytes. {_remedy(path)}")
    examine = look_unguarded if version == UNGUARDED else look
    for _, body in read_records(data, 8, f"journal {path}", _remedy(path), examine):
        try:
            yield from decode_events(body)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"journal {path}: this release cannot read it ({error}); use the "
                               "one that wrote it") from None


def version_of(data: Buffer) -> int:
    """Returns the version that a journal's first bytes tell; 0 if this release cannot read it."""
    magic = bytes(data[:8])
    if len(magic) < 8 or (magic[:6], magic[7:]) != (MAGIC[:6], MAGIC[7:]):
        return 0
    return magic[6] if magic[6] in (*_READ_TOO, JOURNAL_VERSION) else 0


def is_torn_magic(data: Buffer) -> bool:
    """Returns whether the data is the beginning of a magic, and nothing else."""
    magic = bytes(data[:8])
    return len(data) < 8 and MAGIC[:6].startswith(magic[:6]) and (
        len(magic) < 7 or magic[6] in (*_READ_TOO, JOURNAL_VERSION))


def decode_events(body: Buffer) -> list[Event]:
    """Returns the events of one record.

    Raises:
        msgspec.DecodeError: Another release wrote it.
    """
    events: list[Event] = _read(body)
    return events


def encode_events(events: list[Event]) -> bytes:
    """Returns events as the body of one record."""
    return _encoder.encode(events)


def _remedy(path: Path) -> str:
    """Returns what a person can do about a damaged journal."""
    folder = path.parent
    return (f"Put back a copy of the file; or run `tangram journal repair -j {folder.name}`, which "
            "keeps all that can be read and says what is lost; or begin anew without the job's "
            f"journals: `mkdir -p {folder}/damaged && mv {folder}/journal* {folder}/damaged/` "
            "(results that are kept for `once` names stay)")
