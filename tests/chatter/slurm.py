"""Slurm as the model plays it: it grants, refuses, forgets and ends satellites, or is silent."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatter.job import JOB, S
from tangram_hpc.domain.allocation import AllocPolicy, SatelliteShape
from tangram_hpc.domain.slurm import JobView, SlurmCalls
from tangram_hpc.ports import SlurmRejected, SlurmTransient

if TYPE_CHECKING:
    from chatter.run import Run

SHAPES = (SatelliteShape("cpu", cpus=4, mem_mib=1000, time_ns=40 * S, component=""),
          SatelliteShape("gpu", cpus=2, gpus=4, mem_mib=1000, time_ns=20 * S, component="big"))
POLICY = AllocPolicy(max_nodes=3, target_ns=S // 10, grow_after_ns=0, arrive_ns=S, idle_ns=2 * S,
                     patience_ns=10 * S, join_ns=5 * S, backoff_ns=S, backoff_max_ns=8 * S,
                     shapes=SHAPES)


@dataclass
class Satellite:
    """A job that the broker has submitted."""

    job: int
    name: str
    shape: SatelliteShape
    state: str = "PENDING"
    start_ns: int = 0
    end_ns: int = 0


class PlayedSlurm:
    """What the broker asks Slurm (`ports.Slurm`).

    Attributes:
        ends_at_ns: when the broker's own job ends; 0 for never.
        satellites: the jobs that it knows, by number.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self.ends_at_ns = 0
        self.satellites: dict[int, Satellite] = {}

    def policy(self, rng: random.Random) -> AllocPolicy | None:
        """Draws what the broker may request."""
        return POLICY if rng.random() < 0.4 else None

    def _answer(self, then: Callable[[Any], None], found: Callable[[], Any]) -> None:
        run = self.run
        assert run is not None
        if run.rng.random() < 0.1:
            run.after(0.3, lambda: then(SlurmTransient("no answer")))
        else:
            run.after(run.rng.choice((0.0, 0.1, 2.0)), lambda: then(found()))

    def submit(self, order: Any, then: Callable[[Any], None]) -> None:
        """Takes a satellite, or refuses it."""
        run = self.run
        assert run is not None
        options = dict(order.options)
        if run.rng.random() < 0.1:
            return self._answer(then, lambda: SlurmRejected("a limit"))
        number = 100 + len(self.satellites)
        shape = next(s for s in SHAPES if s.name == order.script)
        self.satellites[number] = Satellite(number, options["job-name"], shape)
        self._answer(then, lambda: number)

    def query(self, jobs: Sequence[int], then: Callable[[Any], None],
              names: Sequence[str] = ()) -> None:
        """Tells the states of jobs."""
        def rows() -> tuple[JobView, ...]:
            found = [JobView(s.job, -1, s.state, "Resources" if s.state == "PENDING" else "",
                             s.name, start_ns=s.start_ns, end_ns=s.end_ns)
                     for s in self.satellites.values() if s.job in jobs or s.name in names]
            own = JobView(int(JOB), -1, "RUNNING", end_ns=self.ends_at_ns)
            return (*found, own) if int(JOB) in jobs else tuple(found)
        self._answer(then, rows)

    def cancel(self, jobs: Sequence[Any], then: Callable[[Any], None]) -> None:
        """Ends jobs."""
        def done() -> None:
            for each in jobs:
                if each.job in self.satellites:
                    self.end(self.satellites[each.job])
        self._answer(then, done)

    def comment(self, job: int, text: str, then: Callable[[Any], None]) -> None:
        self._answer(then, lambda: None)

    def calls(self) -> SlurmCalls:
        return SlurmCalls()

    def close(self) -> None:
        pass

    # ---- what happens in Slurm ----

    def end(self, satellite: Satellite) -> None:
        """Ends a satellite and its worker."""
        run = self.run
        assert run is not None
        satellite.state, satellite.end_ns = "COMPLETED", run.now
        for worker in run.workers:
            if worker.spec.allocation == str(satellite.job) and not worker.gone:
                worker.lose("its job ended")

    def act(self) -> None:
        """Lets something happen to one satellite, or moves the end of the job."""
        run = self.run
        assert run is not None
        if self.ends_at_ns and run.rng.random() < 0.2:
            self.ends_at_ns += run.rng.choice((-S, S, 5 * S))
        open_ones = [s for s in self.satellites.values() if s.state in ("PENDING", "RUNNING")]
        if not open_ones:
            return
        one = run.rng.choice(open_ones)
        if one.state == "PENDING":
            one.state, one.start_ns = "RUNNING", run.now
            one.end_ns = run.now + one.shape.time_ns
            if run.rng.random() < 0.8:
                run.satellite(one)
        elif run.rng.random() < 0.1 or run.now >= one.end_ns:
            self.end(one)
