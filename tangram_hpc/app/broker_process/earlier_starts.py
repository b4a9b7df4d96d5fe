"""What a broker takes over from earlier starts of its job.

That is the last checkpoint, and the events of the journals since, which its scheduler
handles again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...domain.event import BrokerStopped
from ...errors import InvalidInput
from ...scheduler.scheduler import Scheduler
from ...storage.checkpoint import load
from ...storage.folder_lock import FolderLock
from ...storage.journal_format import SegmentHead
from ...storage.journal_segments import JobJournal


@dataclass(frozen=True)
class EarlierStarts:
    """What a broker finds of earlier starts of its job.

    Attributes:
        down_s: for how many seconds no broker ran; -1 if the workers and clients of the last one
            have ended too: it ended in order, or belonged to an earlier start of the Slurm job.
        head: what this broker's first segment of the journal says of the segments before it.
        kept: how many events the checkpoint had handled.
        replayed: how many were replayed behind it.
    """

    down_s: float
    head: SegmentHead
    kept: int
    replayed: int


def apply_earlier(scheduler: Scheduler, folder_lock: FolderLock) -> EarlierStarts:
    """Gives the scheduler what the last checkpoint kept, and the events since; a replay never
    plans.

    Raises:
        InvalidInput: a journal is damaged, or was written by a release with other rules.
    """
    folder, event, replayed = folder_lock.folder, None, 0
    journal = JobJournal(folder)
    found = load(folder, journal)
    segment, kept = "", 0
    if found is not None:
        ledger, segment, kept = found
        scheduler.resume(ledger)
    for event in journal.events(segment):
        replayed += 1
        try:
            scheduler.handle(event)
        except (AssertionError, KeyError, InvalidInput) as error:
            raise InvalidInput(
                f"journal of an earlier start in {folder}: this release cannot apply it "
                f"({error!r:.200}); use the release that wrote it; or, if that was this one, run "
                f"`tangram journal repair -j {folder.name}`, which keeps the events before; or "
                "move the folder away to begin anew") from None
    down_s = max(0.0, time.time() - folder_lock.earlier_sign_ns / 1e9)
    if (event is None and not kept) or isinstance(event, BrokerStopped) or (
            folder_lock.earlier_restarts != folder_lock.restarts):
        down_s = -1.0
    return EarlierStarts(down_s, journal.next_head(folder_lock.epoch), kept, replayed)
