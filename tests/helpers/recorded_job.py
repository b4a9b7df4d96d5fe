"""Journals of jobs that nobody ran: the simulator played them, or they are made up."""

from __future__ import annotations

import heapq
import random
from pathlib import Path
from typing import Any

import msgspec

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.run_records import RunRecords
from tangram_hpc.simulator.workload import Cluster, Workload
from tangram_hpc.simulator.world import SimulationWorld
from tangram_hpc.storage.journal_format import SegmentHead, beginning
from tangram_hpc.storage.record_file import framed

BEGAN_NS = 1_790_000_000 * 10**9  # the simulated clock's zero, in ns since the epoch
JOB = "4711"


def played(work: Workload, cluster: Cluster, placer: str, oracle: bool = True, stop: bool = True
           ) -> tuple[RunRecords, list[ev.Event]]:
    """The results of a simulated run, and its events as those of a job."""
    world = SimulationWorld(work, cluster, make_placer(placer), oracle)
    world.events = []
    run = world.run()
    told: list[Any] = [ev.BrokerStarted(BEGAN_NS, JOB, placer, "none", "ada")]
    told += [ev.moved(event, event.at + BEGAN_NS) for event in world.events]
    if stop:
        told.append(ev.BrokerStopped(told[-1].at, "the batch script has ended"))
    return run, told


def write_job(home: Path, events: list[ev.Event], job: str = JOB) -> Path:
    """Writes a job's journal below a TANGRAM_HOME; returns the job's folder."""
    folder = home / "jobs" / job
    folder.mkdir(parents=True)
    batches = (events[at:at + 500] for at in range(0, len(events), 500))
    (folder / "journal").write_bytes(beginning(SegmentHead(1)) + b"".join(
        framed(msgspec.msgpack.encode(batch)) for batch in batches))
    return folder


def busy_job(actions: int, nodes: int = 8, cores: int = 64, classes: int = 20) -> list[ev.Event]:
    """The events of a job whose cores run one-CPU actions one after another, without a simulation.
    """
    rng, told = random.Random(7), list[ev.Event]()
    told.append(ev.BrokerStarted(BEGAN_NS, JOB, "fcfs:1", "none", "ada"))
    told.append(ev.ClientJoined(BEGAN_NS, 1, "uid", "trainer", 0, 1, "socket"))
    told += [ev.NodeJoined(BEGAN_NS, n + 1, NodeSpec(f"n{n}", f"n{n}", tuple(range(cores)), 10**6))
             for n in range(nodes)]
    free = [(BEGAN_NS + rng.randrange(10**9), unit) for unit in range(nodes * cores)]
    heapq.heapify(free)
    later: list[tuple[int, int, ev.Event]] = []
    for number in range(1, actions + 1):
        at, unit = heapq.heappop(free)
        action = Action(mint(1, number), f"class-{number % classes}",
                        trajectory=f"t{number // 50}")
        end = at + rng.randrange(10**7, 3 * 10**9)
        heapq.heappush(free, (end, unit))
        outcome = Outcome(ActionState.COMPLETED, exec_ns=end - at - 10**6, cpu_ns=(end - at) // 2)
        for order, event in enumerate((
                ev.ActionSubmitted(max(BEGAN_NS, at - rng.randrange(10**9)), action),
                ev.LeaseGranted(at, number, action.id, unit // cores + 1, 1, (unit % cores,)),
                ev.LeaseFinished(end, number, outcome, True))):
            later.append((event.at, order, event))
    told += [event for _, _, event in sorted(later, key=lambda each: each[:2])]
    return [*told, ev.BrokerStopped(told[-1].at, "the batch script has ended")]
