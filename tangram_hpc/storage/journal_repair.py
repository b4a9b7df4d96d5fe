"""Repairs a job's journals and spool, so that a broker starts again and kept results stay kept.

The repair deletes nothing. A file that is not whole is moved into `damaged/` of the job's folder,
and a new file with all that may be used takes its place in one step. A repair that is cut off
leaves either the old file or the new one, and can be made again.

What may be used:

- Records in which one flipped bit was set right: nothing is lost.
- Of journals, the events before the first hole. Events build on each other, so a sequence with a
  gap cannot be continued: what stands behind it, later journals included, is moved away.
- Of a spool, every record that can be read, as the records of different names are independent.

Kept results are worth more than events: a name whose result is kept does not run again, whatever
the journals have lost. If its action still waits in the events that are left, the repair ends it
there; if the action runs there, the next broker ends it with the kept outcome.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..atomic_file import replace_file
from ..domain import event as ev
from ..errors import InvalidInput, TangramError
from . import spool as sp
from .access import may_serve
from .checkpoint import NAME as CHECKPOINT
from .folder_lock import SILENT_S, FileLock, FolderLock, holder_of, last_sign
from .journal_check import (
    DAMAGED,
    REPAIRS,
    JournalData,
    NamedWorkReplay,
    SpoolData,
    accepted_names,
    lost_names,
    read_job_journals,
    read_spool,
    salvage_segment,
    shown,
)
from .journal_format import MAGIC, UNGUARDED, encode_events
from .journal_segments import journals
from .record_file import framed


@dataclass
class RepairReport:
    """What a repair did.

    Attributes:
        job: Name of the job's folder.
        moved: Paths below the folder, and where these files are now.
        corrected: Records in which one flipped bit was set right.
        lost_bytes: Bytes that could not be read.
        lost_events: Events that can be read and are not used, since others are lost before them.
        lost: Names that ended by themselves, whose results are lost: they will run again.
        unseen: Names whose results are kept, and of which no journal knows any more.
        ended: Names whose waiting actions the repair ended, since their results are kept.
        lines: The same for a person, one line each.
    """

    job: str
    moved: dict[str, str] = field(default_factory=dict)
    corrected: int = 0
    lost_bytes: int = 0
    lost_events: int = 0
    lost: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON shows it."""
        return asdict(self)


def repair_job(folder: Path) -> RepairReport:
    """Repairs the journals and the spool of a job's folder.

    Raises:
        InvalidInput: There is nothing to repair in the folder, or another release wrote a file.
        TangramError: A broker serves the job.
    """
    if not (journals(folder) or read_spool(folder).numbers):
        raise InvalidInput(f"job folder {folder}: it has no journal and no spool; name another job "
                           "with -j or set TANGRAM_HOME")
    lock = _take(folder)
    try:
        return _repair(folder)
    except OSError as error:
        raise InvalidInput(f"job folder {folder}: cannot write there ({error.strerror})") from None
    finally:
        lock.release()


def _take(folder: Path) -> FileLock:
    """Takes the folder as a broker does, so that none can start meanwhile."""
    lock, holder = FileLock(folder), holder_of(folder)
    who = holder.show() if holder is not None else "it is just starting"
    alive = not lock.held
    if holder is not None and holder.host != socket.gethostname() and (alive or may_serve(folder)):
        # a file system may hide the lock of another host, or keep it for a while after its end; so
        # the holder's signs of life decide
        sign, until, alive = last_sign(folder), time.monotonic() + SILENT_S, False
        while not alive and time.monotonic() < until:
            time.sleep(0.5)
            alive = last_sign(folder) != sign
    if alive:
        lock.release()
        raise TangramError(f"job {folder.name}: a broker serves it ({who}; folder {folder}); end "
                           f"it first (`tangram shutdown -j {folder.name}`), then repair")
    FolderLock(folder, lock)
    return lock


