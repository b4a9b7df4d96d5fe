"""Checks a job's journals and its spool, and compares one with the other. It only reads.

Each file is read as a broker would read it, and behind damage as a repair would
(`record_salvage.py`). The events before the first damage are then applied to a scheduler, as the
job's next broker will do. From what the scheduler answers it follows which named work
(`Action.once`) has ended by itself, and so must have a kept result unless it was forgotten.

Whether a name was forgotten is in no event. The spool tells: forgetting writes a record, and
segments are only removed oldest first. A name counts as lost only if neither of these can explain
that its result is missing. All other names without a result are counted in `gone`.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..domain import event as ev
from ..domain.decision import ReplyToClient
from ..domain.states import ActionState
from ..errors import InvalidInput
from ..scheduler.placement.placers.placer_registry import make_placer
from ..scheduler.scheduler import Scheduler
from . import spool as sp
from .journal_format import (
    COMPRESSED,
    MAGIC,
    UNGUARDED,
    SegmentHead,
    decode_events,
    decode_head,
    is_compressed,
    is_head,
    is_newer,
    is_torn_magic,
    plain,
    version_of,
)
from .journal_segments import absent, journals, limits, shortfall
from .record_file import Found, look, look_unguarded
from .record_salvage import Salvage, salvage

DAMAGED = "damaged"  # the folder into which a repair moves files, in the job's folder
REPAIRS = "repairs.jsonl"  # what repairs did, one JSON object a line, in that folder
_KEPT = (ActionState.COMPLETED, ActionState.FAILED, ActionState.TIMEOUT, ActionState.OUT_OF_MEMORY)
_SHOWN = 5  # names in one line


@dataclass
class FileReport:
    """What one journal or one segment of the spool holds.

    Attributes:
        name: Path below the job's folder.
        size: Bytes.
        version: Format of a journal; of a segment 1, or 0 for the earlier format. -1: unknown.
        records: Records that can be read, those behind damage included.
        events: Events in them; 0 for a segment.
        torn: Bytes of a record that was cut off at the end.
        damaged_at: Offset of the first damage; -1 for none.
        problem: What is wrong, in one line; empty if a broker can read the file.
        other_release: Whether another release wrote it, so that no repair here can help.
    """

    name: str
    size: int = 0
    version: int = -1
    records: int = 0
    events: int = 0
    torn: int = 0
    damaged_at: int = -1
    problem: str = ""
    other_release: bool = False


@dataclass
class JobReport:
    """What a job's folder holds.

    Attributes:
        job: Name of the folder.
        files: Journals, oldest first, and then segments.
        kept: How many results are kept.
        calls: How many calls of named work are kept that has no result yet.
        lost: Names that ended by themselves, whose results should be kept and are not.
        unseen: Names whose results are kept, and of which no journal knows. Empty while a journal
            is damaged.
        gone: How many names that ended by themselves have no result, because they were forgotten or
            the job's work was over, as far as can be told.
        problems: One line for each problem.
    """

    job: str
    files: list[FileReport] = field(default_factory=list)
    kept: int = 0
    calls: int = 0
    lost: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    gone: int = 0
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON shows it."""
        return asdict(self)


@dataclass
class JournalData:
    """A journal that was read for a check.

    Attributes:
        path: The file.
        report: What is told of it.
        salvage: What can be read of it.
        head: The body of its head; empty for none.
        commits: Offset and events of each record before the first hole that counts.
        behind: How many events can be read behind the first hole.
        gap: Whether journals before this one are missing, so that its events cannot be used.
        cut: Whether records at its end are missing, so that nothing behind it can be used.
    """

    path: Path
    report: FileReport
    salvage: Salvage
    head: bytes = b""
    commits: list[tuple[int, list[ev.Event]]] = field(default_factory=list)
    behind: int = 0
    gap: bool = False
    cut: bool = False


@dataclass
class SpoolData:
    """A spool that was read for a check.

    Attributes:
        numbers: The numbers of its segments.
        reports: What is told of each.
        newest: The kind of the newest record of each name.
        deleted: Names for which a record says that nothing is kept any more.
        missing: Numbers of segments that are not there.
    """

    numbers: list[int] = field(default_factory=list)
    reports: list[FileReport] = field(default_factory=list)
    newest: dict[str, int] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    missing: list[int] = field(default_factory=list)

    def results(self) -> list[str]:
        """Returns the names whose results are kept."""
        return [name for name, kind in self.newest.items() if kind == sp.RESULT]


