"""What the broker does with each answer of Slurm. The Slurm here is a fake that answers what a test
says; the real one is in test_slurm_elastic.py, the modelled one in test_elastic_sim.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tangram_hpc.broker.satellites import LINGER_NS, Satellites, SatelliteScripts
from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.allocation import AllocPolicy, SatelliteShape
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.slurm import JobOrder, JobRef, JobView, SlurmCalls
from tangram_hpc.domain.states import AllocState
from tangram_hpc.ports import SlurmRejected, SlurmTransient
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler

S = 10**9
SHAPE = SatelliteShape("spare", "cpu", cpus=8, mem_mib=600, gpus=2, time_ns=90 * S)
POLICY = AllocPolicy(max_nodes=9, max_core_ns=10**18, shapes=(SHAPE,), backoff_ns=60 * S)


class FakeSlurm:
    """Notes what it is asked; the test answers."""

    def __init__(self) -> None:
        self.submitted: list[tuple[JobOrder, Callable[[Any], None]]] = []
        self.queried: list[tuple[tuple[int, ...], tuple[str, ...], Callable[[Any], None]]] = []
        self.cancelled: list[tuple[tuple[JobRef, ...], Callable[[Any], None]]] = []

    def submit(self, order: JobOrder, then: Callable[[Any], None]) -> None:
        self.submitted.append((order, then))

    def query(self, jobs: Any, then: Callable[[Any], None], names: Any = ()) -> None:
        self.queried.append((tuple(jobs), tuple(names), then))

    def cancel(self, jobs: Any, then: Callable[[Any], None]) -> None:
        self.cancelled.append((tuple(jobs), then))

    def comment(self, job: int, text: str, then: Callable[[Any], None]) -> None:
        raise AssertionError("nobody asked for a Comment")

    def calls(self) -> SlurmCalls:
        return SlurmCalls("fake")

    def close(self) -> None:
        pass


class Rig:
    """The scheduler's allocations and their driver, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now, self.told_to_end = 1000 * S, []
        self.scheduler, self.slurm = Scheduler(make_placer("elastic")), FakeSlurm()
        self.allocs = self.scheduler.ledger.allocs
        self.sat = self.satellites()
        for fact in (ev.BrokerStarted(self.now, "7", "elastic", "none"),
                     ev.AllocationsAllowed(self.now, POLICY)):
            self.happen(fact)

    def satellites(self) -> Satellites:
        return Satellites(
            "7", self.slurm, SatelliteScripts({"spare": "#!/bin/sh\n"}, {"A": "b"}, "/log/%j"),
            self.scheduler.ledger, self, self, self.happen,
            lambda node, why: self.told_to_end.append((node, why)))

    def begin_again(self) -> None:
        """Starts the next broker, with what the journal knows."""
        self.sat = self.satellites()
        self.happen(ev.BrokerStarted(self.now, "7", "elastic", "none"))
        self.sat.start()

    def now_ns(self) -> int:
        return self.now

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        call()

    def happen(self, fact: ev.Event) -> None:
        for event in self.scheduler.consequences(fact):
            for order in self.scheduler.handle(event):
                if isinstance(order, de.AskAllocation):
                    self.sat.ask(order)
                elif isinstance(order, de.EndAllocation):
                    self.sat.end(order)

    def asked(self) -> int:
        """Decides on a satellite and submits its request."""
        number = self.allocs.next_alloc
        self.happen(ev.AllocationAsked(self.now, number, SHAPE, "a test wants it"))
        return number

    def join(self, allocation: str) -> int:
        node = self.scheduler.ledger.next_node
        self.happen(ev.NodeJoined(self.now, node, NodeSpec(
            f"n{node}", "h", tuple(range(8)), 100, allocation=allocation)))
        return node

    def watch(self, seconds: float) -> None:
        self.now += round(seconds * S)
        self.sat.watch()

    def state(self, alloc: int) -> AllocState | None:
        entry = self.allocs.entries.get(alloc)
        return entry.state if entry is not None else None


def view(job: int, state: str, **fields: Any) -> JobView:
    return JobView(job, -1, state, **fields)


