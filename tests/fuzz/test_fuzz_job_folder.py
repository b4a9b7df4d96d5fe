"""The files of a job after accidents, and with records that no broker wrote.

The laws of accidents (bits, blocks, ends and files that are lost or changed):

- A start, `journal check` and `journal repair` end well or in one line, never otherwise.
- If a start refuses the files, the check tells of a problem.
- What a start reads is what was written, or the beginning of it if only the last segment lost its
  end; an older result of a name, or none, only where the check tells so or records of the end of
  the spool's last segment are torn.
- After a repair the check is clean, a start works, the events are the beginning of those that were
  written, and every result is kept whose record was whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from helpers.fuzz_inputs import LEAVES, SHORT, edited_tree, scratch
from helpers.job_folder import make_job, start
from hypothesis import given
from hypothesis import strategies as st

from tangram_hpc.domain import event as ev
from tangram_hpc.errors import InvalidInput
from tangram_hpc.storage import spool as sp
from tangram_hpc.storage.journal import read_journal
from tangram_hpc.storage.journal_check import check_job, read_spool
from tangram_hpc.storage.journal_format import MAGIC, compressed, is_compressed, plain
from tangram_hpc.storage.journal_repair import repair_job
from tangram_hpc.storage.journal_segments import JobJournal, read_journals
from tangram_hpc.storage.record_file import framed, look, look_unguarded
from tangram_hpc.storage.record_salvage import salvage

STORIES = Path(__file__).parent.parent / "golden" / "data" / "journals"
REFUSED = object()
Files = dict[str, bytes]


def _made() -> tuple[Files, list[ev.Event]]:
    """The files of a job that had three brokers, and its events."""
    folder = scratch() / "made"
    folder.mkdir()
    job = make_job(folder)
    return ({str(path.relative_to(folder)): path.read_bytes()
             for path in sorted(folder.rglob("*")) if path.is_file()}, job.events)


def _earlier(version: int) -> tuple[Files, list[ev.Event]]:
    """The files of a job of an earlier release, without heads and checkpoints."""
    path = STORIES / f"story-elastic-{version}"
    data, frame = path.read_bytes(), look_unguarded if version == 5 else look
    bodies = [bytes(body) for _, body in salvage(data, 8, frame).records]
    events = list(read_journal(path))
    end = 8 + sum(len(body) + (8 if version == 5 else 13) for body in bodies[:9])
    count = sum(len(msgspec.msgpack.decode(body)) for body in bodies[:9])
    return {"journal": data[:end]}, events[:count]


JOBS = [_made(), _earlier(5), _earlier(8)]
_AT = st.integers(0, 1 << 16)
ACCIDENT = st.tuples(
    st.sampled_from(["flip", "flip", "cut", "cut at a record", "zero", "zero to the end", "spoil",
                     "remove", "add zeros", "add bytes"]), _AT, _AT, st.integers(1, 64))


def _boundaries(data: bytes) -> list[int]:
    """Where the records of a file begin, and its end."""
    found = salvage(data, 8, look)
    return [at for at, _ in found.records] + [len(data)]


def damaged(files: Files, accidents: Sequence[tuple[str, int, int, int]]) -> Files:
    """These files after some accidents."""
    files = dict(files)
    for what, which, at, size in accidents:
        if not files:
            break
        name = list(files)[which % len(files)]
        data = bytearray(files[name])
        at = at % len(data) if data else 0
        if what == "flip" and data:
            data[at] ^= 1 << size % 8
        elif what == "cut":
            del data[at:]
        elif what == "cut at a record":
            ends = _boundaries(files[name])
            del data[ends[at % len(ends)]:]
        elif what == "zero":
            data[at : at + size] = bytes(len(data[at : at + size]))
        elif what == "zero to the end":
            data[at:] = bytes(len(data[at:]))
        elif what == "spoil":
            data[at : at + size] = b"\xa5\x01" * (len(data[at : at + size]) // 2)
        elif what == "add zeros":
            data += bytes(size)
        elif what == "add bytes":
            data += b"\x93\x01" * size
        if what == "remove":
            del files[name]
        else:
            files[name] = bytes(data)
    return files


def laid(files: Files) -> Path:
    """A folder with these files."""
    folder = scratch() / "job"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "once").mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def copied(folder: Path) -> Path:
    """A copy of the folder, since a start begins files of its own."""
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    return copy


def tried(do: Any, folder: Path) -> Any:
    """What this gives; REFUSED for an error in one line that names a file or the folder."""
    try:
        return do(folder)
    except InvalidInput as error:
        said = str(error)
        assert said and "\n" not in said and str(folder) in said, said
        return REFUSED


def is_beginning(found: list[Any], of: list[Any]) -> bool:
    return found == of[: len(found)]


def _whole_results(folder: Path) -> dict[str, int]:
    """The names of which the spool has a newest record that can be read, and its kind."""
    return dict(read_spool(folder).newest)


def _without_ends(events: list[ev.Event], of: list[ev.Event]) -> list[ev.Event]:
    """Events without those that a repair added at the end."""
    while events and len(events) > 0 and isinstance(events[-1], ev.ActionCancelled) and (
            not is_beginning(events, of)):
        events = events[:-1]
    return events


@SHORT
@given(st.sampled_from(JOBS), st.lists(ACCIDENT, min_size=1, max_size=3))
def test_accidents(job: tuple[Files, list[ev.Event]], accidents: list[Any]) -> None:
    files, events = job
    folder = laid(damaged(files, accidents))
    read = tried(lambda place: list(read_journals(place)), folder)
    report = tried(check_job, folder)
    began = tried(start, copied(folder))
    problems = report is REFUSED or bool(report.problems)
    assert began is not REFUSED or problems, "a start refuses what a check finds whole"
    if read is not REFUSED:
        assert is_beginning(read, events), "events that nobody wrote"
    if began is not REFUSED and not problems:
        assert read is not REFUSED
    if report is REFUSED:
        return
    before = _whole_results(folder)
    repaired = tried(repair_job, folder)
    if repaired is REFUSED:  # of a later release, which a flipped bit of the version may say
        assert any(file.other_release for file in report.files)
        return
    again = tried(check_job, folder) if any(folder.glob("journal*")) or any(
        (folder / "once").iterdir()) else None
    assert again is not REFUSED and (again is None or again.problems == []), again
    assert tried(start, copied(folder)) is not REFUSED, "a start refuses what was repaired"
    if any(folder.glob("journal*")):
        assert is_beginning(_without_ends(list(read_journals(folder)), events), events)
    after = _whole_results(folder)
    assert {name for name, kind in before.items() if kind == sp.RESULT} <= {
        name for name, kind in after.items() if kind == sp.RESULT}, "a repair lost results"


FORGERY = st.tuples(_AT, _AT, st.sampled_from(["edit", "edit", "edit", "drop", "twice", "swap"]),
                    st.lists(st.integers(0, 20), max_size=5), LEAVES)


def forged(files: Files, forgeries: Sequence[tuple[int, int, str, list[int], Any]]) -> Files:
    """These files with other records, each with a right checksum."""
    files = dict(files)
    for which, at, what, steps, leaf in forgeries:
        name = list(files)[which % len(files)]
        data, packed_too = files[name], is_compressed(files[name])
        if packed_too:
            data = plain(data, Path(name), "")
        bodies = [bytes(body) for _, body in salvage(data, 8, look).records]
        at %= len(bodies) or 1
        if what == "drop":
            del bodies[at : at + 1]
        elif what == "twice":
            bodies[at:at] = bodies[at : at + 1]
        elif what == "swap" and at + 1 < len(bodies):
            bodies[at : at + 2] = bodies[at + 1], bodies[at]
        elif what == "edit" and name != "checkpoint" and at < len(bodies):
            bodies[at] = msgspec.msgpack.encode(
                edited_tree(msgspec.msgpack.decode(bodies[at], strict=False), steps, leaf))
        data = data[:8] + b"".join(map(framed, bodies))
        files[name] = compressed(data) if packed_too else data
    return files


@SHORT
@given(st.sampled_from([JOBS[0], JOBS[2]]), st.lists(FORGERY, min_size=1, max_size=2))
def test_forged_records(job: tuple[Files, list[ev.Event]], forgeries: list[Any]) -> None:
    """Whatever the records say, it is refused in one line or used."""
    folder = laid(forged(job[0], forgeries))
    began = tried(start, copied(folder))
    report = tried(check_job, folder)
    assert began is not REFUSED or report is REFUSED or report.problems
    tried(lambda place: JobJournal(place).limits, folder)
    if report is not REFUSED and tried(repair_job, folder) is not REFUSED and any(
            folder.glob("journal*")):
        assert tried(start, copied(folder)) is not REFUSED
        assert tried(check_job, folder).problems == []




def test_a_head_of_another_release_is_told_by_the_check() -> None:
    head = framed(msgspec.msgpack.encode({"epoch": "nine", "read": {}}))
    folder = laid({**JOBS[0][0], "journal-5": MAGIC + head})
    assert tried(start, copied(folder)) is REFUSED
    assert "journal-5: this release cannot read" in tried(check_job, folder).problems[0]
    assert tried(repair_job, folder) is REFUSED


def test_a_name_with_a_digit_that_is_no_number_is_no_segment() -> None:
    folder = laid({**JOBS[0][0], "journal-²": b"?", "once/²": b"?", "epoch-²": b"?"})
    assert tried(start, copied(folder)) is not REFUSED
    assert tried(check_job, folder).problems == []


def check_repair(files: Files) -> None:
    """The repair tells of lost names, and all is well then."""
    folder = laid(files)
    assert check_job(folder).problems
    assert repair_job(folder).lost
    assert check_job(folder).problems == []
    assert tried(start, copied(folder)) is not REFUSED


def test_names_are_lost_with_the_spool_and_a_middle_segment() -> None:
    check_repair({name: data for name, data in JOBS[0][0].items()
                  if name not in ("journal-2", "once/0")})


def test_names_are_lost_with_the_spool_and_the_head_of_a_segment() -> None:
    for name in ("journal-3", "journal-4"):
        for at in (0, 8):
            data = JOBS[0][0][name]
            check_repair({**JOBS[0][0], "once/0": sp.MAGIC,
                          name: data[:at] + b"\xa5" * 30 + data[at + 30 :]})


def test_a_compressed_segment_without_its_first_bytes_loses_nothing() -> None:
    files, events = JOBS[0]
    name = next(name for name, data in files.items() if is_compressed(data))
    folder = laid({**files, name: b"\xa5" * 8 + files[name][8:]})
    assert tried(start, copied(folder)) is REFUSED
    assert check_job(folder).problems == [f"{name}: damaged at byte 0: a repair sets it right"]
    assert not repair_job(folder).lost_events
    assert list(read_journals(folder)) == events and not check_job(folder).problems