def _repair(folder: Path) -> RepairReport:
    report, found, spool = RepairReport(folder.name), read_job_journals(folder), read_spool(folder)
    for file in (*(journal.report for journal in found), *spool.reports):
        if file.other_release:
            raise InvalidInput(f"{folder / file.name}: {file.problem}; nothing was changed")
    replay, last = _replay_kept(found)
    report.lost = lost_names(replay, spool)
    accepted = accepted_names(folder)
    report.unseen = [name for name in spool.results()
                     if name not in replay.submitted and name not in accepted]
    _repair_segments(folder, spool, report)
    _repair_journals(folder, found, last, replay, spool, report)
    _tell_names(report)
    if last < len(found) and any(file.problem for file in spool.reports):
        report.lines.append("more names than these may run again, since journals and spool are "
                            "both damaged")
    if report.lines:
        _note(folder, report)
    return report


# ---- journals ------------------------------------------------------------------------------------


def _replay_kept(found: list[JournalData]) -> tuple[NamedWorkReplay, int]:
    """Applies all events that may be used, and removes the other ones from `found`.

    Returns:
        The replay, and the number of the last journal that is used: to its end, or up to a gap in
        it. -1 if none is; the number of journals if all are used to their ends.
    """
    replay = NamedWorkReplay()
    for number, journal in enumerate(found):
        if journal.gap:
            return replay, number - 1
        for n, (at, events) in enumerate(journal.commits):
            try:
                for event in events:
                    replay.apply(event)
            except InvalidInput as error:
                journal.report.problem = (journal.report.problem
                                          or f"the record at byte {at} cannot be applied: {error}")
                journal.behind += sum(len(e) for _, e in journal.commits[n:])
                del journal.commits[n:]
                return _replay_kept(found[:number + 1])[0], number
        if journal.salvage.holes or journal.cut or (
                journal.report.version < 0 and not (journal.commits or journal.head)):
            return replay, number
    return replay, len(found)


def _repair_journals(folder: Path, found: list[JournalData], last: int, replay: NamedWorkReplay,
                     spool: SpoolData, report: RepairReport) -> None:
    """Replaces journals that are not whole, and moves away those behind a gap.

    Args:
        last: See `_replay_kept`.
    """
    if last + 1 < len(found) or any(journal.report.problem for journal in found):
        _set_aside(folder, CHECKPOINT, report)  # it may know events that are not used any more
    for journal in reversed(found[last + 1 :]):  # newest first: until the end, a check sees the gap
        events = sum(len(e) for _, e in journal.commits) + journal.behind
        report.lost_events += events
        _set_aside(folder, journal.report.name, report)
        report.lines.append(f"{journal.report.name}: its {events} events are not used, since they "
                            "build on events that are lost")
    for number, journal in enumerate(found[: last + 1]):
        if not journal.report.problem:
            continue
        holes = sum(size for _, size in journal.salvage.holes)
        bodies = [body for _, body in journal.salvage.records[: len(journal.commits)]]
        if number == last:
            bodies += _end_kept(replay, spool, report)
        version = journal.report.version
        magic = MAGIC if version < 0 else MAGIC[:6] + bytes((max(version, UNGUARDED + 1), 0))
        if journal.head:
            bodies.insert(0, journal.head)
        _replace(folder, journal.report.name, magic + b"".join(framed(bytes(b)) for b in bodies),
                 report)
        report.corrected += len(journal.salvage.corrected)
        report.lost_bytes += holes
        report.lost_events += journal.behind
        kept = sum(len(events) for _, events in journal.commits)
        report.lines.append(
            f"{journal.report.name}: {journal.report.problem}; {kept} events are kept, and "
            f"{journal.behind} behind the damage are not used")


