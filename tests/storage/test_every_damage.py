"""Every truncation and every single-bit flip of a journal and of a spool of some hundred records,
of a segment that is over, plain and compressed, and of a checkpoint.

Each damaged file is read by the reader that a broker uses. What it gives is one of these:

- whole: all that was written (or, of a truncation between two records of a file that may still
  grow, all before the cut);
- torn: everything that was written completely before a truncation inside a record;
- loud: an error;
- silent: anything else. There may be none.

A sample with a fixed seed runs always; all of them are `long`, and print their counts.
"""

from __future__ import annotations

import os
import random
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from helpers.job_folder import ReplayedJob, frequent_checkpoints, named_work
from helpers.ledger_facts import facts

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.event import JOURNAL_VERSION
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.protocol import message as ms
from tangram_hpc.storage.checkpoint import NAME as CHECKPOINT
from tangram_hpc.storage.journal import read_journal
from tangram_hpc.storage.journal_format import COMPRESSED, SegmentHead, compressed
from tangram_hpc.storage.journal_segments import JobJournal, begin_segment
from tangram_hpc.storage.record_file import framed, look, look_unguarded
from tangram_hpc.storage.record_salvage import salvage
from tangram_hpc.storage.spool import MAGIC, FileSpool

RECORDS = 300
EARLIER = 100  # records of a journal of an earlier version; the time grows with the square
SAMPLE = 250
STORIES = Path(__file__).parent.parent / "golden" / "data" / "journals"
RESULT = ms.ActionResult(1, Outcome(ActionState.COMPLETED), "n", (0,), 1, 0, 0, 0)
Frame = Callable[[bytes], bytes]


def without_end(body: bytes) -> bytes:
    """A record of journals of version 5 and of spools without a magic number."""
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


class Kind:
    """A file of some hundred records, and how it is read.

    Attributes:
        data: The file.
        ends: The offset behind the head of the file, and behind each record.
        file: Its name.
        over: Whether something says how much was written to it, so that no truncation is torn.
    """

    file, over = "0", False

    def __init__(self, head: bytes, bodies: list[bytes], frame: Frame) -> None:
        self.data, self.ends = head, [len(head)]
        for body in bodies:
            self.data += frame(body)
            self.ends.append(len(self.data))
        self.head, self.examine = len(head), look if frame is framed else look_unguarded

    def read(self, path: Path) -> object:
        raise NotImplementedError

    def prefix(self, records: int) -> object:
        raise NotImplementedError


class JournalOf(Kind):
    def __init__(self, version: int) -> None:
        rng, records = random.Random(version), RECORDS if version == JOURNAL_VERSION else EARLIER
        self.batches = [[ev.LeaseReleased(rng.randrange(1 << 40), rng.randrange(1 << 20))
                         for _ in range(rng.randrange(1, 4))] for _ in range(records)]
        heads = [{"epoch": 3, "read": {"one-before": 17}}] if version >= 10 else []
        self.heads = len(heads)
        super().__init__(b"TGJRNL" + bytes((version, 0)),
                         [msgspec.msgpack.encode(body) for body in (*heads, *self.batches)],
                         without_end if version == 5 else framed)

    def read(self, path: Path) -> object:
        return list(read_journal(path))

    def prefix(self, records: int) -> object:
        return [event for batch in self.batches[:max(0, records - self.heads)] for event in batch]


class SegmentThatIsOver(JournalOf):
    """A segment to which nothing is written any more, as the head of the next one tells."""

    file, over = "journal", True

    def __init__(self, small: bool) -> None:
        super().__init__(JOURNAL_VERSION)
        if small:
            packed = compressed(self.data)
            self.head, self.data, self.ends = len(COMPRESSED), packed, [len(COMPRESSED)]
            while self.ends[-1] < len(packed):
                self.ends.append(look(memoryview(packed), self.ends[-1])[2])

    def read(self, path: Path) -> object:
        begin_segment(path.with_name("journal-1"), SegmentHead(4, {"journal": RECORDS}))
        return list(JobJournal(path.parent).events())

    def prefix(self, records: int) -> object:
        return super().prefix(RECORDS + 1)


