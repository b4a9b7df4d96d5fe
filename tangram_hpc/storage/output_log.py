"""Keeps what commands wrote, for `tangram logs`: a log of a bounded size for each node of a job.

A job may run millions of short commands, so a file for each would overload a shared file system.
All output of a node goes into segments instead, files that only grow: `outputs/NODE/1-WRITER.out`,
`2-WRITER.out`, ... of the job's folder. When the segments of a node exceed their quota, or are
older than they may be, the one that was written to least recently is removed.

Two workers may have one node's name, such as workers of two allocations on one host. They share the
node's folder and its quota. `WRITER` is random for each worker, so none writes to another's
segment; one that finds its segment removed begins the next.

A record (`record_file.py`) is a msgpack array: action, lease, stream, data. The lease tells
attempts of one action apart. Readers skip a torn end: it is being written, or its writer was
killed. Until a writer has begun its next segment, they also take damage for what is not there yet:
another client of a network file system may see the size of a file before its content.

Writing must never hold up a worker, and the folder may be on a slow file system. So a thread
writes, and while it does not keep up, no more than `WAITING_MAX` bytes wait; what exceeds them is
dropped, and a record of the stream `DROPPED` says to each attempt how many of its bytes were.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..protocol.reading import reader
from .record_file import Damaged, framed, read_records

FOLDER = "outputs"
OUT, ERR, DROPPED = 1, 2, 3
WAITING_MAX = 16 << 20  # bytes that wait for the writer
_SEGMENTS = 8  # parts of the quota: so much of it is lost at once when the oldest is removed
_PIECE = 1 << 16  # bytes of a record, at most
_GATHER_S = 0.1  # output of this time is written at once
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
        self._folder = job_folder / FOLDER / folder_of(node)
        self._max, self._keep_s, self._warn = max_bytes, keep_s, warn
        self._most = max_bytes // _SEGMENTS  # bytes of a segment
        self._changed = threading.Condition()
        self._waiting: list[bytes] = []
        self._size = 0
        self._dropped: dict[tuple[int, int], int] = {}  # bytes, by action and lease
        self._closed = self._failed = False
        self._writer = secrets.token_hex(4)
        self._file, self._path = -1, self._folder
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
            if self._failed:
                return
            if self._size + len(record) > WAITING_MAX:
                key = action, lease
                self._dropped[key] = self._dropped.get(key, 0) + len(data)
                return
            self._tell_dropped()
            self._waiting.append(record)
            if not self._size:
                self._changed.notify()
            self._size += len(record)

    def _tell_dropped(self) -> None:
        """Adds a record for each attempt of which bytes were dropped; the lock is held."""
        for (action, lease), size in self._dropped.items():
            self._waiting.append(framed(_encode((action, lease, DROPPED, b"%d" % size))))
        self._dropped.clear()

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
            self._dropped.clear()
            self._failed = True  # output that comes now is dropped

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
            self._tell_dropped()
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
        gone = self._file >= 0 and not os.fstat(self._file).st_nlink  # by another worker's quota
        if self._file < 0 or gone or stale or self._written + len(data) > self._most:
            self._next_segment()
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view):]
        self._written += len(data)
        self._wrote_s = now

    def _next_segment(self) -> None:
        self._end_segment()
        for folder in (self._folder.parent, self._folder):  # `parents` would not apply the mode
            folder.mkdir(exist_ok=True, mode=0o700)
        there = max((number for number, _ in segments(self._folder)), default=0)
        self._number = max(self._number, there)
        self._remove_old()
        while self._file < 0:
            self._number += 1  # readers know a segment by its name
            self._path = self._folder / f"{self._number}-{self._writer}.out"
            with suppress(FileExistsError):
                self._file = os.open(self._path,
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
        found: list[tuple[int, int, int, Path]] = []
        for number, path in segments(self._folder):
            with suppress(FileNotFoundError):  # another worker of this node removed it just now
                status = path.stat()
                found.append((status.st_mtime_ns, number, status.st_size, path))
        total = sum(size for _, _, size, _ in found)
        for written_ns, _, size, path in sorted(found):
            old = self._keep_s and time.time() - written_ns / 1e9 > self._keep_s
            if total + self._most <= self._max and not old:
                break
            if self._file < 0 or path != self._path:
                path.unlink(missing_ok=True)
                total -= size


def segments(folder: Path) -> list[tuple[int, Path]]:
    """Returns the numbers and the paths of a node's segments, oldest first."""
    return sorted((int(number), path) for path in folder.glob("*.out")
                  if (number := path.stem.partition("-")[0]).isdecimal())


