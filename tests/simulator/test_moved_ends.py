"""Time limits that change while a job runs: Slurm is asked again, and nodes drain by its answer.

The real drivers of broker and worker run on the simulator's clock; the real Slurm is in
test_slurm_site_nodes.py.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.builders import World, started
from test_elastic_sim import AT_ONCE, POLICY, Kept, two_bursts
from test_elastic_sim import SMALL as BASE

from tangram_hpc.broker.broker_settings import Settings
from tangram_hpc.broker.driver import Broker
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.allocation import AllocPolicy, SatelliteShape
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.session import SessionSpec
from tangram_hpc.domain.slurm import JobView, SlurmCalls
from tangram_hpc.domain.states import ActionState, NodeState, SessionState
from tangram_hpc.errors import InvalidInput
from tangram_hpc.ports import SlurmTransient
from tangram_hpc.protocol import message as ms
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.simulator.event_queue import EventQueue
from tangram_hpc.simulator.machine import Machine
from tangram_hpc.simulator.message_world import Growth
from tangram_hpc.simulator.network import (
    CYCLE,
    DELIVERY,
    FLUSH,
    MemoryJournal,
    SimulatedLink,
    SimulatedTimer,
)
from tangram_hpc.simulator.workload import WorkAction
from tangram_hpc.storage.journal import read_journal
from tangram_hpc.worker.driver import WorkerDriver

S = 10**9
MARGIN = 60


class Limits:
    """A Slurm port that knows when allocations end: `ends` by `JOB` or `JOB+N`, in seconds. It
    answers after `late_s` (None: never), and notes when it was queried."""

    def __init__(self, event_queue: EventQueue, ends: dict[str, float]) -> None:
        self.event_queue, self.ends, self.asked = event_queue, ends, list[float]()
        self.late_s: float | None = 1.0
        self.away = False

    def query(self, jobs: Any, then: Callable[[Any], None], names: Any = ()) -> None:
        self.asked.append(self.event_queue.now / S)
        if self.late_s is not None:
            self.event_queue.put(self.event_queue.now + round(self.late_s * S), DELIVERY,
                            lambda: then(SlurmTransient("away") if self.away else self.rows(jobs)))

    def rows(self, jobs: Any) -> tuple[JobView, ...]:
        found = []
        for name, end in self.ends.items():
            job, _, component = name.partition("+")
            if int(job) in jobs:
                found.append(JobView(int(job), int(component or -1), "RUNNING",
                                     end_ns=round(end * S)))
        return tuple(found)

    def calls(self) -> SlurmCalls:
        return SlurmCalls("limits", queries=len(self.asked))


class Job:
    """A broker, its workers and one client, all real, from second 0 on."""

    def __init__(self, ends: dict[str, float], margin_s: float = MARGIN, **settings: Any) -> None:
        self.event_queue = EventQueue()
        self.work_s = 1.0
        self.event_queue.now = S  # a time of 0 means that nobody knows it
        self.slurm = Limits(self.event_queue, dict(ends))
        self.scheduler = Scheduler(make_placer("elastic"), round(margin_s * S))
        self.ledger = self.scheduler.ledger
        self.events: list[ev.Event] = []
        self.told: dict[int, ActionState] = {}
        self.broker = Broker(
            self.scheduler, MemoryJournal(self.events.append), self.event_queue,
            SimulatedTimer(self.event_queue, CYCLE), Settings("7", "", len(ends), **settings),
            lambda: None,
            slurm=self.slurm)  # type: ignore[arg-type]
        self.broker.start()
        for name, end in ends.items():
            self.join(name, end)
        down, self.up = self.link(), self.link()
        down.receive = self.heard
        peer = self.broker.accept(down)
        self.up.receive = lambda message, payload: self.broker.receive(peer, message, payload)
        self.up.send(ms.ClientHello(ms.PROTOCOL_VERSION, "7", "uid"))
        self.up.flush()
        self.counter = 0
        self.until(2)

    def link(self) -> SimulatedLink:
        return SimulatedLink(self.event_queue, 0, random.Random(0))

    def join(self, allocation: str, end_s: float, **fields: Any) -> None:
        down, up = self.link(), self.link()
        spec = NodeSpec(f"n{allocation}", "h", (0, 1), 1024, allocation=allocation,
                        ends_at_ns=round(end_s * S), backends=("model",), untrusted=("model",),
                        **fields)
        worker = WorkerDriver("7", spec, up, SimulatedTimer(self.event_queue, FLUSH),
                              lambda reports, welcome: Machine(self.event_queue, reports,
                                                               self.work),
                              lambda why: None)
        down.receive = worker.receive
        peer = self.broker.accept(down)
        up.receive = lambda message, payload: self.broker.receive(peer, message, payload)
        worker.start()

    def work(self, action: int) -> WorkAction:
        return WorkAction(name="x", resource="cpu", degrees=(1,), work_s=self.work_s)

    def heard(self, message: ms.AnyMessage, payload: memoryview | None) -> None:
        if isinstance(message, ms.ActionResult):
            self.told[message.action] = message.outcome.state

    def say(self, message: ms.Message, payload: bytes | None = None) -> None:
        self.up.send(message, payload)
        self.up.flush()
        self.until(self.event_queue.now / S + 0.001)

    def id(self) -> int:
        self.counter += 1
        return mint(1, self.counter)

    def session(self, **fields: Any) -> int:
        spec = SessionSpec(self.id(), "s", 10, **fields)
        self.say(ms.RequestSession(spec))
        return spec.id

    def submit(self, session: int = 0) -> int:
        action = Action(self.id(), "x", Kind.EXEC, session=session)
        self.say(ms.Submit(action), b"")
        return action.id

    def until(self, seconds: float) -> None:
        """Lets time pass."""
        end = round(seconds * S)
        while (at := self.event_queue.next_at()) is not None and at <= end:
            self.event_queue.now = at
            while (item := self.event_queue.take()) is not None:
                item()
            self.ledger.check()
        self.event_queue.now = end

    def states(self) -> list[NodeState]:
        return [node.state for node in self.ledger.nodes.values()]

    def drained(self) -> list[float]:
        return [e.at / S for e in self.events if isinstance(e, ev.NodeDraining)]


def test_a_limit_that_was_extended_drains_nothing() -> None:
    """Actions of an open session continue past the end that the worker had reported, up to the new
    end."""
    job = Job({"7": 1000})
    session = job.session()
    job.until(400)
    job.slurm.ends["7"] = 2000  # scontrol update TimeLimit
    done = []
    for at in range(900, 1001, 10):
        job.until(at)
        done.append(job.submit(session))
    job.until(1005)
    assert job.states() == [NodeState.UP] and job.drained() == []
    assert [job.told.get(action) for action in done] == [ActionState.COMPLETED] * len(done)
    job.until(1999)
    assert len(job.drained()) == 1 and 2000 - MARGIN <= job.drained()[0] < 2000 - MARGIN + 2


def test_an_extension_in_the_last_seconds_before_the_drain_prevents_it() -> None:
    """The drain waits for the answer to the last query, so no idle session is closed in vain."""
    job = Job({"7": 1000})
    job.slurm.late_s = 9.0
    session = job.session()
    job.until(930)
    asked = len(job.slurm.asked)
    job.slurm.ends["7"] = 2000
    job.until(1000)
    assert len(job.slurm.asked) == asked + 1
    assert job.states() == [NodeState.UP] and job.drained() == []
    assert job.ledger.sessions[session].state is SessionState.IDLE


@pytest.mark.parametrize("late_s", [None, 40.0])
def test_a_drain_is_delayed_only_for_seconds_when_slurm_does_not_answer(
        late_s: float | None) -> None:
    job = Job({"7": 1000})
    job.slurm.late_s = late_s
    job.until(990)
    assert len(job.drained()) == 1 and 1000 - MARGIN <= job.drained()[0] <= 1000 - MARGIN / 2


def test_a_drain_is_undone_when_the_time_limit_is_extended_during_it() -> None:
    """Running actions continue, waiting actions start here again, and the busy session is kept."""
    job = Job({"7": 1000})
    job.work_s = 200.0
    idle, busy = job.session(), job.session()
    job.until(930)
    runs, waits = job.submit(busy), job.submit(busy)
    job.until(950)
    assert job.states() == [NodeState.DRAINING] and idle not in job.ledger.sessions
    job.slurm.ends["7"] = 3000
    job.until(1000)
    assert job.states() == [NodeState.UP] and job.ledger.nodes[1].draining == ""
    assert job.ledger.sessions[busy].state is SessionState.BUSY
    again = job.session()
    job.until(1400)
    assert job.told == {runs: ActionState.COMPLETED, waits: ActionState.COMPLETED}
    assert job.ledger.sessions[again].state is SessionState.IDLE


def test_a_limit_that_was_shortened_drains_in_time() -> None:
    """A job of an hour is cut to 40 minutes in its 10th minute. The broker learns this at half time
    and drains at the new margin."""
    job = Job({"7": 3600})
    job.until(600)
    job.slurm.ends["7"] = 2400
    job.until(2400)
    assert len(job.drained()) == 1 and 2400 - MARGIN <= job.drained()[0] < 2400 - MARGIN + 2


def test_a_limit_cut_to_less_than_the_margin_drains_at_once() -> None:
    job = Job({"7": 3600})
    job.until(1760)
    job.slurm.ends["7"] = 1830
    job.until(1790)
    assert job.states() == [NodeState.DRAINED]


@pytest.mark.parametrize(("seconds", "most"), [(600, 7), (3600, 10), (86400, 33)])
def test_a_job_queries_its_time_limit_a_handful_of_times(seconds: int, most: int) -> None:
    """Never two queries within the budget, one just before the margin, and none per action."""
    job = Job({"7": seconds})
    for _ in range(50):
        job.submit()
    job.until(seconds)
    asked = job.slurm.asked
    assert 2 <= len(asked) <= most, asked
    assert all(b - a >= 30 for a, b in pairwise(asked)), asked
    assert any(seconds - MARGIN - 6 <= at < seconds - MARGIN for at in asked), asked


def test_each_allocation_drains_at_its_own_time_limit() -> None:
    """Satellites and components of a heterogeneous job share one query."""
    job = Job({"7+0": 1000, "7+1": 1000, "12": 1000})
    job.until(100)
    job.slurm.ends |= {"7+1": 3000, "12": 2000}
    job.until(990)
    assert job.states() == [NodeState.DRAINED, NodeState.UP, NodeState.UP]
    job.until(1990)
    assert job.states() == [NodeState.DRAINED, NodeState.UP, NodeState.DRAINED]
    assert len(job.slurm.asked) <= 30


def test_an_end_given_by_tangram_worker_end_is_not_replaced_by_slurms() -> None:
    """The end is given by `tangram worker --end`."""
    job = Job({})
    job.slurm.ends["7"] = 5000
    job.join("7", 1000, end_by_user=True)
    job.until(1000)
    assert job.states() == [NodeState.DRAINED] and job.slurm.asked == []


def test_a_drain_of_the_whole_broker_outlasts_an_extended_time_limit() -> None:
    """The broker was told to drain while its nodes drained for their time limit."""
    job = Job({"7": 1000})
    job.until(960)
    assert job.states() == [NodeState.DRAINED]
    job.broker.drain("the job is about to end")
    job.slurm.ends["7"] = 3000
    job.until(1100)
    assert job.states() == [NodeState.DRAINED]


def test_a_worker_that_rejoins_with_its_old_end_keeps_the_extended_one() -> None:
    job = Job({"7": 1000})
    job.slurm.ends["7"] = 3000
    job.until(600)
    job.join("7", 1000)
    job.until(601)
    assert [n.spec.ends_at_ns for n in job.ledger.nodes.values()] == [3000 * S] * 2
    job.join("7", 5000)  # a new start of its job has another end
    job.until(602)
    assert job.ledger.nodes[3].spec.ends_at_ns == 5000 * S


def test_a_node_drains_at_its_known_end_when_slurm_is_unreachable() -> None:
    job = Job({"7": 1000})
    job.slurm.away = True
    job.until(990)
    assert len(job.drained()) == 1 and 1000 - MARGIN <= job.drained()[0] <= 1000 - MARGIN / 2


def test_a_session_migration_continues_when_the_drain_is_undone() -> None:
    w = World("elastic")
    w.ledger.margin_ns = 10 * S
    for number, end in ((1, 100), (2, 1000)):
        w.happen(ev.NodeJoined(0, number, NodeSpec(
            f"n{number}", "h", (0, 1), 1024, backends=("model",), untrusted=("model",),
            ends_at_ns=end * S, allocation=str(number))))
    w.happen(ev.NodesComplete(0, 2))
    session = w.session(movable=True)
    w.plan()
    w.happen(ev.SessionReady(w.now, session))
    home = w.ledger.sessions[session].node
    w.now = (90 if home == 1 else 990) * S
    w.plan()
    if home == 1:
        assert w.ledger.sessions[session].state is SessionState.MOVING
        w.happen(ev.AllocationEndTold(w.now, "1", 2000 * S))
        w.happen(ev.SessionPacked(w.now, session, "digest"))
        w.plan()
        assert w.ledger.nodes[1].state is NodeState.UP
        assert w.ledger.sessions[session].state is SessionState.OPENING
    waits = w.submit()
    assert started(w.plan()) == [waits]


def test_a_replay_of_changed_time_limits_gives_the_same_nodes() -> None:
    job = Job({"7": 1000})
    job.until(960)
    job.slurm.ends["7"] = 3000
    job.until(2000)
    replayed = Scheduler(make_placer("elastic"), MARGIN * S)
    for event in job.events:
        replayed.handle(event)
    replayed.ledger.check()
    for ours, theirs in zip(job.ledger.nodes.values(), replayed.ledger.nodes.values(), strict=True):
        assert (ours.state, ours.lends_until, ours.spec) == (
            theirs.state, theirs.lends_until, theirs.spec)
    replayed.handle(ev.BrokerStarted(2000 * S, "7", "elastic", "none"))
    assert replayed.ledger.told_ends == {}  # a requeued job has another end


def test_journals_of_older_supported_versions_are_read(tmp_path: Path) -> None:
    """Version 5 lacks the events of changed time limits; unsupported versions are refused."""
    path = tmp_path / "journal"
    facts = [ev.BrokerStarted(1, "7", "elastic", "none"), ev.NodeDraining(2, 1, "it ends")]
    body = msgspec.msgpack.encode(facts)
    record = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
    path.write_bytes(b"TGJRNL\x05\0" + record)
    assert list(read_journal(path)) == facts
    for version in (4, ev.JOURNAL_VERSION + 1):
        path.write_bytes(b"TGJRNL" + bytes([version, 0]) + record)
        with pytest.raises(InvalidInput, match="not a journal of version"):
            list(read_journal(path))


@pytest.mark.parametrize("limit_s", [3600, 30])
def test_satellites_follow_changed_time_limits_in_the_simulator(limit_s: int) -> None:
    """The satellites' time limit of 200 s is changed while they run."""
    shape = SatelliteShape("spare", "cpu", cpus=8, mem_mib=600, time_ns=200 * S)
    policy = AllocPolicy(**{f: getattr(POLICY, f) for f in POLICY.__struct_fields__}
                         | {"shapes": (shape,), "idle_ns": 0})
    world = Kept(two_bursts(3, 300.0), BASE, make_placer("elastic"), False, seed=1, check=True,
                 growth=Growth(policy, AT_ONCE))
    slurm = world.slurm
    assert slurm is not None

    def change() -> None:
        for job in slurm.jobs_run():
            slurm.change_limit(job, limit_s * S)

    world.event_queue.put(40 * S, CYCLE, change)
    world.run()
    assert slurm.jobs_run()
    told = [e for e in world.kept if isinstance(e, ev.AllocationEndTold)]
    ends = [e.at / S for e in world.kept if isinstance(e, ev.NodeLost) and "TIMEOUT" in e.reason]
    drains = [e.at / S for e in world.kept if isinstance(e, ev.NodeDraining) and e.for_end]
    if limit_s == 3600:
        assert told and not ends and not drains
    else:  # it was over before anybody could ask
        assert 40 in ends
