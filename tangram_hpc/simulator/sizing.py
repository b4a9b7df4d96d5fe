"""Pure. Searches, by simulations, how many resources a policy needs to reach a target.

The held resources grow in `Scale.levels` equal steps. CPUs and GPUs grow together where a workload
uses both; surplus CPUs or GPUs are trimmed afterwards.

More resources do not always give a shorter run, so a single good size may be luck. Invariants: an
answer is the smallest size found that reaches the target and whose next larger sizes reach it too,
and somewhat smaller sizes were tried. Nothing is measured twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..domain.service import service_of
from .workload import Cluster, ClusterNode, WorkAction, Workload, WorkloadTurn, all_actions

LEVELS = 1000  # answers are multiples of 1/1000 of the cluster
# The fractions of the cluster that a curve shows.
GRID = tuple(2 ** (-k / 2) for k in range(6, -1, -1))
_NEAR = 2  # how many sizes above an answer must reach the target, too
_UNDER = (0.95, 0.98)  # fractions of an answer that are also tried


class Holding(NamedTuple):
    """The CPUs and GPUs that are held."""

    cpus: int
    gpus: int


class RunFigures(NamedTuple):
    """The metrics of a run, in seconds."""

    mean_act_s: float
    p99_act_s: float
    step_s: float


class Point(NamedTuple):
    """One size of a curve; `figures` is None where the workload cannot run at all."""

    level: int
    held: Holding
    figures: RunFigures | None


Measure = Callable[[str, Holding], RunFigures | None]  # arguments: name of a policy, holding


@dataclass(frozen=True)
class Target:
    """Upper bounds in seconds; None where there is none.

    Attributes:
        act_s: Bound of the mean action completion time.
        step_s: Bound of the length of the step.
    """

    act_s: float | None = None
    step_s: float | None = None

    def reached(self, figures: RunFigures | None) -> bool:
        """Whether these metrics are within the bounds."""
        return figures is not None and all(
            wanted_s is None or is_s <= wanted_s
            for is_s, wanted_s in ((figures.mean_act_s, self.act_s), (figures.step_s, self.step_s)))

    def excess(self, figures: RunFigures) -> float:
        """The factor by which the metrics exceed the bounds; the larger one if there are two
        bounds.
        """
        pairs = ((figures.mean_act_s, self.act_s), (figures.step_s, self.step_s))
        return max(is_s / max(wanted_s, 1e-9) for is_s, wanted_s in pairs if wanted_s is not None)


@dataclass(frozen=True)
class Scale:
    """The sizes that are examined.

    Attributes:
        full: The full cluster.
        cpus, gpus: Whether CPUs and GPUs are searched.
        levels: Number of steps to the full cluster.
        top: The level above which more resources are of no use.
    """

    full: Holding
    cpus: bool
    gpus: bool
    levels: int
    top: int

    def holding(self, level: int) -> Holding:
        """The CPUs and GPUs held at a level. A kind that is not searched is held in full."""
        cpus, gpus = (-(-level * amount // self.levels) for amount in self.full)
        return Holding(cpus if self.cpus else self.full.cpus,
                       gpus if self.gpus else self.full.gpus)


@dataclass
class SizingResult:
    """The resources that one policy needs.

    Attributes:
        policy: Its name.
        held: The smallest holding that reaches the target; None if none does.
        at: That holding, or the one with the best metrics.
        figures: The metrics at `at`.
        level: The level of `at` on the curve, before its CPUs or GPUs were trimmed separately.
    """

    policy: str
    held: Holding | None
    at: Holding
    figures: RunFigures
    level: int


@dataclass
class Curve:
    """One policy, and all its measured sizes that hold CPUs and GPUs in proportion."""

    policy: str
    scale: Scale
    measure: Measure
    answer: SizingResult | None = None
    _known: dict[Holding, RunFigures | None] = field(default_factory=dict)
    _levels: set[int] = field(default_factory=set)

    def at(self, level: int) -> RunFigures | None:
        """The metrics at a level."""
        self._levels.add(level)
        return self.hold(self.scale.holding(level))

    def hold(self, held: Holding) -> RunFigures | None:
        """The metrics of any holding; no holding is measured twice."""
        if held not in self._known:
            self._known[held] = self.measure(self.policy, held)
        return self._known[held]

    def points(self) -> list[Point]:
        """All levels that were measured, from the smallest."""
        return [Point(n, self.scale.holding(n), self.at(n)) for n in sorted(self._levels)]

    def shown(self) -> list[Point]:
        """Returns the points to show: the levels of the grid, and the level of the answer."""
        wanted = set(grid(self.scale)) | ({self.answer.level} if self.answer else set())
        return [p for p in self.points() if p.level in wanted]


# ---- the search ---------------------------------------------------------------------------------


def threshold(reaches: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest number in (low, high] that reaches the target together with the next ones.

    `high` must reach it.
    """
    best = _settle(reaches, low, high)
    while True:
        under = next((m for share in _UNDER if low < (m := int(best * share)) < best
                      and all(reaches(k) for k in range(m, min(m + _NEAR, best) + 1))), None)
        if under is None:
            return best
        best = _settle(reaches, low, under)


