"""Checkpoints: a broker that takes one goes on as one that replays everything, and a checkpoint
that cannot be relied on is not used.
"""

from __future__ import annotations

import io
import os
import pickle
import random
from collections import deque
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest
from golden.story import Story

from tangram_hpc.domain import event as ev
from tangram_hpc.errors import InvalidInput
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.storage import checkpoint
from tangram_hpc.storage.checkpoint import NAME, Checkpoints, load
from tangram_hpc.storage.journal import FileJournal, read_head
from tangram_hpc.storage.journal_format import (
    SegmentHead,
    beginning,
    compressed,
    is_compressed,
)
from tangram_hpc.storage.journal_segments import JobJournal, begin_next, journals, read_journals

PLACERS = [("elastic", 6), ("elastic", 46), ("paper", 59), ("fcfs:4", 2), ("first-fit", 14),
           ("static:1", 6)]


def facts(value: Any, within: tuple[int, ...] = ()) -> Any:
    """What a value holds, in its order; a value inside itself is not looked into again."""
    if value is None or isinstance(value, int | str | bytes | float | Enum):
        return value
    if id(value) in within:
        return "itself"
    within = (*within, id(value))
    if isinstance(value, dict):
        return [(facts(k, within), facts(v, within)) for k, v in value.items()]
    if isinstance(value, list | tuple | deque | set):
        return [facts(v, within) for v in value]
    names = [*getattr(value, "__dict__", ()),
             *(n for c in type(value).__mro__ for n in getattr(c, "__slots__", ()))]
    names += getattr(value, "__struct_fields__", ())
    return type(value).__name__, [(n, facts(getattr(value, n), within)) for n in names
                                  if hasattr(value, n)]


def new_scheduler(placer: str = "elastic") -> Scheduler:
    return Scheduler(make_placer(placer), 0)


class Job:
    """A job's folder, and brokers that do nothing but handle the events of a story."""

    def __init__(self, folder: Path, events: list[ev.Event], placer: str) -> None:
        self.folder, self.events, self.placer, self.epoch = folder, events, placer, 0

    def begin(self) -> None:
        """A broker begins, as `app/broker.py` does it."""
        self.scheduler, self.epoch = new_scheduler(self.placer), self.epoch + 1
        journal = JobJournal(self.folder)
        found, self.replayed, kept, segment = load(self.folder, journal), 0, 0, ""
        if found is not None:
            ledger, segment, kept = found
            self.scheduler.resume(ledger)
        for event in journal.events(segment):
            self.scheduler.handle(event)
            self.replayed += 1
        self.handled = kept + self.replayed
        head = journal.next_head(self.epoch)
        self.journal = FileJournal(begin_next(self.folder, head), "none", lambda call: call())
        self.checkpoints = Checkpoints(self.folder, self.journal, head, kept, self.replayed)

    def handle(self, upto: int) -> list[Any]:
        """Handles the next events of the story; returns all decisions."""
        told = []
        while self.handled < upto:
            few = self.events[self.handled : min(upto, self.handled + 7)]
            self.journal.append(few)
            for event in few:
                told += self.scheduler.handle(event)
            self.handled += len(few)
            self.journal.commit(lambda: None)
            self.checkpoints.look(self.scheduler.ledger)
        return told

    def end(self) -> None:
        self.checkpoints.close()
        self.journal.close()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpoint, "EVENTS_MIN", 60)
    monkeypatch.setattr(checkpoint, "EVENTS_EACH", 0)
    return


