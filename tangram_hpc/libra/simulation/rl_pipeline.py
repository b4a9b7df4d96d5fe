"""The simulated asynchronous RL pipeline: rollout and training side by side, and GPUs between them.

There are two pipelines. In `batches` a batch's rollout begins when the rollout of the batch before
has ended, so a step takes as long as the longer of both stages, as in the published formula. In
`trajectories` a rollout begins at once: one more trajectory starts whenever an engine has room,
while the longest ones of earlier batches still run, and loading new weights stops the engines only
for a pause. A colocated system rolls out and trains in turn in either pipeline.

Invariants: one clock; events are ordered by time and then by creation. Batches are trained in
order, each once. A trajectory of batch n starts only while at most `staleness` older batches are
not trained; trajectories of older batches start first. No GPU is in two stages. The planner, the
router, C-MLFQ and the hybrid pool are the real objects.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ...scheduler.routing.cmlfq import CausalTree, Cmlfq
from ...scheduler.routing.rollout_router import ANY, KvCost
from ..planner.rollout_cost import RolloutCost
from ..planner.shapes import Request
from .rl_faults import Fate
from .rl_lend import Lending
from .rl_lengths import Source, TrajectoryLengths
from .rl_rollout import EnginePlan, SimulatedRollouts
from .rl_routing import Bucketing, Mlfq, play
from .rl_scenario import TRAJECTORIES, Scenario
from .rl_systems import CMLFQ, Shares, Splitter, System
from .rl_train import SimulatedTrainer

_SECOND = 10**9


@dataclass
class StepTimes:
    """The times and figures of one batch. Times are in seconds."""

    batch: int
    mean_tokens: float
    generated: int
    train_gpus: int
    rollout_gpus: int
    degrees: str
    rollout_s: float = 0.0  # from its first trajectory's start to its last one's end
    stage_s: float = 0.0  # the pipeline's time for its rollout, see `Pipeline._stage_ns`
    p90_share: float = 0.0  # fraction of rollout_s after which 90 % of trajectories had ended
    train_s: float = 0.0
    trained_at_s: float = 0.0
    lent_gpu_s: float = 0.0
    switched: bool = False


@dataclass
class Played:
    """The results of the whole run of one system."""

    system: System
    steps: list[StepTimes] = field(default_factory=list)
    warmup: int = 0
    moved_share: float = 0.0  # context tokens moved to another engine, over generated tokens
    again_share: float = 0.0  # context tokens that were read again, over generated tokens
    gpu_busy: float = 0.0  # busy GPU time of rollout and training over all GPU time

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens that were trained, per second, without the warm-up."""
        began = self.steps[self.warmup - 1].trained_at_s if self.warmup else 0.0
        rest = self.steps[self.warmup:]
        return sum(s.generated for s in rest) / (rest[-1].trained_at_s - began)

    @property
    def hours(self) -> float:
        """Length of the whole run in hours."""
        return self.steps[-1].trained_at_s / 3600