class CheckpointOf(Kind):
    """A checkpoint is used as it was written, or not at all; the ledger is the same."""

    file, over = CHECKPOINT, True

    def __init__(self, folder: Path) -> None:
        self.job = ReplayedJob(folder, named_work(folder / "spool"), "elastic")
        self.job.begin()
        with frequent_checkpoints(40):
            self.job.handle(len(self.job.events))
        self.job.end()
        self.data = (folder / CHECKPOINT).read_bytes()
        self.head, self.examine, self.ends = 8, look, [8]
        while self.ends[-1] < len(self.data):
            self.ends.append(look(memoryview(self.data), self.ends[-1])[2])
        self.everything = facts(self.job.scheduler.ledger)

    def read(self, path: Path) -> object:
        self.job.begin()
        self.job.end()
        self.job.journal.path.unlink()
        return facts(self.job.scheduler.ledger)

    def prefix(self, records: int) -> object:
        return self.everything


class SpoolOf(Kind):
    """A name has a call, then a result, and every tenth is forgotten then."""

    def __init__(self, magic: bool) -> None:
        self.steps: list[tuple[int, str, bytes | None]] = []
        for n in range(RECORDS // 2):
            self.steps += [(1, f"s{n}", b"call"), (2, f"s{n}", b"%d" % (n * n))]
            if n % 10 == 9:
                self.steps.append((3, f"s{n}", None))
        bodies = [msgspec.msgpack.encode((kind, name, RESULT if kind == 2 else None, payload))
                  for kind, name, payload in self.steps]
        super().__init__(MAGIC if magic else b"", bodies, framed if magic else without_end)

    def read(self, path: Path) -> object:
        (path.parent / "1").unlink(missing_ok=True)
        spool = FileSpool(path.parent, 1 << 20)
        try:
            found = {}
            for name in spool.names():
                kept = spool.result(name)
                found[name] = (2, kept[1]) if kept is not None else (1, spool.call(name, 0))
            return found
        finally:
            os.close(spool._fd)
            for fd in spool._readers.values():
                os.close(fd)

    def prefix(self, records: int) -> object:
        found: dict[str, tuple[int, bytes | None]] = {}
        for kind, name, payload in self.steps[:records]:
            found.pop(name, None)
            if kind != 3:
                found[name] = (kind, payload)
        return found


KINDS: dict[str, Callable[[Path], Kind]] = {
    "spool": lambda _: SpoolOf(True), "spool-without-magic": lambda _: SpoolOf(False),
    "journal-over": lambda _: SegmentThatIsOver(False),
    "journal-compressed": lambda _: SegmentThatIsOver(True), "checkpoint": CheckpointOf,
    **{f"journal-{version}": (lambda _, v=version: JournalOf(v))
       for version in range(5, JOURNAL_VERSION + 1)}}


def read_or_error(kind: Kind, path: Path) -> object:
    try:
        return kind.read(path)
    except InvalidInput:
        return InvalidInput


def cut(kind: Kind, path: Path, cuts: list[int]) -> Counter[str]:
    """Reads the file cut off at these offsets."""
    counts: Counter[str] = Counter()
    for at in cuts:
        path.write_bytes(kind.data[:at])
        found = read_or_error(kind, path)
        whole = sum(end <= at for end in kind.ends[1:])
        counts["loud" if found is InvalidInput else
               "silent" if found != kind.prefix(whole) else
               "whole" if at in kind.ends or kind.over else "torn"] += 1
    return counts


def flipped(kind: Kind, path: Path, bits: list[int]) -> Counter[str]:
    """Reads the file with each of these bits flipped, one at a time."""
    counts: Counter[str] = Counter()
    path.write_bytes(kind.data)
    everything = kind.prefix(len(kind.ends) - 1)
    fd = os.open(path, os.O_WRONLY)
    for bit in bits:
        at = bit // 8
        os.pwrite(fd, bytes((kind.data[at] ^ 1 << bit % 8,)), at)
        found = read_or_error(kind, path)
        counts["loud" if found is InvalidInput else
               "whole" if found == everything else "silent"] += 1
        os.pwrite(fd, kind.data[at : at + 1], at)
    os.close(fd)
    return counts


def mended(kind: Kind, bits: list[int]) -> Counter[str]:
    """Lets a repair read the file with each of these bits flipped: whether nothing is lost."""
    counts: Counter[str] = Counter()
    bodies = [bytes(body) for _, body in salvage(kind.data, kind.head, kind.examine).records]
    assert len(bodies) == len(kind.ends) - 1
    for bit in bits:
        data = bytearray(kind.data)
        data[bit // 8] ^= 1 << bit % 8
        found = salvage(data, kind.head, kind.examine)
        same = [bytes(body) for _, body in found.records] == bodies
        counts["set right" if same and len(found.corrected) == 1 else "lost"] += 1
    return counts


def examine(name: str, kind: Kind, folder: Path, cuts: list[int], bits: list[int]) -> None:
    """Tries all of these on one kind of file, prints the counts and checks them."""
    path = folder / kind.file
    by_cut, by_flip = cut(kind, path, cuts), flipped(kind, path, bits)
    right = mended(kind, [bit for bit in bits if bit >= 8 * kind.head])
    shown = [", ".join(f"{what} {counts[what]}" for what in ("whole", "torn", "loud", "silent"))
             for counts in (by_cut, by_flip)]
    print(f"\n{name}: {len(kind.ends) - 1} records, {len(kind.data)} bytes; {len(cuts)} "
          f"truncations: {shown[0]}; {len(bits)} flipped bits: {shown[1]}; repaired: "
          f"set right {right['set right']}, lost {right['lost']}")
    assert by_cut["silent"] == by_flip["silent"] == 0
    if isinstance(kind, SegmentThatIsOver):
        assert by_cut["whole"] == (len(kind.data) in cuts), "a cut that nobody noticed"
    else:
        assert by_cut["loud"] == 0
    assert right["lost"] == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_sample_of_all_damage_is_never_silent(name: str, tmp_path: Path) -> None:
    """The first and last bytes, and others by chance."""
    kind, rng = KINDS[name](tmp_path), random.Random(name)
    size = len(kind.data)
    edges = [*range(40), *range(size - 40, size)]
    cuts = sorted({*edges, size, *rng.sample(range(size), SAMPLE)})
    bits = [8 * at + rng.randrange(8) for at in edges] + rng.sample(range(8 * size), SAMPLE)
    examine(name, kind, tmp_path, cuts, sorted({*range(8 * 8), *bits}))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KINDS)
def test_no_truncation_and_no_flipped_bit_is_silent(name: str, tmp_path: Path) -> None:
    kind = KINDS[name](tmp_path)
    size = len(kind.data)
    examine(name, kind, tmp_path, list(range(size + 1)), list(range(8 * size)))


@pytest.mark.parametrize("path", sorted(STORIES.iterdir()), ids=lambda path: path.name)
def test_kept_journals_of_every_version_are_never_damaged_silently(
        path: Path, tmp_path: Path) -> None:
    """Journals of earlier releases, with all kinds of events: flipped bits by chance."""
    data, copy, rng = path.read_bytes(), tmp_path / "journal", random.Random(path.name)
    whole, counts = list(read_journal(path)), Counter[str]()
    for bit in rng.sample(range(8 * len(data)), 30):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        copy.write_bytes(damaged)
        try:
            counts["whole" if list(read_journal(copy)) == whole else "silent"] += 1
        except InvalidInput:
            counts["loud"] += 1
    assert counts["silent"] == 0, counts
