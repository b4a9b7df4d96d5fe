"""The segments of a job's journal: their order, and how much of each counts.

Each start of a broker begins a segment of its own: `journal`, `journal-1`, and so on. A running
broker begins another one with each checkpoint (`checkpoint.py`). Nobody appends to a segment of
somebody else: its last record may be torn, and its writer may not have noticed yet that it was
superseded.

A broker that was stopped between its check and its write, and is continued after the next one has
read the journals, still adds to its own segment or begins one. Nobody may ever use that. So the
head of each segment says which broker writes it, and how many records that broker has read of each
segment before. `limits` says what follows from all heads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ..domain.event import Event
from .journal import read_commits, read_head, read_journal
from .journal_format import SegmentHead, beginning


def journals(folder: Path) -> list[Path]:
    """Returns the segments of a job's journal, oldest first."""
    found = [(_number(p.name), p) for p in folder.glob("journal*")
             if p.name == "journal" or (p.name[7:8] == "-" and p.name[8:].isdigit())]
    return [path for _, path in sorted(found)]


def next_journal(folder: Path) -> Path:
    """Returns the path of the next segment of this job."""
    earlier = journals(folder)
    return folder / (f"journal-{_number(earlier[-1].name) + 1}" if earlier else "journal")


def _number(name: str) -> int:
    return int(name[8:] or 0)


def begin_segment(path: Path, head: SegmentHead) -> bool:
    """Makes a segment with this head; returns False if the file exists already, because another
    broker has begun it.

    Raises:
        OSError: The file cannot be made.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    try:
        os.write(fd, beginning(head))
    finally:
        os.close(fd)
    return True


def limits(heads: Sequence[tuple[str, SegmentHead | None]]) -> dict[str, int]:
    """Returns how many records count of each segment that does not count as a whole.

    Args:
        heads: the name and the head of each segment, oldest first; None for a segment without one.
    """
    found, newest = dict[str, int](), 0
    for n, (name, head) in enumerate(heads):
        if head is None:
            continue
        if 0 < head.epoch < newest:
            found[name] = 0  # its writer had been superseded when it began this segment
            continue
        if head.epoch > newest:  # a newer broker: what it has not read before does not count
            for earlier, _ in heads[:n]:
                found.setdefault(earlier, head.read.get(earlier, 0))
        for earlier, records in head.read.items():
            found.setdefault(earlier, records)
        newest = max(newest, head.epoch)
    return found


class JobJournal:
    """All segments of a job's journal, as they are now.

    Args:
        folder: the job's folder.

    Attributes:
        paths: the segments, oldest first.
        heads: the head of each, by file name; None for a segment without one.
        limits: how many records count of each segment that does not count as a whole.
        read: how many records were read of each segment, once `events` has come to its end.

    Raises:
        InvalidInput: A segment cannot be read; see `journal.read_journal`.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = journals(folder)
        self.heads = {path.name: read_head(path) for path in self.paths}
        self.limits = limits(list(self.heads.items()))
        self.read: dict[str, int] = {}

    def events(self, first: str = "") -> Iterator[Event]:
        """Yields all events that count, oldest first.

        Args:
            first: the name of the segment to begin with; empty for the oldest.

        Raises:
            InvalidInput: A segment cannot be read; see `journal.read_journal`.
        """
        names = [path.name for path in self.paths]
        for path in self.paths[names.index(first) if first else 0 :]:
            limit, self.read[path.name] = self.limits.get(path.name, -1), 0
            for events in read_commits(path) if limit else ():
                self.read[path.name] += 1
                yield from events
                if self.read[path.name] == limit:
                    break

    def next_head(self, epoch: int) -> SegmentHead:
        """Returns the head of the segment that a broker begins now, after it has read the events.

        Args:
            epoch: the broker's epoch. If the folder's epochs were lost, a higher one is taken, so
                that no earlier segment counts as newer.
        """
        newest = max((head.epoch for head in self.heads.values() if head is not None), default=0)
        return SegmentHead(max(epoch, newest + 1),
                           {name: n for name, n in self.read.items() if name not in self.limits})


def begin_next(folder: Path, head: SegmentHead) -> Path:
    """Begins the next segment of this job, whatever another broker begins meanwhile.

    Raises:
        OSError: The file cannot be made.
    """
    while not begin_segment(path := next_journal(folder), head):
        pass
    return path


def read_journals(folder: Path) -> Iterator[Event]:
    """Yields the events of all starts of a job's broker, oldest first.

    Raises:
        InvalidInput: There is no journal, or one cannot be read; see `journal.read_journal`.
    """
    found: JobJournal | None = None
    with suppress(PermissionError):  # the folder belongs to another user: `read_journal` reports it
        found = JobJournal(folder)
    if found is None or not found.paths:
        yield from read_journal(folder / "journal")
    else:
        yield from found.events()