def test_a_satellite_request_is_submitted_with_the_options_of_its_shape() -> None:
    rig = Rig()
    rig.asked()
    ((order, answer),) = rig.slurm.submitted
    assert dict(order.options) == {
        "job-name": "tangram-7-s1", "no-requeue": "", "nodes": "1", "cpus-per-task": "8",
        "time": "1:30", "partition": "cpu", "mem": "600M", "gres": "gpu:2", "output": "/log/%j"}
    assert order.environ == (("A", "b"),)
    answer(55)
    assert rig.allocs.entries[1].job == "55" and rig.state(1) is AllocState.PENDING


def test_a_refused_satellite_shape_is_kept_with_its_reason() -> None:
    rig = Rig()
    alloc = rig.asked()
    rig.slurm.submitted[0][1](SlurmRejected("sbatch: invalid account"))
    assert rig.state(alloc) is None
    rejected = rig.allocs.rejected["spare"]
    assert rejected.why == "sbatch: invalid account" and rejected.until == rig.now + 60 * S
    assert rig.allocs.left_alone(SHAPE, rig.now)


def test_a_transient_slurm_error_is_retried_and_counts_as_no_refusal() -> None:
    rig = Rig()
    alloc = rig.asked()
    rig.slurm.submitted[0][1](SlurmTransient("controller away", again_ns=rig.now + 20 * S))
    rig.watch(10)
    assert len(rig.slurm.submitted) == 1
    rig.watch(11)
    assert len(rig.slurm.submitted) == 2 and rig.state(alloc) is AllocState.ASKED
    assert not rig.allocs.rejected


def test_an_uncertain_submission_is_looked_up_by_name_before_a_retry() -> None:
    """Slurm may have created the job although the answer was lost."""
    rig = Rig()
    first, second = rig.asked(), rig.asked()
    for _, answer in rig.slurm.submitted:
        answer(SlurmTransient("timed out", unsure=True))
    rig.watch(2)
    ((jobs, names, answer),) = rig.slurm.queried
    assert jobs == () and names == ("tangram-7-s1", "tangram-7-s2")
    answer((view(61, "PENDING", name="tangram-7-s1"),))
    assert rig.allocs.entries[first].job == "61"
    rig.watch(2)
    assert len(rig.slurm.submitted) == 3 and rig.state(second) is AllocState.ASKED


def test_a_request_withdrawn_before_slurm_answered_is_cancelled_with_the_answer() -> None:
    rig = Rig()
    alloc = rig.asked()
    rig.happen(ev.AllocationReleased(rig.now, alloc, "not needed"))
    assert rig.state(alloc) is AllocState.ENDING and not rig.slurm.cancelled
    rig.slurm.submitted[0][1](62)
    assert rig.slurm.cancelled[0][0] == (JobRef(62),)


@pytest.mark.parametrize("unsure", [False, True])
def test_a_withdrawn_request_that_slurm_never_took_is_not_retried(unsure: bool) -> None:
    """The request no longer counts against the user's bounds either."""
    rig = Rig()
    alloc = rig.asked()
    rig.happen(ev.AllocationReleased(rig.now, alloc, "not needed"))
    rig.slurm.submitted[0][1](SlurmTransient("away", again_ns=rig.now + 20 * S, unsure=unsure))
    rig.watch(60)
    if unsure:
        rig.slurm.queried[0][2](())
        rig.watch(2)
    assert len(rig.slurm.submitted) == 1 and rig.state(alloc) is None
    assert not rig.allocs.nodes_live() and not rig.allocs.rejected


def test_a_request_withdrawn_by_an_earlier_broker_is_looked_up_and_cancelled() -> None:
    rig = Rig()
    made, never = rig.asked(), rig.asked()
    for alloc in (made, never):
        rig.happen(ev.AllocationReleased(rig.now, alloc, "not needed"))
    rig.begin_again()
    rig.watch(2)
    ((_, names, answer),) = rig.slurm.queried
    assert names == ("tangram-7-s1", "tangram-7-s2")
    answer((view(71, "PENDING", name="tangram-7-s1"),))
    assert rig.slurm.cancelled[0][0] == (JobRef(71),)
    rig.watch(2)
    assert len(rig.slurm.submitted) == 2 and rig.state(never) is None