def _end_kept(replay: NamedWorkReplay, spool: SpoolData, report: RepairReport) -> list[bytes]:
    """Returns a record that ends the waiting actions whose results are kept; none if there are
    none. Without it the next broker would say of them that their calls were not kept.
    """
    ledger = replay.scheduler.ledger
    waiting = {name: action for name, action in ledger.once.items()
               if spool.newest.get(name) == sp.RESULT and not ledger.actions[action].lease}
    events: list[ev.Event] = []
    for name, action in waiting.items():
        event = ev.ActionCancelled(replay.at, action, "it had ended and its result is kept; the "
                                   "journal's record of that was damaged")
        with suppress(InvalidInput):  # then the next broker ends it
            replay.apply(event)
            events.append(event)
            report.ended.append(name)
    return [encode_events(events)] if events else []


# ---- the spool -----------------------------------------------------------------------------------


def _repair_segments(folder: Path, spool: SpoolData, report: RepairReport) -> None:
    """Replaces segments that are not whole, and notes which names have no result any more."""
    for file in spool.reports:
        if not file.problem:
            continue
        found, _ = salvage_segment((folder / file.name).read_bytes())
        holes = sum(size for _, size in found.holes)
        _replace(folder, file.name, sp.MAGIC + b"".join(
            framed(bytes(body)) for _, body in found.records), report)
        report.corrected += len(found.corrected)
        report.lost_bytes += holes
        report.lines.append(f"{file.name}: {file.problem}; {file.records} records are kept")
        if holes:
            report.lines.append(f"{file.name}: a name that was forgotten in the lost bytes has its "
                                "earlier result again; forget such names again")
    for number in spool.missing:
        replace_file(folder / "once" / str(number), sp.MAGIC, sync=True)
        report.lines.append(f"once/{number}: this segment of the spool is missing; an empty one "
                            "takes its place")
    if report.lost:
        number = spool.numbers[-1] + 1 if spool.numbers else 0
        (folder / "once").mkdir(mode=0o700, exist_ok=True)
        replace_file(folder / "once" / str(number), sp.MAGIC + b"".join(
            framed(sp.deletion(name)) for name in report.lost), sync=True)


def _tell_names(report: RepairReport) -> None:
    if report.lost:
        report.lines.append(f"the results of {len(report.lost)} names are lost, so these run "
                            f"again: {shown(report.lost)}")
    if report.unseen:
        report.lines.append(f"no journal knows {len(report.unseen)} of the names whose results are "
                            "kept; the results stay, so these do not run again: "
                            f"{shown(report.unseen)}")
    if report.ended:
        report.lines.append(f"{len(report.ended)} of the waiting actions had ended and have kept "
                            f"results, so the repair ended them: {shown(report.ended)}")


# ---- files ---------------------------------------------------------------------------------------


def _free(folder: Path, name: str) -> Path:
    """Returns a path in `damaged/` that is not taken."""
    place = folder / DAMAGED
    place.mkdir(mode=0o700, exist_ok=True)
    there, number = place / name.replace("/", "-"), 0
    while there.exists():
        number += 1
        there = place / f"{name.replace('/', '-')}~{number}"
    return there


def _set_aside(folder: Path, name: str, report: RepairReport) -> None:
    """Moves a file, if there is one, into `damaged/`."""
    if (folder / name).exists():
        there = _free(folder, name)
        (folder / name).rename(there)
        report.moved[name] = str(there.relative_to(folder))


def _replace(folder: Path, name: str, data: bytes, report: RepairReport) -> None:
    """Puts new content in a file's place; the old file is in `damaged/` before."""
    path, there = folder / name, _free(folder, name)
    try:
        os.link(path, there)
    except OSError:  # a file system without hard links
        shutil.copy2(path, there)
        with open(there, "rb") as copy:
            os.fsync(copy.fileno())
    replace_file(path, data, sync=True)
    report.moved[name] = str(there.relative_to(folder))


def _note(folder: Path, report: RepairReport) -> None:
    """Adds the report to the notes of repairs, where a later check finds the names that it need
    not report again.
    """
    place = folder / DAMAGED
    place.mkdir(mode=0o700, exist_ok=True)
    line = json.dumps({"at": time.strftime("%Y-%m-%dT%H:%M:%S"), **report.to_json()})
    with open(os.open(place / REPAIRS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
