"""A modelled Slurm, which implements `ports.Slurm` for brokers that request satellites in a
simulation.

A request waits for a time that is drawn from the scenario's seed, and then until enough nodes are
free for it. Nothing is refused except partitions that do not exist. A job ends when its last worker
has ended, when it is cancelled, or at its time limit. Queries are answered at once and cost
nothing: limiting them is the task of the real port.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..domain.node import NodeSpec
from ..domain.slurm import JobOrder, JobRef, JobView, SlurmCalls
from ..ports import SlurmFailure, SlurmRejected
from .event_queue import EventQueue

LATER = 4  # event priority of Slurm's answers: at equal times a cycle of the broker comes first
_FIRST_JOB = 1001


@dataclass(frozen=True)
class SlurmQueueModel:
    """How the modelled Slurm treats requests.

    Attributes:
        wait_ns: A request waits for at least this time and for at most twice this time.
        nodes: After that a request waits until satellites would hold at most this many nodes, its
            own included.
        partitions: The partitions that exist; empty for any.
    """

    wait_ns: int = 0
    nodes: int = 1 << 20
    partitions: tuple[str, ...] = ()


@dataclass(slots=True)
class _Job:
    number: int
    order: dict[str, str]
    component: str
    state: str = "PENDING"
    ready: bool = False  # its waiting time is over
    start: int = 0
    limit: int = 0  # time limit in ns, once it runs
    end: int = 0
    hosts: list[str] = field(default_factory=list)

    @property
    def ends_at(self) -> int:
        """When the job ended or its time limit ends it, in ns; 0 while it waits."""
        return self.end or (self.start + self.limit if self.start else 0)

    @property
    def nodes(self) -> int:
        """How many nodes it asks for."""
        return int(self.order["nodes"])


class ModelSlurm:
    """See `ports.Slurm`.

    Args:
        event_queue: The clock and the events of the simulation.
        queue: How requests are treated.
        seed: Seed from which waiting times are drawn.
        join: Starts a worker on a node with this spec.
        leave: Kills the worker on the node of this name; the second argument says why.
    """

    def __init__(self, event_queue: EventQueue, queue: SlurmQueueModel, seed: int,
                 join: Callable[[NodeSpec], None], leave: Callable[[str, str], None]) -> None:
        self._event_queue, self._queue, self._rng = event_queue, queue, random.Random(seed)
        self._join, self._leave = join, leave
        self._jobs: dict[int, _Job] = {}
        self._calls = dict.fromkeys(("submits", "queries", "cancels", "comments", "refused"), 0)

    def submit(self, order: JobOrder, then: Callable[[int | SlurmFailure], None]) -> None:
        """See `ports.Slurm`."""
        self._calls["submits"] += 1
        options = dict(order.options)
        partition = options.get("partition", "")
        if self._queue.partitions and partition not in self._queue.partitions:
            self._calls["refused"] += 1
            why = SlurmRejected(f"invalid partition specified: {partition}")
            self._soon(lambda: then(why))
            return
        job = _Job(_FIRST_JOB + len(self._jobs), options, order.script)
        self._jobs[job.number] = job
        wait = self._queue.wait_ns
        late = self._rng.randrange(wait, 2 * wait) if wait else 0
        self._event_queue.put(self._event_queue.now + late, LATER, lambda: self._waited(job))
        self._soon(lambda: then(job.number))

    def query(self, jobs: Sequence[int],
              then: Callable[[tuple[JobView, ...] | SlurmFailure], None],
              names: Sequence[str] = ()) -> None:
        """See `ports.Slurm`."""
        self._calls["queries"] += 1
        rows = tuple(JobView(j.number, -1, j.state, name=j.order["job-name"], start_ns=j.start,
                             end_ns=j.ends_at) for j in self._jobs.values()
                     if j.number in jobs or j.order["job-name"] in names)
        self._soon(lambda: then(rows))

    def cancel(self, jobs: Sequence[JobRef],
               then: Callable[[SlurmFailure | None], None]) -> None:
        """See `ports.Slurm`."""
        self._calls["cancels"] += 1
        for ref in jobs:
            self._end(self._jobs[ref.job], "CANCELLED")
        self._soon(lambda: then(None))

    def comment(self, job: int, text: str, then: Callable[[SlurmFailure | None], None]) -> None:
        """See `ports.Slurm`."""
        self._calls["comments"] += 1
        self._soon(lambda: then(None))

    def calls(self) -> SlurmCalls:
        """See `ports.Slurm`."""
        told = self._calls
        return SlurmCalls("model", told["submits"], told["queries"], told["cancels"],
                          told["comments"], refused=told["refused"])

    def close(self) -> None:
        """See `ports.Slurm`."""

    def change_limit(self, job: int, limit_ns: int) -> None:
        """Changes the time limit of a running job. As after `scontrol update`, nobody is notified.
        """
        self._limit(self._jobs[job], limit_ns)

    def worker_ended(self, host: str) -> None:
        """A worker has ended by itself; with its last worker the job ends."""
        for job in self._jobs.values():
            if host in job.hosts:
                job.hosts.remove(host)
                if not job.hosts:
                    self._end(job, "COMPLETED")

    def held_ns(self) -> int:
        """Core-ns that all jobs together have held until now."""
        return sum(self.jobs_run().values())

    def jobs_run(self) -> dict[int, int]:
        """Core-ns that each started job has held until now, by its number."""
        now = self._event_queue.now
        return {j.number: j.nodes * int(j.order["cpus-per-task"]) * ((j.end or now) - j.start)
                for j in self._jobs.values() if j.start}

    def _soon(self, call: Callable[[], None]) -> None:
        self._event_queue.put(self._event_queue.now, LATER, call)

    def _waited(self, job: _Job) -> None:
        job.ready = True
        self._start_those_that_fit()

    def _start_those_that_fit(self) -> None:
        used = sum(j.nodes for j in self._jobs.values() if j.state == "RUNNING")
        for job in self._jobs.values():
            if job.state == "PENDING" and job.ready and used + job.nodes <= self._queue.nodes:
                used += job.nodes
                self._run(job)

    def _run(self, job: _Job) -> None:
        job.state, job.start = "RUNNING", self._event_queue.now
        minutes, _, seconds = job.order["time"].partition(":")
        self._limit(job, (int(minutes) * 60 + int(seconds)) * 10**9)
        gpus = int(job.order.get("gres", "0").rpartition(":")[2])
        for i in range(job.nodes):
            host = f"s{job.number}" if job.nodes == 1 else f"s{job.number}-{i}"
            job.hosts.append(host)
            self._join(NodeSpec(
                host, host, tuple(range(int(job.order["cpus-per-task"]))),
                int(job.order.get("mem", "65536M")[:-1]), tuple(range(gpus)), job.component,
                ends_at_ns=job.ends_at, backends=("model",), untrusted=("model",),
                allocation=str(job.number)))

    def _limit(self, job: _Job, limit_ns: int) -> None:
        job.limit = limit_ns
        at = max(self._event_queue.now, job.ends_at)
        self._event_queue.put(at, LATER, lambda: self._end_late(job))

    def _end_late(self, job: _Job) -> None:
        if not job.end and self._event_queue.now >= job.ends_at:
            self._end(job, "TIMEOUT")

    def _end(self, job: _Job, state: str) -> None:
        if job.state not in ("PENDING", "RUNNING"):
            return
        job.state, job.end = state, self._event_queue.now
        for host in job.hosts:
            self._leave(host, f"its job {job.number} ended: {state}")
        job.hosts = []
        self._start_those_that_fit()
