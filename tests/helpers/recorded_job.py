"""Journals of jobs that the simulator played: the records of a run without running it for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tangram_hpc.domain import event as ev
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