@pytest.mark.parametrize(("placer", "seed"), PLACERS)
def test_a_broker_with_a_checkpoint_goes_on_as_one_that_was_never_away(
        tmp_path: Path, placer: str, seed: int) -> None:
    events = Story(placer, seed, with_prior=True).play(300).events
    rng, never_away = random.Random(seed), new_scheduler(placer)
    job, at, fewer = Job(tmp_path, events, placer), 0, 0
    while at < len(events):
        job.begin()
        assert job.handled == at
        fewer += job.replayed < at
        upto = min(len(events), at + rng.randrange(1, 150))
        expected = [d for event in events[at:upto] for d in never_away.handle(event)]
        assert job.handle(upto) == expected
        job.end()
        at = upto
    job.begin()
    assert facts(job.scheduler.ledger) == facts(never_away.ledger)
    job.scheduler.state.dirty = never_away.state.dirty = True
    now = events[-1].at + 10**9
    assert job.scheduler.plan(now) == never_away.plan(now)
    assert list(read_journals(tmp_path)) == events
    assert fewer > 1 and sum(is_compressed(p.read_bytes()) for p in journals(tmp_path)) > 1
    job.end()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job of 300 events with some checkpoints, whose broker has ended."""
    events = Story("elastic", 6, with_prior=True).play(300).events[:300]
    job = Job(tmp_path, events, "elastic")
    for upto in (100, 200, 290, 300):
        job.begin()
        job.handle(upto)
        job.end()  # waits for the checkpoint
    assert 0 < job.replayed < 100
    return job


def replays_all(job: Job) -> bool:
    job.begin()
    job.end()
    assert job.handled == len(job.events)
    return job.replayed == len(job.events)


def test_a_damaged_checkpoint_is_told_and_not_used(job: Job, capsys: pytest.CaptureFixture[str]
                                                   ) -> None:
    path, rng = job.folder / NAME, random.Random(1)
    whole = path.read_bytes()
    for _ in range(40):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        assert replays_all(job)
        assert f"{path}: " in capsys.readouterr().err
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert replays_all(job)
    path.write_bytes(whole)
    assert not replays_all(job)


def test_a_checkpoint_of_other_sources_is_not_used(job: Job, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    monkeypatch.setattr(checkpoint, "sources", lambda: "other")
    assert replays_all(job)


def test_a_checkpoint_cannot_name_what_is_no_part_of_a_ledger() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    for evil in (Evil(), print, Scheduler.handle, Path("x")):
        with pytest.raises(pickle.UnpicklingError, match="is no part of a ledger"):
            checkpoint._LedgerUnpickler(
                io.BytesIO(pickle.dumps(evil))).load()


def test_a_compressed_segment_is_whole_or_an_error(job: Job) -> None:
    path = next(p for p in journals(job.folder) if is_compressed(p.read_bytes()))
    whole, events, rng = path.read_bytes(), job.events, random.Random(2)
    cases = [whole[:n] for n in range(0, len(whole), 7)]
    for _ in range(400):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        cases.append(bytes(data))
    for data in cases:
        path.write_bytes(data)
        if len(data) > 8:
            with pytest.raises(InvalidInput):
                list(read_journals(job.folder))
    path.write_bytes(whole)
    assert list(read_journals(job.folder)) == events


def test_the_head_of_a_compressed_segment_is_read_without_the_rest(tmp_path: Path) -> None:
    """A broker that starts reads the heads of all segments; that must not cost a whole replay."""
    path = tmp_path / "journal"
    plain = beginning(SegmentHead(7, {"journal": 3})) + bytes(random.Random(1).randbytes(300_000))
    whole = compressed(plain)
    path.write_bytes(whole)
    assert read_head(path) == SegmentHead(7, {"journal": 3})
    path.write_bytes(whole[:100_000] + b"damaged" + whole[100_007:])
    assert read_head(path) == SegmentHead(7, {"journal": 3})
    for data in (whole[:8], whole[:1000], whole[:500] + b"damaged" + whole[507:]):
        path.write_bytes(data)
        with pytest.raises(InvalidInput):
            read_head(path)


def late(folder: Path, head: SegmentHead) -> None:
    """A superseded broker begins a segment."""
    journal = FileJournal(begin_next(folder, head), "none", lambda call: call())
    journal.append([ev.LeaseReleased(1, 1)])
    journal.commit(lambda: None)
    journal.close()


def test_what_a_superseded_broker_adds_counts_for_nobody(tmp_path: Path) -> None:
    events = Story("elastic", 6, with_prior=True).play(300).events[:50]
    job = Job(tmp_path, events, "elastic")
    job.begin()
    job.handle(30)
    old = job.journal
    job.begin()  # the old broker is stopped; the next one has read its 30 events
    assert job.handled == 30
    old.append([ev.LeaseReleased(1, 1)])
    old.commit(lambda: None)  # the old one goes on: in its own segment
    job.handle(40)
    late(tmp_path, SegmentHead(1, {"journal": 6}))  # and in one that it begins
    assert list(read_journals(tmp_path)) == events[:40]
    job.begin()
    assert job.handled == 40
    job.handle(50)
    job.end()
    assert list(read_journals(tmp_path)) == events


def test_a_segment_that_the_next_broker_has_not_seen_counts_for_nobody(tmp_path: Path) -> None:
    events = Story("elastic", 6, with_prior=True).play(300).events[:40]
    job = Job(tmp_path, events, "elastic")
    job.begin()
    job.handle(30)
    seen = JobJournal(tmp_path)
    assert list(seen.events()) == events[:30]
    late(tmp_path, SegmentHead(1, {"journal": 5}))  # between the reading and the next segment
    journal = FileJournal(begin_next(tmp_path, seen.next_head(2)), "none", lambda call: call())
    journal.append(events[30:])
    journal.commit(lambda: None)
    assert list(read_journals(tmp_path)) == events


def test_a_folder_that_lost_its_epochs_loses_no_events(tmp_path: Path) -> None:
    events = Story("elastic", 6, with_prior=True).play(300).events[:40]
    job = Job(tmp_path, events, "elastic")
    job.epoch = 7
    job.begin()
    job.handle(30)
    job.end()
    job.epoch = 0
    job.begin()
    job.handle(40)
    job.end()
    assert list(read_journals(tmp_path)) == events
    heads = [msgspec.to_builtins(head) for head in JobJournal(tmp_path).heads.values()]
    assert [head["epoch"] for head in heads] == [8, 9]