def test_a_satellite_cancelled_by_an_earlier_broker_counts_as_no_refusal() -> None:
    rig = Rig()
    alloc = rig.asked()
    rig.slurm.submitted[0][1](72)
    rig.sat.stop()
    rig.begin_again()
    rig.watch(2)
    rig.slurm.queried[0][2]((view(72, "CANCELLED"),))
    assert rig.state(alloc) is None and not rig.allocs.rejected


def test_a_request_withdrawn_before_its_retry_is_dropped() -> None:
    rig = Rig()
    alloc = rig.asked()
    rig.slurm.submitted[0][1](SlurmTransient("budget", again_ns=rig.now + 20 * S))
    rig.happen(ev.AllocationReleased(rig.now, alloc, "not needed"))
    assert rig.state(alloc) is None and not rig.slurm.cancelled
    rig.watch(60)
    assert len(rig.slurm.submitted) == 1


@pytest.mark.parametrize("passes, stays", [
    ("Priority", "QOSMaxWallDurationPerJobLimit"),
    ("QOSMaxJobsPerUserLimit", "PartitionTimeLimit"),
    ("AssocMaxJobsLimit", "AssocMaxNodePerJobLimit"),
    ("AssocGrpCpuLimit", "AssocGrpCPUMinutesLimit"),
    ("AssocGrpCPURunMinutesLimit", "QOSGrpWallLimit"),
    ("QOSGrpNodeLimit", "PartitionNodeLimit"),
    ("MaxGRESPerAccount", "QOSMaxGRESPerJob"),
    ("QOSMaxCpuPerUserLimit", "QOSMinGRES"),
    ("Resources", "JobHeldAdmin"),
    ("JobArrayTaskLimit", "MaxMemPerLimit"),
    ("BeginTime", "launch failed requeued held"),
    ("None", "Job's QOS not permitted to use this partition (gpu allows prod not normal)")])
def test_a_pending_satellite_is_withdrawn_for_what_does_not_pass_by_itself(
        passes: str, stays: str) -> None:
    """A limit of what runs at one time passes when another job ends."""
    rig = Rig()
    alloc = rig.asked()
    rig.slurm.submitted[0][1](63)
    rig.watch(2)
    rig.slurm.queried[0][2]((view(63, "PENDING", reason=passes),))
    assert rig.sat.reasons[alloc] == passes and rig.state(alloc) is AllocState.PENDING
    assert "spare" not in rig.allocs.rejected and not rig.slurm.cancelled
    rig.watch(30)
    rig.slurm.queried[1][2]((view(63, "PENDING", reason=stays),))
    assert rig.state(alloc) is AllocState.ENDING
    assert rig.allocs.rejected["spare"].why == f"Slurm holds it back: {stays}"
    assert rig.slurm.cancelled[0][0] == (JobRef(63),)


def test_a_satellites_start_time_is_slurms_and_queries_then_stop() -> None:
    rig = Rig()
    alloc = rig.asked()
    rig.slurm.submitted[0][1](64)
    rig.join("64")
    rig.watch(2)
    rig.slurm.queried[0][2]((view(64, "RUNNING", start_ns=rig.now - 9 * S),))
    assert rig.allocs.entries[alloc].since == rig.now - 9 * S
    for _ in range(20):
        rig.watch(60)
    assert len(rig.slurm.queried) == 1, "no allocation is undecided"


@pytest.mark.parametrize(("state", "reason", "shown"), [
    ("CONFIGURING", "", "CONFIGURING"), ("RUNNING", "Prolog", "Prolog")])
