"""A job that is played in one process, with everything real that may grow.

Real are the broker's driver with its scheduler, journal, checkpoints, spool, spill files and store,
on a real folder, the workers' drivers, and all frames. Played are the clock, the connections, the
clients, and what runs on the nodes: an action takes a millisecond of simulated time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from growth import Sample, folder_size

from tangram_hpc.broker.broker_settings import Settings
from tangram_hpc.broker.driver import Broker
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import EndpointSpec
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.ports import Reports
from tangram_hpc.protocol import message as ms
from tangram_hpc.protocol import payload as pl
from tangram_hpc.protocol.liveness import PING_S
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.simulator.event_queue import EventQueue
from tangram_hpc.simulator.network import CYCLE, FLUSH, SimulatedLink, SimulatedTimer
from tangram_hpc.storage.checkpoint import Checkpoints
from tangram_hpc.storage.folder_lock import FileLock, FolderLock
from tangram_hpc.storage.journal import FileJournal
from tangram_hpc.storage.journal_segments import JobJournal, begin_next, journals
from tangram_hpc.storage.spill_files import FolderSpillFiles
from tangram_hpc.storage.spool import FileSpool
from tangram_hpc.storage.store import FolderStore
from tangram_hpc.worker.driver import WorkerDriver

S, MS = 10**9, 10**6
GRACE_S = 30.0
JOB = "bounds"
_ACK_AFTER, _ACK_BYTES = 128, 1 << 20  # as `client/connection.py` acknowledges


class PlayedNode:
    """What runs on one node: every action ends after a millisecond with the job's result.

    It serves `ports.Executor` for the real worker driver. A result of more than the inline limit
    goes through the store, as a worker puts it there.
    """

    def __init__(self, job: PlayedJob, reports: Reports) -> None:
        self._job, self._reports = job, reports
        self._runs: dict[int, ms.StartAttempt] = {}
        self._streams: dict[int, int] = {}  # the session of each

    def open_session(self, spec: SessionSpec) -> None:
        self._reports.session_up(spec.id)

    def close_session(self, session: int) -> None:
        for lease, order in list(self._runs.items()):
            if order.action.session == session:
                self.kill(lease, ActionState.CANCELLED, "its session was closed")
        for stream in [one for one, of in self._streams.items() if of == session]:
            del self._streams[stream]
            self._reports.stream(ms.StreamEnded(stream, "the session was closed"))
        self._reports.session_down(session, "")

    def pack_session(self, session: int) -> None:
        self._reports.session_packed(session, "")

    def snapshot_reports(self) -> tuple[ms.SnapshotReport, ...]:
        return ()

    def order_snapshot(self, order: ms.SnapshotOrder) -> None:
        pass

    def prepare_service(self, spec: Any) -> None:
        pass

    def start(self, order: ms.StartAttempt, payload: memoryview) -> None:
        self._runs[order.lease] = order
        self._reports.started(order.lease)
        if order.action.name.startswith("terminal"):
            self._reports.input_credit(order.lease, 1 << 16)
        self._job.queue.put(self._job.queue.now + MS, 0, lambda: self._end(order.lease))

    def follow(self, order: ms.StartAttempt, payload: memoryview) -> bool:
        return False

    def take_back(self, lease: int) -> bool:
        return False

    def kill(self, lease: int, state: ActionState, reason: str) -> None:
        if self._runs.pop(lease, None) is not None:
            self._reports.finished(lease, Outcome(state, reason=reason), None, True)

    def give_input(self, lease: int, kind: int, data: bytes, number: int, other: int) -> None:
        pass

    def carry(self, message: ms.StreamMessage, data: bytes) -> None:
        if isinstance(message, ms.StreamEnded):
            self._streams.pop(message.stream, None)
        elif isinstance(message, ms.OpenStream):
            self._streams[message.stream] = message.session
            self._reports.stream(ms.StreamData(message.stream), b"hello")

    def resize(self, lease: int, cores: tuple[int, ...]) -> None:
        pass

    def close(self) -> None:
        self._runs.clear()

    def _end(self, lease: int) -> None:
        order = self._runs.pop(lease, None)
        if order is None:
            return
        data, job = self._job.result, self._job
        if order.action.name == "large":
            owner = f"{order.action.id >> 32}.{order.action.id & 0xFFFFFFFF}.{lease}"
            data = pl.encode(pl.Stored(job.store.put(job.large, owner), len(job.large)))
        self._reports.finished(lease, Outcome(ActionState.COMPLETED, exec_ns=MS), data, True)


class PlayedClient:
    """A client that submits, reads results and acknowledges them as a real one does.

    Attributes:
        number: the number that the broker gave it.
        open: its actions that have not ended.
        ended: how many of its actions have ended.
        up: its open sessions.
        link: carries its messages.
    """

    def __init__(self, job: PlayedJob, uid: str) -> None:
        self.job, self.uid, self.number, self._count = job, uid, 0, 0
        self.open, self.up, self.ended = dict[int, str](), dict[int, None](), 0
        self._acks, self._ack_bytes = list[int](), 0
        self.granted: list[tuple[int, int]] = []
        self.connect()

    def connect(self) -> None:
        """Says hello over a new connection."""
        down, self.link = self.job.link(), self.job.link()
        self.down = down
        down.receive = self._receive
        self.peer = peer = self.job.broker.accept(down)
        self.link.receive = lambda message, payload: self.job.broker.receive(peer, message, payload)
        self.say(ms.ClientHello(ms.PROTOCOL_VERSION, JOB, self.uid))
        self.job.run(0.01)

    def leave(self, bye: bool) -> None:
        """Ends the connection, with a goodbye or without."""
        if bye:
            self.say(ms.Bye())
            self.job.run(0.01)
        self.link.cut()
        self.down.cut()
        self.job.broker.lost(self.peer, "connection closed by the peer")

    def say(self, message: ms.Message, payload: bytes | None = None) -> None:
        self.link.send(message, payload)
        self.link.flush()

    def new_id(self) -> int:
        self._count += 1
        return mint(self.number, self._count)

    def submit(self, name: str, call: bytes = b"call", **fields: Any) -> int:
        """Submits one action; it leaves with the next flush of the link."""
        action = Action(self.new_id(), name, **fields)
        self.open[action.id] = name
        self.link.send(ms.Submit(action), call)
        return action.id

    def open_session(self, **fields: Any) -> int:
        spec = SessionSpec(self.new_id(), mem_mib=16, **fields)
        self.say(ms.RequestSession(spec))
        return spec.id

    def forget(self, prefix: str) -> None:
        """Forgets idempotency keys."""
        self.say(ms.Forget(self.new_id(), (), prefix))

    def settle(self) -> None:
        """Lets time pass until all of its actions have ended; acknowledges them."""
        self.link.flush()
        for _ in range(100_000):
            if not self.open:
                break
            self.job.run(0.002)
        assert not self.open, f"{len(self.open)} actions do not end: {self.job.broker}"
        self.acknowledge()

    def acknowledge(self) -> None:
        if self._acks:
            self.say(ms.Ack(tuple(self._acks)))
            self._acks.clear()
            self._ack_bytes = 0

    def _receive(self, message: Any, payload: memoryview | None) -> None:
        match message:
            case ms.Welcome(client=number):
                self.number = number
            case ms.ActionResult(action=action):
                name = self.open.pop(action, "")
                self.ended += bool(name)
                if name == "large" and payload is not None:
                    told = pl.decode(bytes(payload))
                    assert isinstance(told, pl.Stored)
                    self.job.store.drop(told.digest)
                self._acks.append(action)
                self._ack_bytes += len(payload) if payload is not None else 0
                if len(self._acks) >= _ACK_AFTER or self._ack_bytes >= _ACK_BYTES:
                    self.acknowledge()
            case ms.Rejected(id=number):
                self.open.pop(number, None)
            case ms.Granted(action=action, lease=lease):
                self.granted.append((action, lease))
            case ms.SessionUp(session=session):
                self.up[session] = None
            case ms.SessionDown(session=session):
                self.up.pop(session, None)


class PlayedJob:
    """The broker of one job on a real folder, with everything around it.

    Args:
        folder: the job's folder.
        workers: how many workers join, with 32 CPUs each.
        once_bytes: the most that the spool may take.

    Attributes:
        broker: the real driver.
        queue: the clock and all that is to happen.
        store: the job's store.
        result: what every action returns.
        large: what an action named "large" returns, through the store.
        clients: the clients that send pings.
    """

    def __init__(self, folder: Path, workers: int, once_bytes: int = 64 << 20) -> None:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        self.folder, self.queue, self.rng = folder, EventQueue(), random.Random(1)
        self.queue.now = 10**18
        self.store, self.result, self.large = FolderStore(folder / "store"), b"done", bytes(1 << 17)
        lock = FolderLock(folder, FileLock(folder))
        head = JobJournal(folder).next_head(lock.epoch)
        self.spool = FileSpool(folder / "once", once_bytes)
        self.journal = FileJournal(begin_next(folder, head), "none", lambda call: call(),
                                   self.spool.sync)
        self.checkpoints = Checkpoints(folder, self.journal, head)
        self.spill = FolderSpillFiles(folder / "overflow")
        self.pauses = 0
        endpoints = (EndpointSpec("api", concurrency=8),)
        self.broker = Broker(
            Scheduler(make_placer("elastic")), self.journal, self.queue,
            SimulatedTimer(self.queue, CYCLE),
            Settings(JOB, str(folder / "store"), workers, grace_s=GRACE_S, endpoints=endpoints),
            lambda: None, self.spool, spill=self.spill, sweep=self.store.sweep,
            checkpoint=self.checkpoints.look)
        self.broker.start()
        self.clients: list[PlayedClient] = []
        self._alive: dict[str, Callable[[str], None]] = {}
        for n in range(workers):
            self.join_worker(f"n{n}")
        self.run(0.1)
        self._ping()

    def link(self) -> SimulatedLink:
        return SimulatedLink(self.queue, 0, self.rng)

    def join_worker(self, name: str) -> None:
        """Lets a worker join as a new node."""
        down, up = self.link(), self.link()
        spec = NodeSpec(name, name, tuple(range(32)), 1 << 16, backends=("model",),
                        untrusted=("model",))
        worker = WorkerDriver(JOB, spec, up, SimulatedTimer(self.queue, FLUSH),
                              lambda reports, welcome: PlayedNode(self, reports),
                              lambda why: None, 0.0, f"{name}-{self.queue.now}")
        down.receive = worker.receive
        peer = self.broker.accept(down)
        up.receive = lambda message, payload: self.broker.receive(peer, message, payload)
        worker.start()

        def die(why: str) -> None:
            up.cut()
            down.cut()
            worker.lost(why)
            self.broker.lost(peer, why)
        self._alive[name] = die

    def lose_worker(self, name: str) -> None:
        self._alive.pop(name)("connection closed by the peer")

    def client(self, uid: str) -> PlayedClient:
        """Lets a client join, which sends pings from now on."""
        client = PlayedClient(self, uid)
        self.clients.append(client)
        return client

    def _ping(self) -> None:
        for client in self.clients:
            client.say(ms.Ping(0))
        self.queue.put(self.queue.now + int(PING_S * S), FLUSH, self._ping)

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        until = self.queue.now + int(seconds * S)
        while (at := self.queue.next_at()) is not None and at <= until:
            self.queue.now = at
            self.queue.take()()
        self.queue.now = until

    def look(self) -> Sample:
        """Returns what is in the job's folder."""
        store, spool = folder_size(self.folder / "store"), folder_size(self.folder / "once")
        kept = journals(self.folder)
        plain = self.journal.path.stat().st_size
        return {"journal": sum(p.stat().st_size for p in kept), "segments": len(kept),
                "journal_open": plain, "store": store[0], "store_files": store[1],
                "spool": spool[0], "spool_files": spool[1],
                "overflow": folder_size(self.folder / "overflow")[0],
                "events": self.journal.count}

    def close(self) -> None:
        self.broker.stop("the bench is over")
        self.checkpoints.close()
        self.spill.close()
        self.spool.close(remove=False)
