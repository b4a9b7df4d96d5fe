"""The journal's file: events in commit order, written in groups, readable after any crash.

Its layout is in `journal_format.py`. Readers ignore a torn end, since the crash came before its
commit. A record that is not as it was written is an error that names the file, the offset and the
remedy. A job has many such files, its segments: `journal_segments.py`.

The mode says when a commit is done. `none` hands the data to the kernel: it survives the broker's
death and not the machine's. `batch` answers only after an fdatasync, which many commits share
(group commit). `always` syncs each commit before it goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ..domain.event import JOURNAL_VERSION, Event
from ..errors import InvalidInput
from .journal_format import (
    PIECE,
    READ_TOO,
    UNGUARDED,
    SegmentHead,
    beginning,
    decode_events,
    decode_head,
    encode_events,
    is_compressed,
    is_head,
    is_newer,
    is_torn_magic,
    plain,
    version_of,
)
from .record_file import (
    HEAD,
    UNGUARDED_HEAD,
    framed,
    look,
    look_unguarded,
    read_records,
)

MODES = ("none", "batch", "always")
_BEGINNING = PIECE  # bytes of a segment in which its head is looked for first


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
        path: The file to which it writes.
        records: How many records of events it has written to that file.
        count: How many events it was given.
    """

    def __init__(self, path: Path, mode: str, wake: Callable[[Callable[[], None]], object],
                 first: Callable[[], None] = lambda: None,
                 superseded: Callable[[], bool] = lambda: False) -> None:
        assert mode in MODES, mode
        self.superseded = superseded
        self.mode, self.path = mode, path
        self._wake, self._first = wake, first
        self._pending: list[Event] = []
        self.records = self.count = 0
        self._waiting: list[Callable[[], None]] = []
        self._syncing = False
        # kept for all syncs, as starting a thread costs more than a sync
        self._thread = ThreadPoolExecutor(1)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.fstat(self._fd).st_size == 0:
            os.write(self._fd, beginning(SegmentHead()))

    def append(self, events: Sequence[Event]) -> int:
        """Queues events for the next commit; see `ports.Journal.append`."""
        self._pending += events
        self.count += len(events)
        return self.count

    def commit(self, then: Callable[[], None]) -> None:
        """Writes the queued events as one record; see `ports.Journal.commit`."""
        if self._pending:
            body = encode_events(self._pending)
            self._pending = []
            _write_all(self._fd, framed(body))
            self.records += 1
        if self.mode == "batch":
            self._waiting.append(then)
            self._start_sync()
            return
        if self.mode == "always":
            self._first()
            os.fdatasync(self._fd)
        then()

    def go_on_in(self, path: Path) -> None:
        """Writes to another segment from now on, which has begun already. What was written before
        is on the disk when this returns, unless the mode is `none`.
        """
        assert not self._pending, "events wait for their commit"
        if self.mode != "none":
            self._first()
            os.fdatasync(self._fd)
        old, self.path, self.records = self._fd, path, 0
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._thread.submit(os.close, old)  # behind a sync that may be under way

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


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


def read_journal(path: Path) -> Iterator[Event]:
    """Yields the events of one file, oldest first.

    Raises:
        InvalidInput: The file is missing, of another version or release, or damaged before its end.
    """
    for events in read_commits(path):
        yield from events


def read_commits(path: Path) -> Iterator[list[Event]]:
    """Yields the events of each record of one file, oldest first; see `read_journal`."""
    data = memoryview(_content(path))
    if is_torn_magic(data):
        return  # its writer died before it had written the magic
    for body in _bodies(data, path):
        try:
            if not is_head(body):
                yield decode_events(body)
        except msgspec.DecodeError as error:
            raise _of_another_release(path, error) from None


def read_head(path: Path) -> SegmentHead | None:
    """Returns the head of a journal's file; None if it has none, because an earlier release wrote
    it or its writer died too early.

    Raises:
        InvalidInput: See `read_journal`.
    """
    data = memoryview(_content(path, whole=False))
    if is_torn_magic(data):
        return None
    body = next(_bodies(data, path), None)
    if body is None and len(data) == _BEGINNING:
        body = next(_bodies(memoryview(_content(path)), path), None)  # a very long head
    if body is None or not is_head(body):
        return None
    try:
        return decode_head(body)
    except msgspec.DecodeError as error:
        raise _of_another_release(path, error) from None


def first_events(path: Path) -> list[Event]:
    """Returns the events of the first record of a file; empty if its first 64 KiB have none. Reads
    no more of it.

    Raises:
        InvalidInput: See `read_journal`.
    """
    data = memoryview(_content(path, whole=False))
    try:
        for body in () if is_torn_magic(data) else _bodies(data, path):
            if not is_head(body):
                return decode_events(body)
    except msgspec.DecodeError as error:
        raise _of_another_release(path, error) from None
    return []


def torn_bytes(path: Path) -> int:
    """Returns how many bytes at the end of a file belong to a record that was cut off.

    Raises:
        InvalidInput: See `read_journal`.
    """
    data = memoryview(_content(path))
    if is_torn_magic(data):
        return len(data)
    end = 8
    for body in _bodies(data, path):
        end += len(body) + (UNGUARDED_HEAD if version_of(data) == UNGUARDED else HEAD + 1)
    return len(data) - end


def _content(path: Path, whole: bool = True) -> bytes:
    """Returns a file's content, or its first `_BEGINNING` bytes, for which a compressed file is not
    read to its end.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(-1 if whole else 2 * _BEGINNING)
        if is_compressed(data):
            return plain(data, path, remedy_of(path), whole)
        return data if whole else data[:_BEGINNING]
    except FileNotFoundError as error:
        raise InvalidInput(f"journal {path}: {error.strerror}; nothing ran under this name here, "
                           "name another with -j or set TANGRAM_HOME") from None
    except OSError as error:
        raise InvalidInput(f"journal {path}: {error.strerror}") from None


def _bodies(data: memoryview, path: Path) -> Iterator[memoryview]:
    """Yields the body of each record."""
    version = version_of(data)
    if not version:
        read_too = ", ".join(map(str, READ_TOO))
        remedy = "A later release wrote it: use that one" if is_newer(data) else remedy_of(path)
        raise InvalidInput(f"journal {path}: not a journal of version {read_too} or "
                           f"{JOURNAL_VERSION}, by its first 8 bytes. {remedy}")
    examine = look_unguarded if version == UNGUARDED else look
    for _, body in read_records(data, 8, f"journal {path}", remedy_of(path), examine):
        yield body


def _of_another_release(path: Path, error: msgspec.DecodeError) -> InvalidInput:
    return InvalidInput(f"journal {path}: this release cannot read it ({error}); use the one that "
                        "wrote it")


def remedy_of(path: Path) -> str:
    """Returns what a person can do about a damaged journal."""
    folder = path.parent
    return (f"Put back a copy of the file; or run `tangram journal repair -j {folder.name}`, which "
            "keeps all that can be read and says what is lost; or begin anew without the job's "
            f"journals: `mkdir -p {folder}/damaged && mv {folder}/journal* {folder}/damaged/` "
            "(results that are kept for `once` names stay)")
