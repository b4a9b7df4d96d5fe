"""The systems that are compared, and how each of them splits the GPUs.

Invariants: every system plays the same trajectories on the same hardware by the same cost model. A
system learns lengths only when trajectories end, except the lengths of the first batch, which all
systems know before the run. A baseline is the full system less the parts that it does not have; no
part is made worse on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ...errors import InvalidInput
from ..planner.costs import AnalyticCosts
from ..planner.layout_tree import LayoutTree
from ..planner.online import OnlinePlanner
from ..planner.reprice import reprice
from ..planner.shapes import Factors, Layout, Request
from ..planner.split import Split, dealt_to, plan
from ..planner.trigger import StepFacts
from .rl_rollout import EnginePlan
from .rl_scenario import TRAJECTORIES, Scenario

LEAST, MLFQ, CMLFQ = "least connections", "MLFQ", "C-MLFQ"


@dataclass(frozen=True)
class System:
    """The parts of one system. Only systems with C-MLFQ move keys.

    Attributes:
        name: The name in reports.
        splits: The rule that decides the split.
        uniform: Whether all instances have one degree.
        routing: How turns are routed.
        elastic: Whether the hybrid pool is used.
        about: One line for reports.
        best_degree: Whether the degree is the best one for the first batch instead of the
            scenario's.
    """

    name: str
    splits: str  # colocated | uniform | greedy | initial | planner
    uniform: bool = True  # one degree for all instances
    routing: str = LEAST
    elastic: bool = False
    about: str = ""
    best_degree: bool = False


SYSTEMS = (
    System("colocated", "colocated", about="all GPUs roll out, then all train"),
    System("static-uniform", "uniform", about="half and half, one degree"),
    System("greedy", "greedy", about="moves a node towards the slower stage"),
    System("static-optimal", "initial", about="the best split for the first batch, kept"),
    System("colocated*", "colocated", best_degree=True,
           about="at the degree that is best for the first batch"),
    System("static-optimal*", "initial", best_degree=True,
           about="at the degree that is best for the first batch"),
    System("planner", "planner", about="the global planner, one degree that it chooses"),
    System("+ degrees", "planner", uniform=False, routing=MLFQ,
           about="and instances of different degree, plain MLFQ"),
    System("+ C-MLFQ", "planner", uniform=False, routing=CMLFQ,
           about="and causal routing, keys that move"),
    System("+ elastic", "planner", uniform=False, routing=CMLFQ, elastic=True,
           about="and the hybrid pool: all of Libra"),
)
BASELINES, ABLATION = SYSTEMS[:4], (SYSTEMS[1], *SYSTEMS[6:])
LIBRA = SYSTEMS[-1]


@dataclass(frozen=True)
class Shares:
    """A split, in the form in which the stages use it.

    Attributes:
        layout: The training layout.
        places: The engines.
        rollout_gpus: GPUs of the rollout side.
        edges: The most remaining tokens of each bucket but the last.
    """

    layout: Layout
    places: tuple[EnginePlan, ...]
    rollout_gpus: int
    edges: tuple[int, ...] = ()


class Splitter:
    """Decides the splits of one system."""

    def __init__(self, scenario: Scenario, system: System, first: Sequence[Request]) -> None:
        self._s, self._system = scenario, system
        self._search = scenario.planner.search()
        if system.routing == LEAST:
            self._search = replace(self._search, dealt=True, loss=0.0)
        if scenario.run.pipeline == TRAJECTORIES and system.splits != "colocated":
            self._search = replace(self._search, ahead=scenario.run.staleness)
        self.now = self._begin(list(first))

    def after(self, step: int, train_ns: int, rollout_ns: int, requests: Sequence[Request]
              ) -> Shares | None:
        """Handles the end of a step; returns the shares to change to, or None."""
        if self._system.splits == "planner":
            self._calibrate(rollout_ns, requests)
            advice = self._online.step(StepFacts(step, train_ns, rollout_ns), requests, {})
            if advice is None or not advice.verdict.switch or self._online.now is None:
                return None
            return self._taken(self._planned(self._online.now))
        if self._system.splits == "greedy" and step % self._s.planner.plan_interval == 0:
            return self._moved(train_ns, rollout_ns, requests)
        return None

    def _calibrate(self, rollout_ns: int, requests: Sequence[Request]) -> None:
        """Learns one factor for all degrees.

        Simulated engines are exactly as fast as the model says. Measured times differ only by how
        well requests were distributed, which says nothing about a degree. The planner itself learns
        the loss of mixed plans.
        """
        split, degrees = self._online.now, self._s.rollout.degrees
        if split is None or self._search.ahead or not self._online.settled:
            return  # a batch's time says little if batches mix or if it ran on two plans
        said = reprice(self._costs(requests, degrees), self._s.run.gpus, split.layout,
                        [one.degree for one in split.instances], self._search)
        mean = sum(r.total for r in requests) / len(requests)
        if said is not None:
            longer = self._online.calibrator.beside() if self._online.mixed else 1.0
            for degree in degrees:
                self._online.calibrator.observe(degree, round(said.rollout_ns * longer),
                                                rollout_ns, mean)

    # ---- the first split ---------------------------------------------------------------------

    def _begin(self, first: list[Request]) -> Shares:
        s, kind = self._s, self._system.splits
        if kind == "colocated":
            return self._colocated(first)
        if kind in ("uniform", "greedy"):
            node = s.hardware.gpus_per_node
            return self._uniform(s.run.gpus // node // 2 * node, s.baselines.uniform_degree, first)
        if kind == "initial":
            return self._initial(first)
        degrees = s.rollout.degrees
        self._online = OnlinePlanner(
            lambda history, factors: self._costs(history, degrees, factors), s.run.gpus,
            self._search, s.planner.triggers(), s.planner.learning(),
            s.run.pool_slack if self._system.elastic else s.run.slack)
        self._online.preflight(first)
        assert self._online.now is not None
        return self._planned(self._online.now)

    def _costs(self, history: Sequence[Request], degrees: Sequence[int],
               factors: Factors | None = None) -> AnalyticCosts:
        s = self._s
        return AnalyticCosts(s.model, s.hardware, s.training,
                             replace(s.rollout, degrees=tuple(degrees)), history, factors)

    def _colocated(self, first: list[Request]) -> Shares:
        """All GPUs in both roles, with the degree that is best for the first batch."""
        gpus = self._s.run.gpus
        costs = self._costs(first, self._s.rollout.degrees)
        found = LayoutTree(costs, self._search).best(gpus)
        if found is None:
            raise InvalidInput(f"scenario {self._s.name}: no training layout runs on {gpus} GPUs")
        best = min(self._degrees(), key=lambda d: dealt_to(costs, d, gpus // d, 0, 0)[0])
        return Shares(found[0], self._alike(gpus, best), gpus)

    def _degrees(self) -> tuple[int, ...]:
        """The degrees from which a baseline may choose."""
        s = self._s
        return s.rollout.degrees if self._system.best_degree else (s.baselines.uniform_degree,)

    def _uniform(self, train: int, degree: int, history: Sequence[Request]) -> Shares:
        """`train` GPUs train in their best layout; the others roll out at one degree."""
        gpus = self._s.run.gpus
        only = replace(self._search, min_train=train, min_rollout=gpus - train)
        best = plan(self._costs(history, (degree,)), gpus, only).best
        return Shares(best.layout, self._alike(gpus - train, degree), gpus - train)

    def _initial(self, first: list[Request]) -> Shares:
        """The best split for the first batch."""
        best: tuple[Split, int] | None = None
        for degree in self._degrees():
            try:
                found = plan(self._costs(first, (degree,)), self._s.run.gpus, self._search).best
            except InvalidInput:
                continue
            if best is None or found.rank < best[0].rank:
                best = found, degree
        if best is None:
            raise InvalidInput(f"scenario {self._s.name}: no split can run")
        return Shares(best[0].layout, self._alike(best[0].rollout_gpus, best[1]),
                      best[0].rollout_gpus)

    def _alike(self, gpus: int, degree: int) -> tuple[EnginePlan, ...]:
        """Instances of one degree, each meant for an equal share of the batch."""
        count, node = gpus // degree, self._s.hardware.gpus_per_node
        meant = -(-self._s.batch // count)
        return tuple(EnginePlan(degree, 0, i * degree // node, meant) for i in range(count))

    # ---- later ones --------------------------------------------------------------------------

    def _planned(self, split: Split) -> Shares:
        """The engines and buckets of a plan.

        Engines are placed with the largest degrees first, node after node. Buckets are by degree,
        with their edges where the plan's instances divide the batch.
        """
        if self._system.uniform:  # plans whose requests are dealt in turn have one degree
            return Shares(split.layout, self._alike(
                split.rollout_gpus, split.instances[0].degree), split.rollout_gpus)
        wanted = [(one.degree, one.requests) for one in split.instances]
        idle = split.idle
        for degree in sorted(self._s.rollout.degrees, reverse=True):
            while degree <= idle:  # GPUs that the plan leaves idle serve rollouts as well
                wanted.append((degree, 0))
                idle -= degree
        degrees = sorted({degree for degree, _ in wanted})
        node = self._s.hardware.gpus_per_node
        places, at = [], 0
        for degree, requests in sorted(wanted, reverse=True):
            places.append(EnginePlan(degree, degrees.index(degree), at // node, requests))
            at += degree
        return Shares(split.layout, tuple(places), split.rollout_gpus,
                      self._edges(split, degrees))

    def _edges(self, split: Split, degrees: list[int]) -> tuple[int, ...]:
        """Remaining tokens at which the buckets end.

        The plan gives each request to one degree for its whole time, but a queue by remaining
        tokens serves the last tokens of every request in its smallest bucket. So the edges are set
        so that each degree gets the fraction of all tokens that the plan gives it.
        """
        recent = sorted(r.generated for r in self._recent)
        n = len(recent)
        prefix = [0, *accumulate(recent)]
        edges: list[int] = []
        upto = 0
        for degree in degrees[:-1]:
            upto += sum(o.requests for o in split.instances if o.degree == degree)
            # Tokens of the requests up to this edge.
            wanted = prefix[min(n, upto * n // self._s.batch)]
            # the least edge with `wanted` tokens below it: all tokens of the k shorter requests,
            # and `edge` tokens of each longer one
            k = next((k for k in range(n) if prefix[k] + recent[k] * (n - k) >= wanted), n - 1)
            edge = max(1, -(-(wanted - prefix[k]) // (n - k)))
            edges.append(max(edge, edges[-1] + 1 if edges else 1))
        return tuple(edges)

    @property
    def _recent(self) -> list[Request]:
        return list(self._online.trigger.history)

    def _moved(self, train_ns: int, rollout_ns: int, requests: Sequence[Request]) -> Shares | None:
        """Greedy: moves one node to the slower stage."""
        ratio, node = self._s.baselines.greedy_ratio, self._s.hardware.gpus_per_node
        gpus, train = self._s.run.gpus, self.now.layout.gpus
        if train_ns >= ratio * rollout_ns:
            train += node
        elif rollout_ns >= ratio * train_ns:
            train -= node
        else:
            return None
        if not self._search.min_train <= train <= gpus - self._search.min_rollout:
            return None
        try:
            return self._taken(self._uniform(train, self._s.baselines.uniform_degree, requests))
        except InvalidInput:
            return None

    def _taken(self, shares: Shares) -> Shares | None:
        """Uses these shares from now on; returns None if they are the present ones."""
        if shares == self.now:
            return None
        self.now = shares
        return shares

