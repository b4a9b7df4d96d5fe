"""Plays one plan from its beginning to its end, and tells which law was broken."""

from __future__ import annotations

import heapq
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from swarm import people
from swarm.broker import makes_threads
from swarm.job import Job
from swarm.laws import LawBroken
from swarm.plan import Plan
from swarm.strands import StrandEvent, parked
from swarm.strikes import STRIKES
from swarm.world import WorldTime
from tangram_hpc.app.broker_process import earlier_starts
from tangram_hpc.client import connection
from tangram_hpc.client.endpoints import grant_request, grants
from tangram_hpc.storage import checkpoint, folder_lock, journal, journal_segments, spool

LEDGER_CHECKS = 60  # one ledger check in so many turns


@dataclass
class Ended:
    """How a run ended.

    Attributes:
        law: the law that was broken; empty if none was. An error of the product has the name of its
            class here.
        text: what was seen.
        events: the turns that were played.
        struck: the strikes of each fault kind.
        log: the story of the run.
    """

    plan: Plan
    law: str = ""
    text: str = ""
    events: int = 0
    struck: dict[str, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


def play(plan: Plan, before_the_end: Callable[[Job], None] = lambda job: None,
         at_the_end: Callable[[Job], None] = lambda job: None) -> Ended:
    """Plays a plan in a folder of its own, on a file system in memory if there is one.

    Args:
        plan: what is played.
        before_the_end: called before everything that is open is brought to its end.
        at_the_end: called when no law was broken.
    """
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="swarm", dir=shm if shm.is_dir() else None))
    try:
        return _played_in(plan, folder, before_the_end, at_the_end)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _played_in(plan: Plan, folder: Path, before_the_end: Callable[[Job], None],
               at_the_end: Callable[[Job], None]) -> Ended:
    found = Ended(plan)
    job = Job.__new__(Job)
    ready = False
    with _world_of(plan) as adopt:
        try:
            adopt(job)
            job.__init__(plan, folder)  # type: ignore[misc]
            ready = True
            _run(job, before_the_end)
            at_the_end(job)
        except LawBroken as broken:
            found.law, found.text = broken.law, str(broken)
        except Exception as error:  # noqa: BLE001 - any error in the product ends the seed
            found.law = type(error).__name__
            found.text = ("" if ready else "while the world was set up: ") + "".join(
                traceback.format_exception(error)[-4:])
        finally:
            known = vars(job)  # a world that was not set up lacks some of these
            found.events, found.struck = known.get("events", 0), dict(known.get("struck", {}))
            found.log = known.get("log", [])
            for process in list(known.get("processes", ())):
                process.alive = False
                process.die()
    return found


def _run(job: Job, before_the_end: Callable[[Job], None]) -> None:
    people.all_are_there(job)
    due = [(job.next_strike(kind, 0), kind) for kind in STRIKES if kind in job.plan.rates]
    heapq.heapify(due)
    for turn_number in range(job.plan.turns):
        while due and due[0][0] <= turn_number:
            kind = due[0][1]
            heapq.heapreplace(due, (job.next_strike(kind, turn_number), kind))
            job.struck[kind] += 1
            STRIKES[kind](job)
        if job.rng.random() < job.plan.acts:
            people.act(job)
        elif not job.step() or job.rng.random() < 0.02:
            job.pass_time()
        if turn_number % LEDGER_CHECKS == 0:
            job.ledger().check()
    before_the_end(job)
    people.come_to_the_end(job)
    job.laws.check(job.events_of_journal())


@contextmanager
def _world_of(plan: Plan) -> Iterator[Callable[[Job], None]]:
    """Lets the modules of the product use the clock, the threads and the disk of a world."""
    replaced: list[tuple[object, str, object]] = []

    def replace(module: object, name: str, value: object) -> None:
        replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def adopt(world: Job) -> None:
        proxy = _Late(world)
        clock = WorldTime(proxy, lambda seconds: parked(lambda: False, seconds))  # type: ignore
        for module in (connection, grants, grant_request, folder_lock, earlier_starts):
            replace(module, "time", clock)
        disk = _LateDisk(world)
        for module in (journal, spool, journal_segments):
            replace(module, "os", disk)
        replace(checkpoint, "replace_file",
                lambda *args, **kwargs: world.disk.replace_file(*args, **kwargs))
        threads = makes_threads(lambda: world.current)
        for module in (journal, checkpoint):
            replace(module, "ThreadPoolExecutor", threads)
        replace(checkpoint, "EVENTS_MIN", plan.checkpoint)
        replace(connection, "threading", SimpleNamespace(
            get_ident=lambda: 0, Event=StrandEvent,  # strands share one thread
            Thread=lambda target, name, daemon: _ClientThread(world, target)))

    try:
        yield adopt
    finally:
        for module, name, value in reversed(replaced):
            setattr(module, name, value)


class _Late:
    """Reads the clock of a world that is not there yet when modules are given it."""

    def __init__(self, world: Job) -> None:
        self._world = world

    @property
    def now(self) -> int:
        return self._world.now

    @property
    def wall_ns(self) -> int:
        return self._world.wall_ns


class _LateDisk:
    def __init__(self, world: Job) -> None:
        self._world = world

    def __getattr__(self, name: str) -> object:
        return getattr(self._world.disk, name)


class _ClientThread:
    """What a client's connection takes for `threading.Thread`."""

    def __init__(self, world: Job, target: Callable[[], None]) -> None:
        self._world, self._target = world, target

    def start(self) -> None:
        assert self._world.current is not None
        self._world.current.strand(self._target)

    def join(self, timeout_s: float) -> None:
        """The world goes on; nobody waits here."""