class Pipeline:
    """One run of one system."""

    def __init__(self, scenario: Scenario, system: System) -> None:
        self._s, self._system = scenario, system
        self._source = Source(scenario.lengths, scenario.run.seed)
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._made = 0
        before = self._batch(0, -1)  # trajectories that planner and router know before the run
        first = [request_of(t) for t in before]
        self._splitter = Splitter(scenario, system, first)
        self._cost = RolloutCost(scenario.model, scenario.hardware, scenario.rollout)
        self._rollouts = SimulatedRollouts(self._cost, kv_of(scenario, system), scenario.tree,
                                           self._bucketing(before), self._after,
                                           self._trajectory_ended)
        self._rollouts.mean_context = mean_context(first)
        self.fate = Fate(scenario.faults, scenario.run.seed)
        self._dead: dict[int, None] = {}  # rollout nodes that are dead; values are unused
        self._trainer = SimulatedTrainer(scenario, self._after, self._boundary, self._used,
                                         self._trained, self.fate)
        self._lending = Lending(scenario, self._after) if system.elastic else None
        self._colocated = system.splits == "colocated"
        self._mixed = scenario.run.pipeline == TRAJECTORIES and not self._colocated
        # the trajectories that may start, in order
        self._line: deque[tuple[int, TrajectoryLengths]] = deque()
        # for each batch that has begun and is not trained: its trajectories
        self._trajectories: dict[int, list[TrajectoryLengths]] = {}
        self._ends: dict[int, list[int]] = {}  # the times of their ends, in ns
        self._steps: dict[int, StepTimes] = {}
        self._began: dict[int, int] = {}
        self._last = -1  # the last batch that rolls out, or is about to
        self._opening = self._stopped = False  # the next batch, or every batch, waits for a pause
        self._free = 0  # when the trainer last became free
        self._trained_upto = 0  # batches that are trained
        self._pending: Shares | None = None
        self._shares = self._splitter.now

    # ---- the loop ----------------------------------------------------------------------------

    def play(self) -> Played:
        """Simulates all batches."""
        self._install(0)
        self._go_on(0)
        self._alarm(0, self.fate.next_node_ns(), self._node_dies)
        self._alarm(0, self.fate.next_engine_ns(), self._engine_dies)
        now = 0
        while self._trained_upto < self._s.run.iterations:
            assert self._events, "the pipeline stands still"
            now, _, do = heapq.heappop(self._events)
            do(now)
        steps = [self._steps[b] for b in sorted(self._steps)][:self._s.run.iterations]
        generated = sum(s.generated for s in steps)
        self._rollouts.close(now, self._engines())
        totals = self._rollouts.totals
        busy = totals.busy_ns + self._trainer.gpu_busy_ns
        return Played(self._system, steps, self._s.run.warmup, totals.moved / generated,
                      totals.again / generated, busy / (now * self._s.run.gpus))

    def _go_on(self, now: int) -> None:
        """Starts all trajectories, training steps and switches that have become possible at `now`.
        """
        if self._stopped:
            return
        hold = self._pending is not None and self._switch(now)
        if self._stopped:
            return
        if self._mixed or not hold:
            self._admit(now)
        if not hold:
            self._train(now)

    def _after(self, at: int, do: Callable[[int], None]) -> None:
        self._made += 1
        heapq.heappush(self._events, (at, self._made, do))

    def _bucketing(self, before: list[TrajectoryLengths]) -> Bucketing:
        edges = self._splitter.now.edges
        if self._system.routing == CMLFQ:
            queues = Cmlfq(CausalTree(self._s.tree), edges)
            play(queues, before, 0, shape=self._s.tree)
            return queues
        return Mlfq(edges)

    def _batch(self, number: int, turn: int = 0) -> list[TrajectoryLengths]:
        """The trajectories of a batch. Another `turn` gives other trajectories of the same
        distribution.
        """
        run = self._s.run
        progress = number / max(1, run.iterations - 1)
        drawn = [self._source.trajectory((number * run.prompts + p) % self._s.lengths.prompts,
                                         (number + turn * 1_000_003) * run.samples + k, progress)
                 for p in range(run.prompts) for k in range(run.samples)]
        return drawn if turn else [self.fate.with_tools(one, f"{number}/{k}")
                                   for k, one in enumerate(drawn)]

    # ---- rollout -----------------------------------------------------------------------------

    def _admit(self, now: int) -> None:
        """Begins all batches that may begin, and starts their trajectories on engines with room."""
        run = self._s.run
        lag = 0 if self._colocated else run.staleness
        while (not self._opening and self._last + 1 < run.iterations
               and self._last + 1 <= self._trained_upto + lag
               and (self._mixed or not self._rollouts.under_way)):
            self._last += 1
            if self._mixed:
                self._begin(now)
            else:
                pauses = self._s.pauses
                pause = pauses.weights_s + (
                    pauses.to_rollout_s if self._colocated and self._last else 0.0)
                self._opening = True
                self._after(now + round(pause * _SECOND), self._begin)
        if self._mixed:
            self._start(now)

    def _begin(self, now: int) -> None:
        """Lets the last batch roll out from now on."""
        self._opening, number = False, self._last
        batch = self._trajectories[number] = self._batch(number)
        self._began[number], self._ends[number] = now, []
        tokens = sum(t.generated for t in batch)
        degrees = sorted((p.degree for p in self._shares.places), reverse=True)
        self._steps[number] = StepTimes(
            number, tokens / len(batch), tokens, self._shares.layout.gpus,
            self._shares.rollout_gpus,
            " ".join(f"{degrees.count(d)}xTP{d}" for d in dict.fromkeys(degrees)))
        if self._mixed:
            self._line.extend((number, one) for one in batch)
        else:
            self._rollouts.start(now, number, batch)

    def _start(self, now: int) -> None:
        """Starts as many trajectories as engines have room for."""
        room = self._rollouts.places - self._rollouts.under_way
        while self._line and room > 0:
            number, one = self._line.popleft()
            self._rollouts.start(now, number, [one])
            room -= 1

    def _trajectory_ended(self, now: int, number: int) -> None:
        ends = self._ends[number]
        ends.append(now)
        if self._line:
            self._start(now)
        if self._lending is not None:
            self._lending.demand(now, self._demand)
        if len(ends) < self._s.batch:
            return
        step, began = self._steps[number], self._began[number]
        step.rollout_s = (now - began) / _SECOND
        step.p90_share = (ends[len(ends) * 9 // 10] - began) / max(1, now - began)
        self._after(now + self._to_train_ns, self._go_on)

    # ---- training ----------------------------------------------------------------------------

    def _train(self, now: int) -> None:
        """Trains the next batch if all of its trajectories have ended."""
        number = self._trained_upto
        ends = self._ends.get(number, [])
        if (self._trainer.busy or len(ends) < self._s.batch
                or now < ends[-1] + self._to_train_ns):
            return
        step = self._steps[number]
        step.stage_s = self._stage_ns(number) / _SECOND
        self._trainer.start(now, number, [request_of(t) for t in self._trajectories.pop(number)])

    @property
    def _to_train_ns(self) -> int:
        """Time from the last end in a batch to the batch's training, if the same GPUs do both."""
        return round(self._s.pauses.to_train_s * _SECOND) if self._colocated else 0

    @property
    def _demand(self) -> int:
        """Trajectories that run, and those that may start before another batch is trained."""
        next_one = self._last + 1 <= self._trained_upto + self._s.run.staleness and (
            self._last + 1 < self._s.run.iterations)
        soon = self._s.batch if self._opening or next_one else 0
        return self._rollouts.under_way + len(self._line) + soon

    def _boundary(self, now: int) -> int:
        """Begins an optimizer step; returns the number of GPUs that help in it."""
        return self._lending.boundary(now, self._demand) if self._lending is not None else 0

    def _used(self) -> int:
        """The number of helping GPUs whose gradients the ending step can use."""
        return self._lending.used() if self._lending is not None else 0

    def _stage_ns(self, number: int) -> int:
        """The time of a batch's rollout in the pipeline, in ns.

        In `batches` this is the rollout's length. In `trajectories` it is the time from when the
        trainer was free to when the batch was complete, below 0 if the batch was complete first;
        `_trained` adds the training time to it. With that time added, it equals the training time
        if neither stage waits for the other.
        """
        whole = self._ends[number][-1]
        return whole - (self._free if self._mixed and number else self._began[number])

    def _trained(self, now: int, batch: int, train_ns: int, requests: list[Request]) -> None:
        step = self._steps[batch]
        step.train_s, step.trained_at_s = self._trainer.took_ns / _SECOND, now / _SECOND
        step.lent_gpu_s = self._trainer.lent_gpu_ns / _SECOND
        self._trained_upto, self._free = batch + 1, now
        self.fate.trained()
        self._rollouts.mean_context = mean_context(requests)
        del self._ends[batch]
        if self._mixed:
            step.stage_s += train_ns / _SECOND if batch else 0.0
            self._rollouts.pause(now, round(self._s.pauses.weights_s * _SECOND))
        rollout_ns = max(1, round(step.stage_s * _SECOND))
        if self._lending is not None:
            self._lending.trained(train_ns, rollout_ns)
        shares = self._splitter.after(batch + 1, train_ns, rollout_ns, requests)
        if shares is not None:
            step.switched, self._pending = True, shares
        self._go_on(now)
        if self._lending is not None and not self._trainer.busy and self._demand:
            self._lending.home(now)  # until the next batch is complete

    # ---- another split -----------------------------------------------------------------------

    def _switch(self, now: int) -> bool:
        """Changes to the pending split if possible; returns whether batches must wait for it."""
        if (self._last + 1 == self._s.run.iterations and not self._line
                and not self._rollouts.under_way and not self._opening):
            self._pending = None  # no batch is left to roll out on the new split
            return False
        if not self._mixed and (self._rollouts.under_way or self._opening):
            return False
        if self._trainer.busy:
            return True
        if self._lending is not None and self._lending.out:
            self._lending.home(now)
            return True
        assert self._pending is not None
        self._shares, self._pending, self._stopped = self._pending, None, True
        self._rollouts.close(now, self._engines())
        self._after(now + round(self._s.pauses.reconfigure_s * _SECOND), self._switched)
        return True

    def _switched(self, now: int) -> None:
        self._stopped, self._free = False, now
        self._install(now)
        self._go_on(now)

    def _install(self, now: int) -> None:
        """Opens the engines of the split and sets its training layout."""
        shares = self._shares
        if isinstance(self._rollouts.bucketing, Cmlfq):
            self._rollouts.bucketing.rebucket(shares.edges)
        elif isinstance(self._rollouts.bucketing, Mlfq):
            self._rollouts.bucketing.edges = shares.edges
        self._trainer.layout = shares.layout
        engines: dict[int, list[int]] = {p.node: [] for p in shares.places
                                         if p.node not in self._dead}
        for place in shares.places:
            if place.node not in self._dead:
                engines[place.node].append(self._rollouts.open(now, place))
        if self._lending is not None:
            self._lending.begin(now, shares, self._rollouts, engines, self._go_on)

    def _engines(self) -> list[int]:
        return [i.id for i in self._rollouts.router.instances]

    # ---- faults ------------------------------------------------------------------------------

    def _alarm(self, now: int, wait_ns: int | None, dies: Callable[[int], None]) -> None:
        if wait_ns is not None:
            self._after(now + wait_ns, dies)

    def _node_dies(self, now: int) -> None:
        """Lets a node that rolls out or is lent die, with its engines and caches."""
        living = sorted({p.node for p in self._shares.places} - set(self._dead))
        if living and not self._stopped:
            node = self.fate.one_of(living)
            self.fate.nodes += 1
            self._dead[node] = None
            if self._lending is not None and self._lending.owns(node):
                self._lending.dies(now, node)
            else:
                self._rollouts.close(now, [i.id for i in self._rollouts.router.instances
                                           if i.node == f"n{node}"])
            self._after(now + self.fate.back_ns, lambda at: self._node_returns(at, node))
            self._go_on(now)  # another step may have waited for the node
        self._alarm(now, self.fate.next_node_ns(), self._node_dies)

    def _node_returns(self, now: int, node: int) -> None:
        del self._dead[node]
        if not self._stopped:
            if self._lending is not None and self._lending.owns(node):
                self._lending.returns(now, node)
            else:
                for place in self._shares.places:
                    if place.node == node:
                        self._rollouts.open(now, place)
        self._go_on(now)

    def _engine_dies(self, now: int) -> None:
        """Lets an engine die; its node lives and opens another engine later."""
        serving = self._engines()
        if serving:
            engine = self.fate.one_of(serving)
            self.fate.engines += 1
            place, shares = self._rollouts.place(engine), self._shares
            if self._lending is not None:
                self._lending.closed(engine)
            self._rollouts.close(now, [engine])
            self._after(now + self.fate.back_ns,
                        lambda at: self._engine_returns(at, place, shares))
        self._alarm(now, self.fate.next_engine_ns(), self._engine_dies)

    def _engine_returns(self, now: int, place: EnginePlan, shares: Shares) -> None:
        if shares is not self._shares or self._stopped or place.node in self._dead:
            return  # the node died meanwhile: it will open all of its engines anew
        if self._lending is None or not self._lending.owns(place.node):
            self._rollouts.open(now, place)
        else:
            self._lending.reopen(now, place)
        self._go_on(now)

    def check(self) -> None:
        """Asserts the invariants between two events.

        No GPU is in two roles, requests are where the router says, no trajectory is lost, and no
        trained batch is open.
        """
        self._rollouts.check()
        if self._lending is not None:
            self._lending.check()
        serving = Counter(self._rollouts.place(engine) for engine in self._engines())
        assert serving <= Counter(self._shares.places), "more engines than the split has"
        assert not any(place.node in self._dead for place in serving), "a dead node has an engine"
        begun = sum(len(ends) for ends in self._ends.values()) + self._rollouts.under_way
        assert begun + len(self._line) == len(self._ends) * self._s.batch, "a trajectory is lost"
        assert all(b >= self._trained_upto for b in self._ends), "a trained batch is open"


def kv_of(scenario: Scenario, system: System) -> KvCost:
    """The cost of moving keys; systems without C-MLFQ never move keys."""
    kv = scenario.router
    return kv if system.routing == CMLFQ else replace(kv, near_ns=ANY, far_ns=ANY)


def request_of(one: TrajectoryLengths) -> Request:
    """A trajectory as a request of the planner."""
    return Request(one.read, one.generated, one.tool_ns, len(one.turns) + 1)


def mean_context(requests: list[Request]) -> int:
    """Mean tokens in the cache for one of these requests while it decodes."""
    return max(1, sum(r.prompt + r.generated // 2 for r in requests) // len(requests))