def _settle(reaches: Callable[[int], bool], low: int, high: int) -> int:
    """Bisects; goes on above a number that reaches the target although the next numbers do not."""
    fails = low
    while True:
        below, found = fails, high
        while found - below > 1:
            middle = (below + found) // 2
            below, found = (below, middle) if reaches(middle) else (middle, found)
        bad = [m for m in range(found + 1, min(found + _NEAR, high) + 1) if not reaches(m)]
        if not bad:
            return found
        fails = bad[-1]


def grid(scale: Scale) -> list[int]:
    """The levels that are measured for every curve."""
    return sorted({max(1, round(share * scale.levels)) for share in GRID})


def search(policy: str, scale: Scale, target: Target, measure: Measure) -> Curve:
    """A policy's curve and its answer; no answer if the workload never runs under it."""
    curve = Curve(policy, scale, measure)
    for level in grid(scale):
        curve.at(level)
    bracket = _bracket(curve, target)
    if bracket is not None:
        level = threshold(lambda n: target.reached(curve.at(n)), *bracket)
        held = _trimmed(curve, target, scale.holding(level))
        figures = curve.hold(held)
        if figures is not None:
            curve.answer = SizingResult(policy, held, held, figures, level)
        return curve
    run = [(target.excess(p.figures), p.level, p) for p in curve.points() if p.figures is not None]
    if run:
        _, level, point = min(run)
        if point.figures is not None:
            curve.answer = SizingResult(policy, None, point.held, point.figures, level)
    return curve


def _bracket(curve: Curve, target: Target) -> tuple[int, int] | None:
    """A size that does not reach the target and one above it that does; None if no size does."""
    known, high = [0, *grid(curve.scale)], 0
    while known and known[-1] and target.reached(curve.at(known[-1])):
        high = known.pop()
    if high:
        return known[-1], high
    low, top = known[-1], curve.scale.top
    while low < top:
        high = min(2 * low, top)
        if target.reached(curve.at(high)):
            return low, high
        low = high
    return None


