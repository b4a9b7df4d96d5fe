"""The simulated training stage: a batch in optimizer steps, timed by the planner's own cost model.

An optimizer step takes `TrainCost.price` of its own trajectories, in the core layout plus the
data-parallel replicas that have joined for that step. The core computes the samples of a replica
that died meanwhile, and a step that failed is repeated. A micro-batch that does not divide an
optimizer step is reduced to one that does.

Invariant: one batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd

from ..planner.shapes import Layout, Request
from ..planner.train_cost import TrainCost
from .rl_faults import Fate
from .rl_rollout import After
from .rl_scenario import Scenario

Boundary = Callable[[int], int]  # takes the time, returns the GPUs that help in the step
UsableGpus = Callable[[], int]  # returns those of them whose gradients can be used at its end
Trained = Callable[[int, int, int, list[Request]], None]  # time, batch, ns without help, requests


class SimulatedTrainer:
    """The simulated core trainer. `layout` may be changed while it is not busy."""

    layout: Layout

    def __init__(self, scenario: Scenario, after: After, boundary: Boundary, used: UsableGpus,
                 trained: Trained, fate: Fate) -> None:
        self._s, self._after, self._fate = scenario, after, fate
        self._boundary, self._used, self._done = boundary, used, trained
        self.busy = False
        self.took_ns = self.lent_gpu_ns = self.gpu_busy_ns = 0

    def start(self, now: int, batch: int, requests: list[Request]) -> None:
        """Trains a batch from now on."""
        assert not self.busy, "one batch at a time"
        self.busy = True
        self._batch, self._requests, self._began = batch, requests, now
        self.lent_gpu_ns = self._alone_ns = 0
        self._left = self._s.run.train_steps
        self._step(now)

    def _step(self, now: int) -> None:
        size = len(self._requests) // self._s.run.train_steps
        first = len(self._requests) - self._left * size
        cost = TrainCost(self._s.model, self._s.hardware,
                         replace(self._s.training, batch=size, steps=1),
                         self._requests[first:first + size])
        layout = replace(self.layout, micro=gcd(self.layout.micro, size))
        alone = cost.price(layout).ns
        self._alone_ns += alone
        helpers = self._boundary(now)
        ns = alone
        if helpers:
            one = layout.tp * layout.pp
            wider = replace(layout, dp=layout.dp + helpers // one)
            ns = min(alone, cost.price(wider).ns)
        self.lent_gpu_ns += ns * helpers
        self.gpu_busy_ns += ns * (layout.gpus + helpers)
        self._helpers, self._alone = helpers, alone
        self._after(now + ns, self._step_ends)

    def _step_ends(self, now: int) -> None:
        used = self._used()
        assert used <= self._helpers, "a gradient of nobody who helped"
        whole = self.layout.gpus + self._helpers
        again = self._alone * (self._helpers - used) // whole  # the core computes the lost samples
        self.gpu_busy_ns += again * self.layout.gpus
        if not self._fate.step_fails():
            self._left -= 1
        self._after(now + again, self._step if self._left else self._end)

    def _end(self, now: int) -> None:
        self.busy = False
        self.took_ns = now - self._began
        self._done(now, self._batch, self._alone_ns, self._requests)
