"""The job of one seed: who takes part, who starts whom again, and how everything ends.

`Job` is the world with its people: a supervisor that starts brokers, Slurm, workers that come back
as new nodes, and clients. Its laws see everything.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarm.broker import END_MARGIN_S, BrokerProcess, files_of
from swarm.client import ClientProcess, OpenedSession
from swarm.laws import LawBroken, Laws
from swarm.plan import Plan
from swarm.wires import Wire
from swarm.worker import WorkerProcess
from swarm.world import Process, S, World
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.slurm import JobView, SlurmCalls
from tangram_hpc.errors import InvalidInput
from tangram_hpc.ports import SlurmTransient
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.scheduler.state.ledger import Ledger
from tangram_hpc.storage.journal_check import read_spool
from tangram_hpc.storage.journal_repair import repair_job
from tangram_hpc.storage.journal_segments import JobJournal

_LATER = "not a journal of a version that this release reads"
LONG_S = 15.0  # a peer that cannot be heard for so long may be given up


class PlayedSlurm:
    """What a broker asks Slurm (`ports.Slurm`): only when its own job ends.

    Attributes:
        ends_at_ns: when the job ends, by the wall clock; 0 for never.
    """

    def __init__(self, job: Job) -> None:
        self._job, self.ends_at_ns = job, 0

    def query(self, jobs: Sequence[int], then: Callable[[Any], None], names: Sequence[str] = ()
              ) -> None:
        asker = self._job.current
        assert asker is not None
        silent = self._job.strikes("slurm_silent")
        rows = (JobView(7, -1, "RUNNING", end_ns=self.ends_at_ns),)
        asker.after(30.0 if silent else 0.2,
                    lambda: then(SlurmTransient("no answer") if silent else rows))

    def calls(self) -> SlurmCalls:
        return SlurmCalls()

    def close(self) -> None:
        pass


class Job(World):
    """One run, from its beginning to its end.

    Attributes:
        brokers: starts of the broker that live: the one that serves, and superseded ones.
        workers, clients: those that live or lived last, in their places.
        restarts: how often the Slurm job was requeued.
        last_sign: when a broker last showed that it lived, by the wall clock (ns).
        sessions_opened: the specification of each session that was ever requested.
        sessions_of_users: what the users know of them.
        restarted_for_good: whether a broker began that did not wait for the earlier one's peers.
        log: what struck when, for a person.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, folder)
        self.slurm = PlayedSlurm(self)
        self.laws = Laws(self, round(END_MARGIN_S * S))
        self.counter, self._names = itertools.count(1), itertools.count(1)
        self.worker_uids = itertools.count()
        self.restarts, self.last_sign = 0, 0
        self.restarted_for_good = False
        self.brokers: list[BrokerProcess] = []
        self.sessions_opened: dict[int, SessionSpec] = {}
        self.sessions_of_users: dict[int, OpenedSession] = {}
        self.log: list[str] = []
        self.supervisor = Process(self, "supervisor")
        self._starting = False
        self._last_broker: BrokerProcess | None = None
        self._before_flip: tuple[Path, int, int, list[Any], dict[str, int]] | None = None
        self.flip_next = False
        if plan.rates.keys() & {"slurm_silent", "drain_node"}:
            self.slurm.ends_at_ns = self.now + 240 * S
        self.start_broker()
        self.workers = [self._worker(f"w{n}") for n in range(plan.workers)]
        self.clients = [self._client() for _ in range(plan.clients)]

    # ---- for the laws ----

    def scheduler(self) -> Scheduler:
        """The scheduler of the newest broker that has read its journals."""
        assert self._last_broker is not None and self._last_broker.broker is not None
        return self._last_broker.broker.scheduler

    def ledger(self) -> Ledger:
        """The ledger of the newest broker that has read its journals."""
        return self.scheduler().ledger

    def living_workers(self) -> list[WorkerProcess]:
        """The workers that live."""
        return [worker for worker in self.workers if worker.alive]

    def may_lose(self, client: ClientProcess) -> bool:
        """Whether a client had a cause to lose its broker."""
        return client.may_lose

    def client_lives(self, session: int) -> bool:
        """Whether the client that opened a session lives and works."""
        return any(session in client.sessions and client.alive and not client.may_lose
                   for client in self.clients)

    def story(self, action: int) -> str:
        """What the last broker knows of an action."""
        ledger = self.ledger()
        entry = ledger.actions.get(action)
        return "unknown to the broker" if entry is None else f"{entry}"[:600]

    def note(self, text: str) -> None:
        """Adds a line to the run's story."""
        self.log.append(f"{(self.now - 1_700_000_000 * S) / S:9.3f}  {text}")

    # ---- brokers ----

    def start_broker(self) -> None:
        """Starts a broker, unless one serves or begins to."""
        self._starting = False
        if any(broker.alive and not broker.stopped_until > self.now for broker in self.brokers):
            return
        if self.flip_next and self._before_flip is None and not any(
                broker.alive for broker in self.brokers):
            self._flip_bit()
        self.serving = None
        self.note("a broker starts")
        self.brokers.append(BrokerProcess(self, f"b{next(self._names)}"))

    def start_later(self, delay_s: float) -> None:
        """Starts a broker after a while."""
        if not self._starting:
            self._starting = True
            self.supervisor.after(delay_s, self.start_broker)

    def before_start(self, broker: BrokerProcess, waits: bool) -> bool:
        """A broker has read the journals and is about to begin; returns whether it is the newest.
        """
        last = self._last_broker
        if last is not None and last.lock.epoch > broker.lock.epoch:
            return False
        self._last_broker = broker
        if self._before_flip is not None:  # the flip was where nothing is read
            self._compare_with_flip("a flipped bit changes nothing silently")
            self._flip_back()
        if not waits:
            self.restarted_for_good = True
            self.blame_all()
        return True

    def serves(self, broker: BrokerProcess) -> None:
        """A broker accepts connections from now on."""
        self.serving = broker
        self.note(f"{broker.name} serves")

    def start_refused(self, broker: BrokerProcess, why: str) -> None:
        """A broker refuses to start: a file must have been damaged, and is repaired."""
        self.note(f"{broker.name} refused to start: {why[:100]}")
        if self.disk.failed:
            self.disk.failed = False
            return self.start_later(0.5)
        if self._before_flip is None:
            raise LawBroken("a broker starts again", why)
        try:
            repair_job(self.folder)
        except InvalidInput as error:
            if _LATER not in str(error):
                raise
            self._flip_back()  # it may be a file of a later release: a person must look
            return self.start_later(0.1)
        self._compare_with_flip("one flipped bit is set right")
        self._before_flip = None
        self.start_later(0.1)

    def broker_died(self, process: Process) -> None:
        """A broker was killed within a step."""
        assert isinstance(process, BrokerProcess)
        self.kill_broker(process, "killed within a step")

    def broker_failed(self, process: Process, error: OSError) -> None:
        """A broker's disk is full or fails: it says its last words and ends."""
        assert isinstance(process, BrokerProcess)
        self.note(f"{process.name}: {error}")
        self.disk.failed = False
        if process.broker is not None:
            process.broker.say_last(str(error))
            self.blame_all()
        process.end()

    def broker_ended(self, process: BrokerProcess) -> None:
        """A broker has ended by itself; what it had flushed still arrives."""
        self._gone(process)
        for wire in self.wires:
            if wire.broker is process:
                wire.down.end("closed")

    def kill_broker(self, process: BrokerProcess, why: str) -> None:
        """Kills a broker; of what was on its way a part arrives."""
        if not process.alive:
            return
        self.note(f"{process.name} {why}")
        process.alive = False
        self._gone(process)
        for wire in self.wires:
            if wire.broker is process:
                wire.cut("its broker was killed")
        process.die()

    def _gone(self, process: BrokerProcess) -> None:
        if process in self.brokers:
            self.brokers.remove(process)
            for client in self.clients:
                client.broker_gone(process.lock.epoch)
        if self.serving is process:
            self.serving = None
        if not any(broker.alive and not broker.stopped_until > self.now
                   for broker in self.brokers):
            if process is self._last_broker or not process.lock._lost:
                self.last_sign = self.now + self.wall_ns
            self.start_later(self.rng.choice((0.05, 0.5, 2.0, 5.0)))

    def supersede_within(self) -> None:
        """Another broker takes over while the running one is stopped within a write."""
        before = self.current
        self.note(f"{before.name if before else ''} is superseded within a write")
        self.last_sign = self.now + self.wall_ns
        self.serving = None
        process = BrokerProcess(self, f"b{next(self._names)}")
        self.brokers.append(process)
        self.now += int(0.15 * S)
        process._timers.clear()
        self.do(process, process.open)

    def _flip_bit(self) -> None:
        """Flips one bit of a file that the next broker reads."""
        self.flip_next = False
        rng = self.stream("bit_flip")
        files = [path for path in files_of(self.folder) if path.stat().st_size]
        path = rng.choice(files)
        at, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
        self._before_flip = path, at, bit, self.events_of_journal(), read_spool(self.folder).newest
        self.note(f"bit {bit} of byte {at} of {path.name} flips")
        _flip(path, at, bit)

    def _flip_back(self) -> None:
        assert self._before_flip is not None
        path, at, bit, _, _ = self._before_flip
        if path.exists():  # a broker that starts removes a spool that it has copied
            _flip(path, at, bit)
        self._before_flip = None

    def events_of_journal(self) -> list[Any]:
        """All events that count, as the next broker would read them."""
        return list(JobJournal(self.folder).events())

    def _compare_with_flip(self, law: str) -> None:
        assert self._before_flip is not None
        path, at, bit, events, names = self._before_flip
        where = f"bit {bit} of byte {at} of {path.name}"
        if read_spool(self.folder).newest != names:
            raise LawBroken(law, f"{where}: the spool has other names")
        found = self.events_of_journal()
        if path.parent == self.folder and at < 8:  # of a magic; what is lost then is told
            return
        if found[: len(events)] != events:
            raise LawBroken(law, f"{where}: {len(found)} events of {len(events)}")

    # ---- workers and clients ----

    def _worker(self, name: str) -> WorkerProcess:
        return WorkerProcess(self, name, self.slurm.ends_at_ns)

    def worker_ended(self, worker: WorkerProcess) -> None:
        """A worker has ended by itself: its node lends again, as a new one."""
        self.note(f"{worker.name} ended")
        self.blame(worker)
        self.replace_worker(worker)

    def replace_worker(self, worker: WorkerProcess) -> None:
        """Ends a worker's process and starts another one in its place."""
        worker.die()
        if worker.wire is not None:
            worker.wire.cut("its worker has ended")
        self.workers[self.workers.index(worker)] = self._worker(worker.name)

    def blame(self, worker: WorkerProcess) -> None:
        """The loss of this worker has a cause from now on."""
        if worker.driver is not None:
            self.laws.blamed.add(worker.driver._uid)

    def dial(self, peer: Process) -> Wire:
        """Connects a peer with the broker that serves; see `World.dial`. One that must do so while
        the broker stands still for long may lose it.
        """
        if self.serving is not None and self.serving.stopped_until - self.now >= LONG_S * S:
            if isinstance(peer, ClientProcess):
                peer.may_lose = True
            elif isinstance(peer, WorkerProcess):
                self.blame(peer)
        return super().dial(peer)

    def blame_all(self) -> None:
        """The loss of every worker and client that lives has a cause from now on."""
        for worker in self.living_workers():
            self.blame(worker)
        for client in self.clients:
            client.may_lose = True

    def _client(self) -> ClientProcess:
        return ClientProcess(self, f"c{next(self._names)}")

    def replace_client(self, client: ClientProcess) -> None:
        """Ends a client's process and starts another one in its place."""
        client.die()
        if client.wire is not None:
            client.wire.cut("its client has ended")
        self.clients[self.clients.index(client)] = self._client()


def _flip(path: Path, at: int, bit: int) -> None:
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), at)

