"""Checkpoints: a broker that takes one goes on as one that replays everything, and a checkpoint
that cannot be relied on is not used.
"""

from __future__ import annotations

import io
import os
import pickle
import random
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest
from golden.story import Story
from helpers.job_folder import ReplayedJob
from helpers.ledger_facts import facts

from tangram_hpc.domain import action, hybrid, states
from tangram_hpc.domain import event as ev
from tangram_hpc.errors import InvalidInput
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.storage import checkpoint
from tangram_hpc.storage.checkpoint import NAME
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


def new_scheduler(placer: str = "elastic") -> Scheduler:
    return Scheduler(make_placer(placer), 0)


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
    job, at, fewer = ReplayedJob(tmp_path, events, placer), 0, 0
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
def job(tmp_path: Path) -> ReplayedJob:
    """A job of 300 events with some checkpoints, whose broker has ended."""
    events = Story("elastic", 6, with_prior=True).play(300).events[:300]
    job = ReplayedJob(tmp_path, events, "elastic")
    for upto in (100, 200, 290, 300):
        job.begin()
        job.handle(upto)
        job.end()  # waits for the checkpoint
    assert 0 < job.replayed < 100
    return job


def replays_all(job: ReplayedJob) -> bool:
    job.begin()
    job.end()
    assert job.handled == len(job.events)
    return job.replayed == len(job.events)


def test_a_damaged_checkpoint_is_told_and_not_used(
        job: ReplayedJob, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_checkpoint_of_other_sources_is_not_used(job: ReplayedJob, monkeypatch: pytest.MonkeyPatch
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


def test_a_checkpoint_of_an_earlier_format_is_not_used_and_not_told(
        job: ReplayedJob, capsys: pytest.CaptureFixture[str]) -> None:
    path = job.folder / NAME
    path.write_bytes(path.read_bytes().replace(checkpoint.MAGIC, b"TGCKPT\x01\x00", 1))
    assert replays_all(job)
    assert capsys.readouterr().err == ""


def test_actions_are_written_apart_and_stay_in_the_ledger() -> None:
    scheduler = new_scheduler()
    for event in Story("elastic", 6, with_prior=True).play(300).events[:300]:
        scheduler.handle(event)
    actions = dict(scheduler.ledger.actions)
    _, rest = checkpoint._kept(scheduler.ledger)
    assert actions and scheduler.ledger.actions == actions and b"ActionEntry" not in rest


def test_a_checkpoint_names_states_in_the_same_way_in_every_release_of_python() -> None:
    """Python 3.11.2, which Debian 12 has, would call `getattr`, and no checkpoint could be read."""
    for module in (action, hybrid, states):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Enum) and kind is not Enum:
                assert kind.__reduce_ex__ is states.FixedWord.__reduce_ex__, kind


def test_a_compressed_segment_is_whole_or_an_error(job: ReplayedJob) -> None:
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


@pytest.mark.parametrize("version", [10, 9], ids=["earlier", "flipped"])
def test_a_head_counts_in_a_segment_of_an_earlier_version(tmp_path: Path, version: int) -> None:
    """Version 10 has heads too. Version 9 has none, but 9 is 11 with one flipped bit."""
    path = tmp_path / "journal"
    data = bytearray(beginning(SegmentHead(7, {"journal": 3})))
    data[6] = version
    path.write_bytes(data)
    assert read_head(path) == SegmentHead(7, {"journal": 3})


def late(folder: Path, head: SegmentHead) -> None:
    """A superseded broker begins a segment."""
    journal = FileJournal(begin_next(folder, head), "none", lambda call: call())
    journal.append([ev.LeaseReleased(1, 1)])
    journal.commit(lambda: None)
    journal.close()


def test_what_a_superseded_broker_adds_counts_for_nobody(tmp_path: Path) -> None:
    events = Story("elastic", 6, with_prior=True).play(300).events[:50]
    job = ReplayedJob(tmp_path, events, "elastic")
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
    job = ReplayedJob(tmp_path, events, "elastic")
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
    job = ReplayedJob(tmp_path, events, "elastic")
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
