"""Keeps what commands wrote, for `tangram logs`: a log of a bounded size for each node of a job.

A job may run millions of short commands, so a file for each would overload a shared file system.
All output of a node goes into segments instead, files that only grow: `outputs/NODE/1.out`,
`2.out`, ... of the job's folder. When the segments of a node exceed their quota, or are older than
they may be, the oldest is removed.

A record (`record_file.py`) is a msgpack array: action, lease, stream, data. The lease tells
attempts of one action apart. Readers skip a torn end: it is being written, or its writer was
killed.

Writing must never hold up a worker, and the folder may be on a slow file system. So a thread
writes, and while it does not keep up, no more than `WAITING_MAX` bytes wait; what exceeds them is
dropped, and a record of the stream `DROPPED` says how many bytes were.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..errors import InvalidInput
from ..protocol.reading import reader
from .record_file import framed, read_records

FOLDER = "outputs"
OUT, ERR, DROPPED = 1, 2, 3
WAITING_MAX = 16 << 20  # bytes that wait for the writer
_SEGMENTS = 8  # parts of the quota: so much of it is lost at once when the oldest is removed
_PIECE = 1 << 16  # bytes of a record, at most
_GATHER_S = 0.1  # output of this time is written at once
_REMEDY = "Remove the file to see what the other segments hold."
_encode = msgspec.msgpack.Encoder().encode
_decode = reader(tuple[int, int, int, bytes])


class KeptPiece(NamedTuple):
    """A part of the output of one attempt.

    Attributes:
        lease: the lease of the attempt; a later attempt of an action has a larger one.
        stream: OUT, ERR, or DROPPED, whose data is the number of bytes in ASCII.
        data: the bytes.
    """

    lease: int
    stream: int
    data: bytes


class NodeOutputLog:
    """Writes the log of one node (serves `ports.OutputLog`).

    Args:
        job_folder: the folder of the job.
        node: the name of the node.
        max_bytes: the quota of the node.
        keep_s: how long output is kept, in seconds; 0 for no limit.
        warn: is told once, in one line, if the log cannot be written.
    """

    def __init__(self, job_folder: Path, node: str, max_bytes: int, keep_s: float,
                 warn: Callable[[str], None]) -> None:
        self._folder = job_folder / FOLDER / (node.replace("/", "_").lstrip(".") or "_")
        self._max, self._keep_s, self._warn = max_bytes, keep_s, warn
        self._most = max_bytes // _SEGMENTS  # bytes of a segment
        self._changed = threading.Condition()
        self._waiting: list[bytes] = []
        self._size = self._dropped = 0
        self._closed = False
        self._file = -1
        self._number = self._written = 0
        self._began_s = self._wrote_s = 0.0
        self._thread = threading.Thread(target=self._run, name="output log", daemon=True)
        self._thread.start()

    def add(self, action: int, lease: int, stream: int, data: bytes) -> None:
        """See `ports.OutputLog`."""
        for at in range(0, len(data), _PIECE):
            self._add(action, lease, stream, data[at:at + _PIECE])

    def _add(self, action: int, lease: int, stream: int, data: bytes) -> None:
        record = framed(_encode((action, lease, stream, data)))
        with self._changed:
            if self._size + len(record) > WAITING_MAX:
                self._dropped += len(data)
                return
            if self._dropped:
                said = _encode((action, lease, DROPPED, b"%d" % self._dropped))
                self._waiting.append(framed(said))
                self._dropped = 0
            self._waiting.append(record)
            if not self._size:
                self._changed.notify()
            self._size += len(record)

    def close(self) -> None:
        """See `ports.OutputLog`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(10.0)  # a file system that hangs must not hold up the worker's end

    def _run(self) -> None:
        """Writes until the log is closed; the only code that touches files."""
        try:
            while self._write_next():
                pass
        except OSError as error:
            self._warn(f"outputs: {self._folder}: {error.strerror}; `tangram logs` will lack what "
                       "this node runs")
        self._end_segment()
        with self._changed:
            self._waiting.clear()
            self._size = WAITING_MAX  # output that comes now is dropped

    def _write_next(self) -> bool:
        """Waits for output and writes it; returns False after the last."""
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait(self._look_s())
            closed, idle = self._closed, not self._waiting
        if idle and not closed:
            self._remove_old()
            return True
        if not closed:
            time.sleep(_GATHER_S)
        with self._changed:
            records, self._waiting, self._size = self._waiting, [], 0
        batch: list[bytes] = []
        size = 0
        for record in records:
            if batch and size + len(record) > self._most:
                self._write(b"".join(batch))
                batch, size = [], 0
            batch.append(record)
            size += len(record)
        if batch:
            self._write(b"".join(batch))
        return not closed

    def _look_s(self) -> float | None:
        """How long to wait for output before old segments are looked for; None for ever."""
        return max(1.0, self._keep_s / _SEGMENTS) if self._keep_s else None

    def _write(self, data: bytes) -> None:
        now = time.monotonic()
        stale = self._keep_s and now - self._began_s > self._keep_s / _SEGMENTS
        if self._file < 0 or stale or self._written + len(data) > self._most:
            self._next_segment()
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view):]
        self._written += len(data)
        self._wrote_s = now

    def _next_segment(self) -> None:
        self._end_segment()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        there = max((number for number, _ in segments(self._folder)), default=0)
        self._number = 1 + max(self._number, there)  # readers know a segment by its name
        self._remove_old()
        self._file = os.open(self._folder / f"{self._number}.out",
                             os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._written, self._began_s = 0, time.monotonic()

    def _end_segment(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _remove_old(self) -> None:
        """Removes the oldest segments, so that one more fits into the quota, and those that are too
        old. It is called when a segment begins, and from time to time while nothing is written.
        """
        if self._keep_s and time.monotonic() - self._wrote_s > self._keep_s:
            self._end_segment()
        found = [(path, path.stat()) for _, path in segments(self._folder)]
        total = sum(status.st_size for _, status in found)
        for path, status in found[:-1] if self._file >= 0 else found:
            old = self._keep_s and time.time() - status.st_mtime > self._keep_s
            if total + self._most <= self._max and not old:
                break
            path.unlink(missing_ok=True)
            total -= status.st_size


def segments(folder: Path) -> list[tuple[int, Path]]:
    """Returns the numbers and the paths of a node's segments, oldest first."""
    return sorted((int(path.stem), path) for path in folder.glob("*.out") if path.stem.isdecimal())


class OutputReader:
    """Reads what is kept of one action, and later what was added since.

    Args:
        job_folder: the folder of the job.
        action: the id of the action.
    """

    def __init__(self, job_folder: Path, action: int) -> None:
        self._folder, self._action = job_folder / FOLDER, action
        self._read: dict[Path, int] = {}  # how much of each segment was read
        self._over: set[Path] = set()  # segments that were read and grow no more

    @property
    def kept(self) -> bool:
        """Whether the job keeps, or has kept, any output."""
        return self._folder.is_dir()

    def new(self) -> Iterator[KeptPiece]:
        """Yields what was added since the last call, oldest first for each node. O(bytes added to
        all segments).

        Raises:
            InvalidInput: a segment is damaged; what stands before the damage was yielded.
        """
        for node in sorted(self._folder.glob("*")):
            paths = [path for _, path in segments(node)]
            for path in paths:
                if path not in self._over:
                    with suppress(FileNotFoundError):  # it was removed just now
                        yield from self._new_of(path)
            self._over.update(paths[:-1])

    def _new_of(self, path: Path) -> Iterator[KeptPiece]:
        begin = self._read.get(path, 0)
        with open(path, "rb") as file:
            file.seek(begin)
            data = file.read()
        at = 0
        for offset, body in read_records(data, 0, str(path), _REMEDY):
            at = offset + len(body) + 1
            self._read[path] = begin + at
            try:
                action, lease, stream, piece = _decode(body)
            except msgspec.DecodeError:
                raise InvalidInput(f"{path}: byte {begin + offset} begins no record of output; "
                                   f"{_REMEDY}") from None
            if action == self._action:
                yield KeptPiece(lease, stream, piece)
