"""What a broker looks at again and again: whether it still has its job's folder, and workers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ...broker.driver import Broker
from ...domain.slurm import JobView
from ...errors import TangramError
from ...ports import SlurmFailure
from ...slurm.budgeted import BudgetedSlurm
from ...storage.folder_lock import HEARTBEAT_S, FolderLock
from ..loop import LoopTimer
from .missing_workers import MissingWorkers


def check_place(folder_lock: FolderLock, job: str) -> None:
    """Raises TangramError if another broker serves the job now; the message says which."""
    if folder_lock.superseded(now=True):
        raise TangramError(f"job {job}: another broker serves it now ({folder_lock.successor()}); "
                           "this one has stopped and answers nobody")


def hold(timer: LoopTimer, folder_lock: FolderLock, broker: Broker,
         renew: Callable[[], None]) -> None:
    """Writes a heartbeat every `HEARTBEAT_S`, and checks whether another broker has taken over.

    Without this check, an idle broker would not notice another one. `renew` repairs the access file
    if a broker that this one has superseded has replaced it.
    """
    folder_lock.heartbeat()
    if not broker.superseded() and not broker.ended:
        renew()
        timer.after(HEARTBEAT_S, lambda: hold(timer, folder_lock, broker, renew))


def await_workers(timer: LoopTimer, broker: Broker, missing: MissingWorkers,
                  slurm: BudgetedSlurm | None) -> None:
    """Looks every `HEARTBEAT_S` whether the broker has workers; see `missing_workers.py`.

    A broker that may ask for satellites or give allocations back has no worker while it needs
    none, one that drains waits for none, and calls of endpoints need none.
    """
    ledger, job = broker.scheduler.ledger, broker.settings.job
    if broker.ended:
        return
    policy = ledger.allocs.policy
    needed = not (broker.draining or policy.max_nodes or policy.idle_ns or ledger.endpoints)
    line = missing.look(time.monotonic(), len(ledger.held_nodes()), needed)
    if line:
        print(f"tangram: broker: {line}", file=sys.stderr, flush=True)
    if missing.gave_up:
        return broker.stop(missing.gave_up)
    if slurm is not None and job.isdigit() and missing.take_question():
        slurm.query([int(job)], lambda answer: _end_with_job(broker, missing, answer))
    timer.after(HEARTBEAT_S, lambda: await_workers(timer, broker, missing, slurm))


def _end_with_job(broker: Broker, missing: MissingWorkers,
                  answer: tuple[JobView, ...] | SlurmFailure) -> None:
    """Ends the broker if Slurm says that its job has ended. Workers may have joined meanwhile."""
    if broker.ended or not isinstance(answer, tuple) or broker.scheduler.ledger.held_nodes():
        return
    if missing.has_ended(answer):
        job = broker.settings.job
        print(f"tangram: broker: job {job} has ended, and the broker with it", file=sys.stderr,
              flush=True)
        broker.stop(f"Slurm job {job} has ended")
