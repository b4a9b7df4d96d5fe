"""Checkpoints: the ledger in a file, so that the job's next broker need not replay all events.

A replay costs 5 to 11 us an event, so a long job would be back only after minutes. From time to
time the broker begins a new segment of its journal and keeps the ledger as it is at that moment.
The next broker takes that ledger and replays the events from this segment on.

A checkpoint only saves time. The journals stay, and accounting reads them all; the segment that is
over is compressed. A checkpoint that is missing, damaged, of another release, or of a broker that
had been superseded is not used, and everything is replayed.

The ledger is written by `pickle`, so an object that two places share is still one object
afterwards. Its actions are most of it, and no other place shares their entries. So they are written
apart by msgspec, which takes a sixth of the time, for the broker stands still meanwhile. Loading
accepts only classes of this project's `domain` and `scheduler`, and the containers that they use,
so that a file cannot name anything else to call. A release with other sources of these two does not
use the checkpoint, since the same events might give it another ledger.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ..atomic_file import replace_file
from ..protocol.reading import reader
from ..scheduler.state.ledger import ActionEntry, Ledger
from .journal import FileJournal
from .journal_format import SegmentHead, compressed, is_compressed
from .journal_segments import JobJournal, begin_segment, next_journal
from .record_file import Found, framed, look

NAME = "checkpoint"
_KIND, MAGIC = b"TGCKPT", b"TGCKPT" + bytes([2, 0])
EVENTS_MIN = 100_000  # so many events, at least, lie between two checkpoints
EVENTS_EACH = 4  # and so many for each open action and session, because each costs time to keep
_PACKAGE = Path(__file__).parent.parent
_SHARED = {"collections": ("OrderedDict", "deque", "defaultdict", "Counter")}


class _About(msgspec.Struct, frozen=True):
    """The first record of a checkpoint: what the actions in the second record, and the rest of the
    ledger in the third, were made from.

    Attributes:
        sources: fingerprint of the classes in it.
        segment: the segment of the journal whose events come after the checkpoint.
        epoch: the epoch of the broker that wrote the checkpoint.
        events: how many events the ledger had handled.
    """

    sources: str
    segment: str
    epoch: int
    events: int


_read_about = reader(_About)


@cache
def sources() -> str:
    """Returns a fingerprint of the sources of the ledger's classes and of what changes it. It reads
    these files once in a process.
    """
    found = hashlib.sha256()
    for room in ("domain", "scheduler"):
        for path in sorted((_PACKAGE / room).rglob("*.py")):
            found.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes())
    return found.hexdigest()


class _LedgerUnpickler(pickle.Unpickler):
    """Loads a ledger, and nothing but a ledger."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class that a ledger may hold.

        Raises:
            UnpicklingError: The file names something else.
        """
        parts = module.split(".")
        if parts[:2] in (["tangram_hpc", "domain"], ["tangram_hpc", "scheduler"]):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        elif name in _SHARED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a ledger")


def load(folder: Path, journal: JobJournal) -> tuple[Ledger, str, int] | None:
    """Returns the ledger of a job's checkpoint, the segment whose events come next, and how many
    events the ledger has handled; None if there is no checkpoint that can be used.

    A damaged checkpoint is told on stderr. O(size of the file).
    """
    try:
        data = (folder / NAME).read_bytes()
    except FileNotFoundError:
        return None
    if data.startswith(_KIND) and not data.startswith(MAGIC):
        return None  # of another release
    try:
        about, actions, rest = _parts(data)
        head = journal.heads.get(about.segment)
        if about.sources != sources() or head is None or head.epoch != about.epoch \
                or journal.limits.get(about.segment) == 0:
            return None
        ledger = _LedgerUnpickler(io.BytesIO(zlib.decompress(rest))).load()
        if not isinstance(ledger, Ledger):
            raise pickle.UnpicklingError("it holds no ledger")
        ledger.actions = reader(dict[int, ActionEntry])(zlib.decompress(actions))
    except (ValueError, zlib.error, msgspec.DecodeError, pickle.UnpicklingError) as error:
        print(f"tangram: broker: {folder / NAME}: {error}; it is not used, and the journals are "
              "replayed from their beginning", file=sys.stderr, flush=True)
        return None
    return ledger, about.segment, about.events


def _parts(data: bytes) -> tuple[_About, memoryview, memoryview]:
    view, at, bodies = memoryview(data), len(MAGIC), []
    if data[:at] != MAGIC:
        raise ValueError("not a checkpoint that this release reads")
    while at < len(view):
        found, body, at = look(view, at)
        if found is not Found.WHOLE:
            raise ValueError("damaged")
        bodies.append(body)
    if len(bodies) != 3:
        raise ValueError("damaged")
    return _read_about(bodies[0]), bodies[1], bodies[2]


def _kept(ledger: Ledger) -> tuple[bytes, bytes]:
    """Returns the actions of a ledger and the rest of it, for a checkpoint. The ledger has no
    actions while the rest is pickled, and has them again afterwards.
    """
    actions, ledger.actions = ledger.actions, {}
    try:
        rest = pickle.dumps(ledger, protocol=5)
    finally:
        ledger.actions = actions
    return msgspec.msgpack.encode(actions), rest


class Checkpoints:
    """Writes a running broker's checkpoints.

    Args:
        folder: the job's folder.
        journal: the broker's journal.
        head: the head of that journal's segment.
        earlier: how many events the ledger had handled at the last checkpoint.
        replayed: how many it has handled since.
    """

    def __init__(self, folder: Path, journal: FileJournal, head: SegmentHead, earlier: int = 0,
                 replayed: int = 0) -> None:
        self._folder, self._journal, self._head = folder, journal, head
        self._events = earlier
        self._since = replayed  # events since the last checkpoint that are in no journal of ours
        self._seen = 0  # `journal.count` at the last checkpoint
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def look(self, ledger: Ledger) -> bool:
        """Begins a checkpoint if one is due; called when all events are committed.

        It takes about 1 us for each waiting action, and more for each session and lease. The file
        is written by another thread.

        Returns:
            Whether one was begun.

        Raises:
            OSError: The last one, or a new segment, could not be written.
        """
        since = self._since + self._journal.count - self._seen
        if since < EVENTS_MIN or since < EVENTS_EACH * (
                len(ledger.actions) + len(ledger.sessions)):
            return False
        if self._writing is not None:
            if not self._writing.done():
                return False
            self._writing.result()
        old, path = self._journal.path, next_journal(self._folder)
        head = SegmentHead(self._head.epoch, {old.name: self._journal.records})
        if self._journal.superseded() or not begin_segment(path, head):
            return False  # another broker serves the job now, as this one will find at once
        self._journal.go_on_in(path)
        self._events, self._since, self._seen = self._events + since, 0, self._journal.count
        about = _About(sources(), path.name, head.epoch, self._events)
        self._writing = self._thread.submit(self._write, about, _kept(ledger), old)
        return True

    def _write(self, about: _About, kept: tuple[bytes, bytes], old: Path) -> None:
        with open(old, "rb") as file:
            os.fsync(file.fileno())  # no checkpoint may know more than the journals
            data = file.read()
        replace_file(self._folder / NAME, b"".join((
            MAGIC, framed(msgspec.msgpack.encode(about)),
            *(framed(zlib.compress(each, 1)) for each in kept))), sync=True)
        if not is_compressed(data):
            replace_file(old, compressed(data), sync=True)

    def close(self) -> None:
        """Waits until what was begun is written.

        Raises:
            OSError: It could not be written.
        """
        self._thread.shutdown()
        if self._writing is not None:
            self._writing.result()
