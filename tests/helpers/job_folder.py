"""The folder of a job that had several brokers, made in one process by the real readers and
writers, and what its next broker makes of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from helpers.broker_rig import BrokerRig, action_of
from tangram_hpc.app.broker_process.earlier_starts import apply_earlier
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol import message as ms
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.storage import checkpoint
from tangram_hpc.storage.checkpoint import Checkpoints, load
from tangram_hpc.storage.journal import FileJournal
from tangram_hpc.storage.journal_segments import JobJournal, begin_next
from tangram_hpc.storage.spool import FileSpool

BATCH = 7


@contextmanager
def frequent_checkpoints(events: int = 60) -> Iterator[None]:
    """A broker begins a checkpoint after so many events."""
    with patch.multiple(checkpoint, EVENTS_MIN=events, EVENTS_EACH=0):
        yield


class ReplayedJob:
    """A job's folder, and brokers that do nothing but handle the events of a story."""

    def __init__(self, folder: Path, events: list[ev.Event], placer: str) -> None:
        self.folder, self.events, self.placer, self.epoch = folder, events, placer, 0

    def begin(self) -> None:
        """A broker begins, as `app/broker_process/` does it."""
        self.scheduler, self.epoch = Scheduler(make_placer(self.placer), 0), self.epoch + 1
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
            few = self.events[self.handled : min(upto, self.handled + BATCH)]
            self.journal.append(few)
            for event in few:
                told += self.scheduler.handle(event)
            self.handled += len(few)
            self.journal.commit(lambda: None)
            if self.checkpoints.look(self.scheduler.ledger):
                # the next one begins when this one is written: its place would depend on the disk
                assert self.checkpoints._writing is not None
                self.checkpoints._writing.result()
        return told

    def end(self) -> None:
        self.checkpoints.close()
        self.journal.close()


def named_work(folder: Path, names: int = 12) -> list[ev.Event]:
    """Lets a broker do named work, a session and a plain action, with a real spool in this folder;
    returns its events. Two names have been forgotten, two still wait, and one runs.
    """
    spool = FileSpool(folder / "once", 1 << 20)
    rig = BrokerRig(spool=spool, check=False)
    client, worker = rig.client(), rig.worker(2)
    client.say(ms.RequestSession(SessionSpec(action_of(client, 50).id, "s", 1)))
    for number in range(1, names + 1):
        client.say(ms.Submit(action_of(client, number, once=f"w{number}")), b"call")
        start = worker.last(ms.StartAttempt)
        worker.say(ms.AttemptsStarted((start.lease,)))
        worker.say(ms.Finished(start.lease, Outcome(ActionState.COMPLETED), n=1), b"r%d" % number)
        rig.run(0.1)
        client.say(ms.Ack((start.action.id,)))
    client.say(ms.Forget(1, ("w1", "w2"), ""))
    for number in range(names + 1, names + 5):
        client.say(ms.Submit(action_of(client, number, once=f"w{number}")), b"call")
    rig.run(0.1)
    spool.commit()
    os.close(spool._fd)
    return rig.journal.events


def make_job(folder: Path) -> ReplayedJob:
    """A job with three brokers, some checkpoints and named work; none of them ended in order."""
    job = ReplayedJob(folder, named_work(folder), "elastic")
    with frequent_checkpoints(30):
        for share in (0.4, 0.7, 1.0):
            job.begin()
            job.handle(round(share * len(job.events)))
            job.end()  # waits for the checkpoint
    return job


def start(folder: Path) -> tuple[Scheduler, dict[str, Any]]:
    """What the job's next broker reads: the scheduler after all events, and what the spool keeps.

    Raises:
        InvalidInput: It refuses to start.
    """
    scheduler, lock = Scheduler(make_placer("elastic"), 0), SimpleNamespace(
        folder=folder, epoch=99, earlier_sign_ns=0, earlier_restarts=-1, restarts=-1)
    apply_earlier(scheduler, lock)  # type: ignore[arg-type]
    spool = FileSpool(folder / "once", 1 << 20)
    try:
        once = scheduler.ledger.once
        kept = {name: spool.result(name) or spool.call(name, once.get(name, 0))
                for name in spool.names()}
        rig = BrokerRig(spool=spool, scheduler=scheduler)
        serves = rig.client("next")
        serves.say(ms.Query(1, "info"))
        assert serves.all(ms.QueryReply)
        return scheduler, kept
    finally:
        os.close(spool._fd)
        for fd in spool._readers.values():
            os.close(fd)