def _trimmed(curve: Curve, target: Target, held: Holding) -> Holding:
    """Returns a holding with fewer CPUs, and then fewer GPUs, where both are searched."""
    if not (curve.scale.cpus and curve.scale.gpus):
        return held
    grain = max(1, -(-curve.scale.full.cpus // LEVELS))
    steps = -(-held.cpus // grain)

    def cpus(n: int) -> Holding:
        return held._replace(cpus=min(n * grain, held.cpus))

    held = cpus(threshold(lambda n: target.reached(curve.hold(cpus(n))), 0, steps))
    gpus = threshold(lambda n: target.reached(curve.hold(held._replace(gpus=n))), 0, held.gpus)
    return held._replace(gpus=gpus)


# ---- clusters of another size -------------------------------------------------------------------


def full_holding(cluster: Cluster) -> Holding:
    """All CPUs and GPUs of a cluster."""
    return Holding(sum(n.cpus * n.count for n in cluster.nodes),
                   sum(n.gpus * n.count for n in cluster.nodes))


def scale_of(work: Workload, cluster: Cluster, reserve: int = 0) -> Scale:
    """The sizes to search for a workload; `reserve` is a session's largest reservation of CPUs."""
    actions = all_actions(work)
    full = full_holding(cluster)
    cpus = full.cpus > 0 and any(a.resource == "cpu" for a in actions)
    gpus = full.gpus > 0 and any(service_of(a.resource) for a in actions)
    levels = min(LEVELS, max(full.cpus if cpus else 0, full.gpus if gpus else 0, 1))
    # Sessions do not spread evenly over several nodes.
    spread = 1 if sum(n.count for n in cluster.nodes) == 1 else 2
    wanted = _most(work, reserve)
    times = max([1, *(math.ceil(spread * most / there) for on, most, there in
                      ((cpus, wanted.cpus, full.cpus), (gpus, wanted.gpus, full.gpus)) if on)])
    return Scale(full, cpus, gpus, levels, levels * times)


def _most(work: Workload, reserve: int) -> Holding:
    """The number of units beyond which more are of no use: the sum, over all trajectories, of the
    units of their widest turns.
    """
    def wide(turn: WorkloadTurn, wants: Callable[[WorkAction], bool]) -> int:
        return sum(a.degrees[-1] for a in turn.actions if wants(a))

    cpus = sum(max([reserve, *(wide(turn, lambda a: a.resource == "cpu") for turn in t.turns)])
               for t in work.trajectories)
    gpus = sum(max([0, *(wide(turn, lambda a: bool(service_of(a.resource))) for turn in t.turns)])
               for t in work.trajectories)
    return Holding(cpus, gpus)


def resized(cluster: Cluster, held: Holding) -> Cluster:
    """The cluster with `held` CPUs and GPUs, on as few of its nodes as can hold them.

    CPUs are spread evenly over their nodes; GPUs fill node by node, since blocks are aligned. If
    more is held than the cluster has, every node becomes larger. A node without CPUs holds no
    sandboxes.
    """
    full = full_holding(cluster)
    times = max([1, *(-(-want // there) for want, there in zip(held, full, strict=True) if there)])
    nodes = [n.model_copy(update={"name": n.name if n.count == 1 else f"{n.name}{i}", "count": 1})
             for n in cluster.nodes for i in range(n.count)]
    cpus = _even([n.cpus * times for n in nodes], held.cpus)
    gpus = _filled([n.gpus * times for n in nodes], held.gpus)
    kept: list[ClusterNode] = [
        n.model_copy(update={"cpus": c, "gpus": g, "mem_mib": n.mem_mib * times if c else 0})
        for n, c, g in zip(nodes, cpus, gpus, strict=True) if c or g]
    return cluster.model_copy(update={"nodes": tuple(kept)})


def _filled(room: Sequence[int], amount: int) -> list[int]:
    given: list[int] = []
    for most in room:
        given.append(min(most, amount))
        amount -= given[-1]
    return given


def _even(room: Sequence[int], amount: int) -> list[int]:
    """Divides `amount` in proportion over the first nodes that together have room for all of it."""
    last = next((i for i in range(1, len(room) + 1) if sum(room[:i]) >= amount), len(room))
    total, so_far = max(1, sum(room[:last])), 0
    given: list[int] = []
    for most in room[:last]:
        so_far += most
        given.append(so_far * amount // total - sum(given))
    return given + [0] * (len(room) - last)
