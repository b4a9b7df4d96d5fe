"""The asynchronous RL pipeline on paper: rollout and training side by side, and GPUs between them.

Law: one clock, events in order of time and then of making; batches are trained in order, each once;
batch n rolls out only while at most `staleness` older batches are not trained; a batch's rollout
ends with its last trajectory and the next begins after it, so a step takes the longer of both
stages, as in the published formula. No GPU is in two stages. The planner, the router, C-MLFQ and
the hybrid pool are the core's own objects.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.cmlfq import CausalTree, Cmlfq
from ..core.planner.rollout_cost import RolloutCost
from ..core.planner.shapes import Request
from .rl_lend import Lending
from .rl_lengths import Source, Trajectory
from .rl_rollout import Rollouts
from .rl_routing import Bucketing, Mlfq, play
from .rl_scenario import Scenario
from .rl_systems import CMLFQ, Shares, Splitter, System
from .rl_train import Trainer

_SECOND = 10**9


@dataclass
class Step:
    """What one batch took. Times in seconds."""

    batch: int
    mean_tokens: float
    generated: int
    train_gpus: int
    rollout_gpus: int
    degrees: str
    rollout_s: float = 0.0
    p90_share: float = 0.0  # of the rollout time, after which 90 % of the trajectories had ended
    train_s: float = 0.0
    trained_at_s: float = 0.0
    lent_gpu_s: float = 0.0
    switched: bool = False


@dataclass
class Played:
    """A system's whole run."""

    system: System
    steps: list[Step] = field(default_factory=list)
    warmup: int = 0
    moved_share: float = 0.0  # tokens of context moved, over tokens generated
    gpu_busy: float = 0.0  # of rollout engines and training, over all GPU time

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens that were trained, a second, without the warm-up."""
        began = self.steps[self.warmup - 1].trained_at_s if self.warmup else 0.0
        rest = self.steps[self.warmup:]
        return sum(s.generated for s in rest) / (rest[-1].trained_at_s - began)

    @property
    def hours(self) -> float:
        """Of the whole run."""
        return self.steps[-1].trained_at_s / 3600


class Pipeline:
    """One run of one system."""

    def __init__(self, scenario: Scenario, system: System) -> None:
        self._s, self._system = scenario, system
        self._source = Source(scenario.lengths, scenario.run.seed)
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._made = 0
        before = self._batch(0, -1)  # what is known before the run
        first = [request_of(t) for t in before]
        self._splitter = Splitter(scenario, system, first)
        self._cost = RolloutCost(scenario.model, scenario.hardware, scenario.rollout)
        self._mean_context = sum(r.prompt + r.generated // 2 for r in first) // len(first)
        self._rollouts = Rollouts(self._cost, scenario.router, scenario.tree,
                                  self._bucketing(before), self._after, self._trajectory_ended)
        self._trainer = Trainer(scenario, self._after, self._boundary, self._trained)
        self._lending = Lending(scenario, self._after) if system.elastic else None
        self._ready: deque[int] = deque()  # batches that wait to be trained
        self._trajectories: dict[int, list[Trajectory]] = {}
        self._steps: dict[int, Step] = {}
        self._rolling = -1
        self._began = 0
        self._trained_upto = 0  # batches
        self._pending: Shares | None = None
        self._shares = self._splitter.now

    # ---- the loop ----------------------------------------------------------------------------

    def play(self) -> Played:
        """Plays all batches."""
        self._install(0, self._shares)
        self._next_batch(0)
        now = 0
        while self._trained_upto < self._s.run.iterations:
            assert self._events, "the pipeline stands still"
            now, _, do = heapq.heappop(self._events)
            do(now)
        steps = [self._steps[b] for b in sorted(self._steps)][:self._s.run.iterations]
        generated = sum(s.generated for s in steps)
        busy = self._rollouts.gpu_busy_ns() + self._trainer.gpu_busy_ns
        return Played(self._system, steps, self._s.run.warmup,
                      self._rollouts.totals.moved / generated, busy / (now * self._s.run.gpus))

    def _after(self, at: int, do: Callable[[int], None]) -> None:
        self._made += 1
        heapq.heappush(self._events, (at, self._made, do))

    def _bucketing(self, before: list[Trajectory]) -> Bucketing:
        edges = self._splitter.now.edges
        if self._system.routing == CMLFQ:
            queues = Cmlfq(CausalTree(self._s.tree), edges)
            play(queues, before, 0, shape=self._s.tree)
            return queues
        return Mlfq(edges)

    def _batch(self, number: int, turn: int = 0) -> list[Trajectory]:
        """The trajectories of a batch; with another `turn` others of the same kind."""
        run = self._s.run
        progress = number / max(1, run.iterations - 1)
        return [self._source.trajectory((number * run.prompts + p) % self._s.lengths.prompts,
                                        (number + turn * 1_000_003) * run.samples + k, progress)
                for p in range(run.prompts) for k in range(run.samples)]

    # ---- rollout -----------------------------------------------------------------------------

    def _next_batch(self, now: int) -> None:
        """Begins the next batch if it may."""
        number = self._rolling + 1
        idle = not self._rollouts.under_way and number < self._s.run.iterations
        colocated = self._system.splits == "colocated"
        lag = 0 if colocated else self._s.run.staleness
        if not idle or self._began > now or number > self._trained_upto + lag:
            return
        pauses = self._s.pauses
        pause = pauses.weights_s
        if self._pending is not None:
            if self._trainer.busy:
                return  # everybody stops for another split, between two batches
            if self._lending is not None and self._lending.out:
                self._lending.idle(now)
                return
            self._shares, self._pending = self._pending, None
            pause += pauses.reconfigure_s
            self._install(now, self._shares)
            self._after(now + round(pauses.reconfigure_s * _SECOND), self._train_next)
        if colocated and number:
            pause += pauses.to_rollout_s
        self._rolling, self._began = number, now + round(pause * _SECOND)
        self._after(self._began, self._begin)

    def _begin(self, now: int) -> None:
        number = self._rolling
        batch = self._trajectories[number] = self._batch(number)
        tokens = sum(t.generated for t in batch)
        degrees = sorted((p.degree for p in self._shares.places), reverse=True)
        self._steps[number] = Step(
            number, tokens / len(batch), tokens, self._shares.layout.gpus,
            self._shares.rollout_gpus,
            " ".join(f"{degrees.count(d)}xTP{d}" for d in dict.fromkeys(degrees)))
        self._rollouts.start(now, number, batch)

    def _trajectory_ended(self, now: int) -> None:
        if self._rollouts.under_way:
            return
        step, ends = self._steps[self._rolling], self._rollouts.totals.ends
        step.rollout_s = (now - self._began) / _SECOND
        step.p90_share = ends[len(ends) * 9 // 10] / max(1, ends[-1])
        self._ready.append(self._rolling)
        pause = (self._s.pauses.to_train_s if self._system.splits == "colocated" else 0)
        self._after(now + round(pause * _SECOND), self._train_next)
        self._next_batch(now)

    # ---- training ----------------------------------------------------------------------------

    def _train_next(self, now: int) -> None:
        if self._trainer.busy or not self._ready:
            return
        if self._pending is not None and not self._rollouts.under_way:
            if self._rolling + 1 < self._s.run.iterations:
                self._next_batch(now)  # another split first
                return
            self._pending = None  # nobody is left to roll out on it
        batch = self._ready.popleft()
        self._trainer.start(now, batch, [request_of(t) for t in self._trajectories.pop(batch)])

    def _boundary(self, now: int, left: int, each_ns: int) -> int:
        """An optimizer step begins, `left` to go: GPUs that help in it."""
        if self._lending is None:
            return 0
        # help that is asked for now counts from the next step on; who is there helps in this one
        steps = left if self._lending.out else left - 1
        return self._lending.boundary(now, steps * each_ns, self._began > now)

    def _trained(self, now: int, batch: int, train_ns: int, requests: list[Request]) -> None:
        step = self._steps[batch]
        step.train_s, step.trained_at_s = self._trainer.took_ns / _SECOND, now / _SECOND
        step.lent_gpu_s = self._trainer.lent_gpu_ns / _SECOND
        self._trained_upto += 1
        shares = self._splitter.after(batch + 1, train_ns, round(step.rollout_s * _SECOND),
                                      requests)
        if shares is not None:
            step.switched, self._pending = True, shares
        if self._lending is not None and not self._ready:
            self._lending.idle(now)
        self._train_next(now)
        self._next_batch(now)

    def _install(self, now: int, shares: Shares) -> None:
        """Engines and a training layout for this split."""
        for engine in list(self._engines()):
            self._rollouts.close(now, engine)
        if isinstance(self._rollouts.bucketing, Cmlfq):
            self._rollouts.bucketing.rebucket(shares.edges)
        elif isinstance(self._rollouts.bucketing, Mlfq):
            self._rollouts.bucketing.edges = shares.edges
        self._trainer.layout = shares.layout
        opened = [(place, self._rollouts.open(now, place, self._mean_context))
                  for place in shares.places]
        if self._lending is not None:
            self._lending.begin(now, shares, self._rollouts, opened, self._mean_context,
                                self._next_batch)

    def _engines(self) -> list[int]:
        return [i.id for i in self._rollouts.router.instances]


def request_of(one: Trajectory) -> Request:
    """A trajectory as the planner knows it."""
    return Request(one.read, one.generated, one.tool_ns)