class NamedWorkReplay:
    """Applies events as the job's next broker does, and notes what becomes of named work.

    Attributes:
        scheduler: The scheduler, with all events applied.
        submitted: All names.
        ended: Names that ended by themselves, each with the number of brokers that had ended in
            order before.
        stops: How many brokers ended in order.
        at: Time of the last event, ns since the epoch; 0 before the first.
    """

    def __init__(self) -> None:
        self.scheduler = Scheduler(make_placer("elastic"), 0)
        self.submitted: set[str] = set()
        self.ended: dict[str, int] = {}
        self.stops = self.at = 0
        self._names: dict[int, str] = {}

    def apply(self, event: ev.Event) -> None:
        """Applies one event.

        Raises:
            InvalidInput: The event does not follow from those before it.
        """
        if isinstance(event, ev.ActionSubmitted) and event.action.once:
            self._names[event.action.id] = event.action.once
            self.submitted.add(event.action.once)
            self.ended.pop(event.action.once, None)
        self.at = event.at
        self.stops += isinstance(event, ev.BrokerStopped)
        try:
            orders = self.scheduler.handle(event)
        except (AssertionError, KeyError, InvalidInput) as error:
            raise InvalidInput(f"{type(event).__name__} does not follow from the events before it "
                               f"({error!r:.100})") from None
        for order in orders:
            if isinstance(order, ReplyToClient) and order.action in self._names:
                name = self._names.pop(order.action)
                if order.node and order.outcome.state in _KEPT:
                    self.ended[name] = self.stops


def check_job(folder: Path) -> JobReport:
    """Checks the journals and the spool of a job's folder.

    A broker that serves the job meanwhile may write between two looks at its files, so a mismatch
    counts only if a second look finds it too.

    Raises:
        InvalidInput: There is no journal and no spool, or a file cannot be read.
    """
    report = _check_once(folder)
    if report.lost or report.unseen:
        again = _check_once(folder)
        again.lost = [name for name in again.lost if name in report.lost]
        again.unseen = [name for name in again.unseen if name in report.unseen]
        report = again
    report.problems += _mismatches(report)
    return report


def _check_once(folder: Path) -> JobReport:
    found = read_job_journals(folder)  # before the spool, which gets results first
    replay = replay_all(found)
    spool = read_spool(folder)
    if not found and not spool.numbers:
        raise InvalidInput(f"job folder {folder}: it has no journal and no spool; name another job "
                           "with -j or set TANGRAM_HOME")
    report = JobReport(folder.name, [*(f.report for f in found), *spool.reports])
    results = spool.results()
    report.kept, report.calls = len(results), len(spool.newest) - len(results)
    report.lost = lost_names(replay, spool)
    accepted = accepted_names(folder)
    if not any(journal.report.problem for journal in found):  # else the damage explains them
        report.unseen = [n for n in results if n not in replay.submitted and n not in accepted]
    report.gone = sum(n not in results for n in replay.ended) - len(report.lost)
    report.problems = [f"{f.name}: {f.problem}" for f in report.files if f.problem]
    report.problems += [f"once/{n}: this segment of the spool is missing" for n in spool.missing]
    return report


def _mismatches(report: JobReport) -> Iterator[str]:
    if report.lost:
        yield (f"no result is kept for {len(report.lost)} of the names that ended by themselves, "
               f"so these run again: {shown(report.lost)}")
    if report.unseen:
        yield (f"no journal knows {len(report.unseen)} of the names whose results are kept, so "
               f"the journals lack events; the results stay: {shown(report.unseen)}")


