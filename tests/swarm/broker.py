"""One start of a broker, put together as `app/broker_process/` does, over real files.

A start has two steps: the folder is taken, and 0.1 s later the earlier journals are read. A broker
may be killed in each of them. A start that is refused because a file is damaged is told to the
world, which repairs the job as a person would.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.disk import LaterThread
from swarm.wires import Wire
from swarm.world import GRACE_S, Process, S
from tangram_hpc.app.broker_process.earlier_starts import apply_earlier
from tangram_hpc.app.broker_process.serve_broker import LATE_S
from tangram_hpc.app.broker_process.watches import hold
from tangram_hpc.broker.broker_settings import Settings
from tangram_hpc.broker.driver import Broker
from tangram_hpc.domain.service import EndpointSpec, ServiceSpec
from tangram_hpc.errors import InvalidInput
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.storage.checkpoint import Checkpoints
from tangram_hpc.storage.folder_lock import YIELD_S, FileLock, FolderLock
from tangram_hpc.storage.journal import FileJournal
from tangram_hpc.storage.journal_segments import begin_next
from tangram_hpc.storage.spill_files import FolderSpillFiles
from tangram_hpc.storage.spool import FileSpool

if TYPE_CHECKING:
    from swarm.job import Job

JOB = "7"
ENDPOINT = EndpointSpec("e", 2, 20_000_000, 4_000_000)
SERVICES = (ServiceSpec("s", restore_ns=S // 5, backend="played"),
            ServiceSpec("t", restore_ns=S // 5, backend="played", batch=2))
END_MARGIN_S = 5.0


class BrokerProcess(Process):
    """One start of a broker.

    Attributes:
        broker: the driver; None until it has read the journals.
        lock: the folder's lock, with this start's epoch.
        began: what it found of earlier starts.
    """

    world: Job

    def __init__(self, world: Job, name: str) -> None:
        super().__init__(world, name)
        self.broker: Broker | None = None
        self.journal: FileJournal | None = None
        self.spool: FileSpool | None = None
        self.checkpoints: Checkpoints | None = None
        self.peers: dict[Wire, Any] = {}
        self.file_lock = FileLock(world.folder)
        self.lock = FolderLock(world.folder, self.file_lock, world.restarts)
        self.lock.earlier_sign_ns = world.last_sign  # a file's time is the real clock's
        self.after(YIELD_S if self.lock.earlier else 0.0, self.open)

    def open(self) -> None:
        """Reads what earlier starts have left, and begins to serve."""
        try:
            self._open()
        except InvalidInput as why:
            self.end()
            self.world.start_refused(self, str(why))

    def _open(self) -> None:
        world, folder = self.world, self.world.folder
        scheduler = Scheduler(make_placer("elastic"), round(END_MARGIN_S * S))
        earlier = apply_earlier(scheduler, self.lock)
        world.laws.replayed(scheduler, earlier.kept > 0)
        self.spool = FileSpool(folder / "once", 1 << 20, 1 << 13)
        path = begin_next(folder, earlier.head)
        self.journal = FileJournal(path, world.plan.sync, lambda call: self.after(0, call),
                                   self.spool.sync, self.lock.superseded)
        self.checkpoints = Checkpoints(folder, self.journal, earlier.head, earlier.kept,
                                       earlier.replayed)
        waits = 0 <= earlier.down_s < GRACE_S + LATE_S
        settings = Settings(
            JOB, str(folder / "store"), world.plan.workers, GRACE_S, join_s=20.0,
            services=SERVICES, endpoints=(ENDPOINT,), rejoin_s=GRACE_S if waits else 0.0,
            down_s=earlier.down_s if waits else 0.0)
        self.broker = Broker(
            scheduler, self.journal, self, self, settings, self.end, self.spool, world.slurm,
            spill=FolderSpillFiles(folder / "overflow"), checkpoint=self.checkpoints.look)
        newest = world.before_start(self, waits)
        self.broker.start()
        if not newest or self.lock.superseded(now=True):  # `_check_place`
            return self.end()
        world.serves(self)
        hold(self, self.lock, self.broker, lambda: None)  # type: ignore[arg-type]  # it is a timer

    def accept(self, wire: Wire) -> None:
        """Makes a peer of a new connection."""
        broker = self.broker
        assert broker is not None
        peer = self.peers[wire] = broker.accept(wire.at_broker)
        wire.up.receive = lambda message, payload: self.receive(peer, message, payload)
        wire.up.lost = lambda reason: broker.lost(peer, reason)

    def receive(self, peer: Any, message: Any, payload: memoryview | None) -> None:
        """Gives the driver a message, and lets the laws look at it."""
        assert self.broker is not None
        self.broker.receive(peer, message, payload)

    def end(self) -> None:
        """Ends this process; what it has flushed still arrives."""
        self.alive = False
        self.world.broker_ended(self)
        self.die()

    def die(self) -> None:
        """Closes what the kernel closes when a process is gone."""
        super().die()
        fds: list[int] = []
        if self.journal is not None and self.journal._fd >= 0:
            fds.append(self.journal._fd)
            self.journal._fd = -1
        if self.spool is not None:
            fds += [self.spool._fd, *self.spool._readers.values()]
            self.spool._readers, self.spool._fd = {}, -1
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.file_lock.release()


def files_of(folder: Path) -> list[Path]:
    """The files of a job that a broker reads: journals and spool."""
    return sorted([*folder.glob("journal*"), *(folder / "once").glob("[0-9]*")])


def makes_threads(owner: Callable[[], Process | None]) -> Callable[[int], LaterThread]:
    """What storage modules take for `ThreadPoolExecutor`."""
    def make(workers: int) -> LaterThread:
        process = owner()
        assert process is not None
        thread = LaterThread(process)
        process.threads.append(thread)
        return thread
    return make