def test_a_satellite_whose_nodes_boot_still_waits_and_starts_when_they_are_ready(
        state: str, reason: str, shown: str) -> None:
    """Where a site turns idle nodes off, they boot for minutes: longer than a running satellite
    may be without a worker."""
    rig = Rig()
    alloc = rig.asked()
    rig.slurm.submitted[0][1](64)
    for k in range(8):
        rig.watch(POLICY.join_ns / S)
        rig.slurm.queried[k][2]((view(64, state, reason=reason, start_ns=rig.now - 200 * S),))
        assert rig.state(alloc) is AllocState.PENDING and rig.sat.reasons[alloc] == shown
    rig.watch(POLICY.join_ns / S)
    rig.slurm.queried[8][2]((view(64, "RUNNING", start_ns=rig.now - 3 * S),))
    entry = rig.allocs.entries[alloc]
    assert (entry.state, entry.held_at, entry.since) == (
        AllocState.RUNNING, rig.now, rig.now - 3 * S)
    assert alloc not in rig.sat.reasons and not rig.allocs.rejected and not rig.slurm.cancelled


def test_a_released_satellite_ends_by_itself_or_is_cancelled_after_a_while() -> None:
    rig = Rig()
    alloc = rig.asked()
    rig.slurm.submitted[0][1](65)
    node = rig.join("65")
    rig.happen(ev.NodeDraining(rig.now, node, "idle"))
    rig.happen(ev.AllocationReleased(rig.now, alloc, "idle"))
    assert rig.told_to_end == [(node, "idle")] and not rig.slurm.cancelled
    rig.happen(ev.NodeLost(rig.now, node, "as told"))
    rig.watch(2)
    rig.slurm.queried[0][2]((view(65, "COMPLETING"),))
    assert not rig.slurm.cancelled
    rig.watch(LINGER_NS / S)
    rig.slurm.queried[1][2]((view(65, "RUNNING"),))
    assert rig.slurm.cancelled[0][0] == (JobRef(65),)
    rig.watch(30)
    ended = rig.now - 4 * S
    rig.slurm.queried[2][2]((view(65, "CANCELLED", start_ns=ended - 50 * S, end_ns=ended),))
    assert rig.state(alloc) is None
    assert rig.allocs.ended_core_ns == 8 * 50 * S, "by Slurm's times"


def test_a_satellite_that_ends_before_its_worker_joined_counts_as_refused() -> None:
    rig = Rig()
    alloc = rig.asked()
    rig.slurm.submitted[0][1](66)
    rig.watch(2)
    rig.slurm.queried[0][2]((view(66, "FAILED", reason="NonZeroExitCode"),))
    assert rig.state(alloc) is None
    assert "66 ended before a worker joined: FAILED" in rig.allocs.rejected["spare"].why


def test_a_component_is_cancelled_by_its_offset() -> None:
    rig = Rig()
    node = rig.join("7+1")
    rig.join("7+0")
    (own, component) = sorted(rig.allocs.entries.values(), key=lambda e: -e.own)
    assert own.job == "7+0" and component.job == "7+1" and not component.own
    rig.happen(ev.AllocationReleased(rig.now, component.alloc, "idle"))
    assert rig.told_to_end == [(node, "idle")]
    assert rig.slurm.cancelled[0][0] == (JobRef(7, 1),)
    rig.slurm.cancelled[0][1](SlurmTransient("away"))
    rig.watch(2)
    assert len(rig.slurm.cancelled) == 2, "a failed scancel is repeated"
    rig.slurm.cancelled[1][1](None)
    assert rig.state(component.alloc) is None


def test_a_refused_scancel_is_reported_and_not_repeated() -> None:
    rig = Rig()
    rig.join("7+1")
    rig.happen(ev.AllocationReleased(rig.now, 1, "idle"))
    rig.slurm.cancelled[0][1](SlurmRejected("Access/permission denied"))
    for _ in range(20):
        rig.watch(60)
    assert len(rig.slurm.cancelled) == 1 and rig.sat.troubles == "Access/permission denied"


def test_pending_satellites_are_cancelled_when_the_broker_stops() -> None:
    rig = Rig()
    rig.asked()
    rig.asked()
    rig.slurm.submitted[0][1](67)
    rig.slurm.submitted[1][1](68)
    rig.join("68")
    rig.sat.stop()
    assert [refs for refs, _ in rig.slurm.cancelled] == [(JobRef(67),)]
    assert rig.sat.cancelling
    rig.slurm.cancelled[0][1](None)
    assert not rig.sat.cancelling