def shown(names: list[str]) -> str:
    """Returns the first names, for a line that a person reads."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def accepted_names(folder: Path) -> set[str]:
    """Returns the names that no journal knows and that an earlier repair has already reported."""
    found: set[str] = set()
    with suppress(FileNotFoundError):
        for line in (folder / DAMAGED / REPAIRS).read_text().splitlines():
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                found.update(json.loads(line).get("unseen", ()))
    return found


def lost_names(replay: NamedWorkReplay, spool: SpoolData) -> list[str]:
    """Returns names that ended by themselves, whose results must be in the spool and are not."""
    # a broker that ends in order may empty the spool, whose segments then begin at 0 again: the
    # names that the spool still knows show since which of these ends it was not emptied
    since = min((replay.ended[n] for n in (*spool.newest, *spool.deleted) if n in replay.ended),
                default=replay.stops)
    unbroken = spool.numbers[:1] in ([], [0])
    return [name for name, stops in replay.ended.items()
            if spool.newest.get(name) != sp.RESULT and name not in spool.deleted
            and (name in spool.newest or (unbroken and stops >= since))]


# ---- journals ------------------------------------------------------------------------------------


def read_job_journals(folder: Path) -> list[JournalData]:
    """Reads all journals of a job, as far as each can be read; oldest first."""
    found = [read_for_check(path, folder) for path in journals(folder)]
    for number, journal in enumerate(found):
        if absent([journal.path for journal in found[: number + 1]]):
            journal.gap = True
            journal.report.problem = (journal.report.problem
                                      or "a journal before this one is missing")
            break
    # a head tells only what the heads before it do not, so one behind a lost head tells too little
    usable = list(itertools.takewhile(lambda journal: not _lacks_head(journal), found))
    count = limits([(journal.path.name, _head_of(journal)) for journal in usable])
    for journal in usable:
        limit, report = count.get(journal.path.name, -1), journal.report
        if limit < 0:
            continue
        if not journal.salvage.holes and not report.other_release and (
                why := shortfall(len(journal.commits), limit)):
            journal.cut, report.problem = True, report.problem or why
        # what an earlier broker wrote after the next one had read it is unused
        del journal.commits[limit:]
    return found


def _lacks_head(journal: JournalData) -> bool:
    """Returns whether the head of this segment, or of one before it, is lost."""
    holes = journal.salvage.holes
    return journal.gap or journal.report.version == -1 or bool(
        holes and holes[0][0] == len(MAGIC) and not journal.head)


def _head_of(journal: JournalData) -> SegmentHead | None:
    with suppress(msgspec.DecodeError):
        return decode_head(journal.head) if journal.head else None
    return None


def read_for_check(path: Path, folder: Path) -> JournalData:
    """Reads one journal.

    Raises:
        InvalidInput: The file cannot be read at all.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"journal {path}: {error.strerror}") from None
    report = FileReport(str(path.relative_to(folder)), len(data))
    found = JournalData(path, report, Salvage())
    data = _inflated(data, found)
    corrected = found.salvage.corrected
    if is_torn_magic(data):
        report.version, report.torn = 0, len(data)
        return found
    version = version_of(data)
    found.salvage = salvage(data, 8, look_unguarded if version == UNGUARDED else look)
    if not version and not found.salvage.records:
        found.salvage = salvage(data, 8, look_unguarded)
    report.version, report.torn = version or -1, found.salvage.torn
    _take_head(found)
    report.records = len(found.salvage.records)
    if not report.problem:
        report.damaged_at = found.salvage.damaged_at
    if not version:
        report.damaged_at = 0
        report.problem = "not a journal of a version that this release reads (first 8 bytes)"
        report.other_release = is_newer(data)
    elif report.damaged_at >= 0 and not report.problem:
        report.problem = _damage(found.salvage)
    found.salvage.corrected += corrected
    _take_events(found, bool(version))
    return found


def _take_head(found: JournalData) -> None:
    """Takes the segment's head, if there is one, from the front of the records."""
    records = found.salvage.records
    if records and is_head(records[0][1]):
        at, body = records.pop(0)
        found.head = bytes(body)
        try:
            decode_head(body)
        except msgspec.DecodeError as error:
            _cannot_read(found.report, at, error)


def _take_events(found: JournalData, known_version: bool) -> None:
    """Decodes the events of the records, up to the first record that cannot be decoded. Events
    behind a hole are only counted.
    """
    holes = found.salvage.holes
    for at, body in found.salvage.records:
        try:
            events = decode_events(body)
        except msgspec.DecodeError as error:
            if known_version:
                _cannot_read(found.report, at, error)
            break
        found.report.events += len(events)
        if not holes or at < holes[0][0]:
            found.commits.append((at, events))
        else:
            found.behind += len(events)


def _inflated(data: bytes, found: JournalData) -> bytes:
    """Returns a journal as it was before it was compressed, if it was. Flipped bits of a compressed
    one are set right, and the report says so; behind any other damage nothing is read.
    """
    report = found.report
    if not is_compressed(data):
        if version_of(data) or not _goes_on_compressed(data):
            return data
        data = COMPRESSED + data[len(COMPRESSED):]
        report.problem, report.damaged_at = "damaged at byte 0: a repair sets it right", 0
    with suppress(InvalidInput):
        return plain(data, found.path, "")
    kept, pieces = salvage(data, len(COMPRESSED)), list[bytes]()
    hole = kept.holes[0][0] if kept.holes else len(data)
    for at, body in kept.records:
        if at < hole:
            with suppress(zlib.error):
                pieces.append(zlib.decompress(body))
    found.salvage.corrected = kept.corrected
    if not kept.holes and pieces and not pieces[-1]:
        report.problem = report.problem or _damage(kept)
        report.damaged_at = kept.damaged_at if report.damaged_at < 0 else 0
    else:
        pieces.append(b"\xff" * 16)  # no record begins like this, so what is missing is a hole
    return b"".join(pieces)