def folder_of(node: str) -> str:
    """Returns the name of the folder of a node."""
    return node.replace("/", "_").lstrip(".") or "_"


class OutputReader:
    """Reads what is kept of one action, and later what was added since.

    Args:
        job_folder: the folder of the job.
        action: the id of the action.
        warn: is told, in one line, of each segment that is damaged.

    Attributes:
        nodes: names of the nodes whose logs are read; empty for all nodes.
    """

    def __init__(self, job_folder: Path, action: int, warn: Callable[[str], None]) -> None:
        self._folder, self._action, self._warn = job_folder / FOLDER, action, warn
        self.nodes: Collection[str] = ()
        self._read: dict[Path, int] = {}  # how much of each segment was read
        self._over: set[Path] = set()  # segments that were read and grow no more

    @property
    def kept(self) -> bool:
        """Whether the job keeps, or has kept, any output.

        Raises:
            PermissionError: the job's folder is closed to this user.
        """
        try:  # `Path.is_dir` hides a closed folder from Python 3.14 on
            return stat.S_ISDIR(os.stat(self._folder).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    @property
    def several(self) -> bool:
        """Whether several nodes have logs."""
        return len(list(self._folder.glob("*"))) > 1

    def new(self) -> Iterator[KeptPiece]:
        """Yields what was added since the last call, oldest first for each node. O(bytes added to
        all segments of these nodes).
        """
        wanted = set(map(folder_of, self.nodes))
        for node in sorted(self._folder.glob("*")):
            if wanted and node.name not in wanted:
                continue
            paths = [path for _, path in segments(node)]
            growing = set({_writer(path): path for path in paths}.values())  # the last of each
            for path in paths:
                if path not in self._over:
                    with suppress(FileNotFoundError):  # it was removed just now
                        yield from self._new_of(path, path in growing)
            self._over.update(path for path in paths if path not in growing)

    def _new_of(self, path: Path, growing: bool) -> Iterator[KeptPiece]:
        begin = self._read.get(path, 0)
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < begin:
                self._warn(f"{path}: the segment was cut, so what it had may be "
                           "lacking; it is read from its beginning again")
                begin = self._read[path] = 0
            file.seek(begin)
            data = file.read()
        try:
            for offset, body in read_records(data, 0, str(path), ""):
                action, lease, stream, piece = _decode(body)
                self._read[path] = begin + offset + len(body) + 1
                if action == self._action:
                    yield KeptPiece(lease, stream, piece)
        except (Damaged, msgspec.DecodeError):
            if not growing:
                self._warn(f"{path}: damaged at byte {self._read.get(path, 0)}; what this segment "
                           "holds from there on is not shown")


def last_output(job_folder: Path, actions: Collection[int], most: int,
                nodes: Collection[str] = ()) -> dict[int, bytes]:
    """Returns the last bytes that each of these actions wrote, both streams together, in its last
    attempt that wrote anything. A line says where output was dropped. Damaged parts are left out.
    O(bytes of all segments of these nodes).

    Args:
        job_folder: the folder of the job.
        actions: ids of the actions; those that wrote nothing are not in the answer.
        most: so many bytes of each, at most.
        nodes: names of the nodes whose logs are read; empty for all nodes.
    """
    found: dict[int, tuple[int, bytes]] = {}
    wanted = set(map(folder_of, nodes))
    for node in (job_folder / FOLDER).glob("*"):
        if wanted and node.name not in wanted:
            continue
        for _, path in segments(node):
            with suppress(OSError, Damaged, msgspec.DecodeError):
                for _, body in read_records(path.read_bytes(), 0, str(path), ""):
                    action, lease, stream, piece = _decode(body)
                    last, before = found.get(action, (0, b""))
                    if action in actions and lease >= last:
                        text = before if lease == last else b""
                        if stream == DROPPED:
                            begin = b"\n" if text and not text.endswith(b"\n") else b""
                            piece = begin + b"[%s bytes before here were not kept]\n" % piece
                        found[action] = lease, (text + piece)[-most:]
    return {action: text for action, (_, text) in found.items()}


def _writer(path: Path) -> str:
    return path.stem.partition("-")[2]