def _goes_on_compressed(data: bytes) -> bool:
    """Returns whether a compressed segment follows the first 8 bytes, whatever these are."""
    found, body, _ = look(memoryview(data), len(COMPRESSED))
    with suppress(zlib.error):
        return found is Found.WHOLE and zlib.decompress(body)[:6] == MAGIC[:6]
    return False


def _damage(found: Salvage) -> str:
    parts = []
    if found.corrected:
        parts.append("one flipped bit, which a repair sets right, in each of "
                     f"{len(found.corrected)} records")
    if found.holes:
        parts.append(f"{sum(size for _, size in found.holes)} bytes cannot be read")
    return f"damaged at byte {found.damaged_at}: {', '.join(parts)}"


def replay_all(found: list[JournalData]) -> NamedWorkReplay:
    """Applies all events before the first damage, and notes in the reports where that fails."""
    replay = NamedWorkReplay()
    for journal in found:
        if journal.gap:
            return replay
        for at, events in journal.commits:
            try:
                for event in events:
                    replay.apply(event)
            except InvalidInput as error:
                if not journal.report.problem:
                    journal.report.problem = f"the record at byte {at} cannot be applied: {error}"
                    journal.report.damaged_at = at
                return replay
        if journal.salvage.holes or journal.cut or journal.report.version == -1:
            return replay
    return replay


# ---- the spool -----------------------------------------------------------------------------------


def read_spool(folder: Path) -> SpoolData:
    """Reads the spool of a job, as far as it can be read.

    Raises:
        InvalidInput: A segment cannot be read at all.
    """
    found, place = SpoolData(), folder / "once"
    with suppress(FileNotFoundError):
        found.numbers = sorted(int(p.name) for p in place.iterdir() if p.name.isdecimal())
    if found.numbers:
        there = set(found.numbers)
        found.missing = [n for n in range(found.numbers[0], found.numbers[-1]) if n not in there]
    for number in found.numbers:
        try:
            data = (place / str(number)).read_bytes()
        except FileNotFoundError:
            continue  # the broker has just removed it
        except OSError as error:
            raise InvalidInput(f"spool {place / str(number)}: {error.strerror}") from None
        found.reports.append(_read_segment(data, f"once/{number}", found))
    return found


def salvage_segment(data: bytes) -> tuple[Salvage, int]:
    """Returns what can be read of a segment, and its format: 1, 0 for the earlier one, -1 if the
    first bytes do not tell.
    """
    frame = sp.framing(data)
    if frame is None:
        found = salvage(data, len(sp.MAGIC))
        return found if found.records else salvage(data, 0, look_unguarded), -1
    return salvage(data, *frame), int(frame[1] is look)


def _read_segment(data: bytes, name: str, spool: SpoolData) -> FileReport:
    report = FileReport(name, len(data))
    if len(data) < len(sp.MAGIC) and sp.MAGIC.startswith(data):
        report.version, report.torn = 1, len(data)
        return report
    found, report.version = salvage_segment(data)
    report.records, report.torn = len(found.records), found.torn
    report.damaged_at = 0 if report.version < 0 else found.damaged_at
    if report.version < 0:
        report.problem = "damaged at byte 0: it does not begin as a segment does"
    elif report.damaged_at >= 0:
        report.problem = _damage(found)
    for at, body in found.records:
        try:
            kind, once = sp.read_kept(body)
        except msgspec.DecodeError as error:
            _cannot_read(report, at, error)
            break
        spool.newest.pop(once, None)
        if kind == sp.DELETED:
            spool.deleted.add(once)
        else:
            spool.newest[once] = kind
    return report


def _cannot_read(report: FileReport, at: int, error: msgspec.DecodeError) -> None:
    """Notes a whole record that this release cannot decode."""
    report.problem = report.problem or (
        f"this release cannot read the record at byte {at} ({error}); use the one that wrote it")
    report.other_release = True
