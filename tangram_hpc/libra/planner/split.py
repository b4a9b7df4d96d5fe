"""Pure. Finds the plan: the split of N GPUs between training and rollouts with the shortest step.

A step of the asynchronous pipeline takes max(T_train, T_rollout). Every split that the bounds allow
is examined, each with its best training layout and its best rollout instances. Where batches mix
(`Search.ahead`), T_rollout is the period with which the instances keep up beside that training
(`FlowCost`), not the time of a batch alone. Where the router only estimates lengths
(`Search.loss`), equal instances that get requests in turn are examined as well.

Among equal steps the one with the smaller sum of both times is better, then the one that trains on
fewer GPUs. No GPU is on both sides. With `memo` off the rollouts of each split are planned anew,
with the same result in more time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from ...errors import InvalidInput
from .costs import Costs
from .layout_tree import LayoutNode, LayoutTree, Note
from .lengths import Ints, Strata, hands_of
from .rollout_dp import RolloutDpTable
from .shapes import NEVER, Layout, Price, Search

STRATA, STRATA_MOST = 64, 256  # least and most groups of requests (Libra: always 64)


@dataclass(frozen=True)
class Instance:
    """A rollout instance, and its run of the length-sorted batch.

    Attributes:
        degree: Number of its GPUs.
        first: Index of its shortest request.
        requests: Number of its requests.
        shortest, longest: Total tokens of its shortest and longest request.
        ns: How long it takes.
    """

    degree: int
    first: int
    requests: int
    shortest: int
    longest: int
    ns: int


@dataclass(frozen=True)
class Split:
    """One split, with the best of both sides.

    Attributes:
        gpus: GPUs of both sides.
        layout, price: The training side.
        instances: The rollout side, short requests first.
        rollout_ns: How long the rollouts take.
        spare: Rollout GPUs without which the step takes as long; where requests are dealt in turn,
            the idle ones.
    """

    gpus: int
    layout: Layout
    price: Price
    instances: tuple[Instance, ...]
    rollout_ns: int
    spare: int

    @property
    def train_gpus(self) -> int:
        """How many GPUs train."""
        return self.layout.gpus

    @property
    def rollout_gpus(self) -> int:
        """GPUs that are left to rollouts, idle ones included."""
        return self.gpus - self.layout.gpus

    @property
    def idle(self) -> int:
        """Rollout GPUs without an instance, because a further instance would not shorten the
        rollouts.
        """
        return self.rollout_gpus - sum(one.degree for one in self.instances)

    @property
    def step_ns(self) -> int:
        """How long a step takes."""
        return max(self.price.ns, self.rollout_ns)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key; the smallest is the best split."""
        return self.step_ns, self.price.ns + self.rollout_ns, self.train_gpus


@dataclass(frozen=True)
class SplitPlan:
    """All splits that can run, the best first."""

    gpus: int
    splits: tuple[Split, ...]

    @property
    def best(self) -> Split:
        """The split with the shortest step."""
        return self.splits[0]

    def roomy(self, slack: float) -> Split:
        """The split with the most rollout GPUs among those that are nearly as good as the best.

        Its step is longer by at most the fraction `slack`. Lengths are only estimates, so GPUs that
        do not shorten the training are better used for rollouts.
        """
        near = [s for s in self.splits if s.step_ns <= self.best.step_ns * (1 + slack)]
        return min(near, key=lambda s: (s.train_gpus, s.rank)) if slack else self.best


def train_sizes(gpus: int, search: Search) -> list[int]:
    """The numbers of training GPUs that are examined, ascending."""
    grain = search.granularity
    least = -(-max(1, search.min_train) // grain) * grain
    return list(range(least, gpus - max(1, search.min_rollout) + 1, grain))


def groups_for(gpus: int) -> int:
    """Number of groups of requests: 64, doubled until there is a group for each GPU, at most 256.

    By doubling, each cut between fewer groups is also a cut between more groups, so more GPUs are
    never worse.
    """
    groups = STRATA
    while groups < min(gpus, STRATA_MOST):
        groups *= 2
    return groups


def plan(costs: Costs, gpus: int, search: Search, note: Note | None = None,
         memo: bool = True) -> SplitPlan:
    """Plans `gpus` GPUs. O(layouts + gpus x degrees x strata ** 2).

    Args:
        costs: Prices of layouts and instances.
        gpus: GPUs to divide.
        search: Bounds of the search.
        note: Called with every node of every layout search tree.
        memo: Whether one rollout table serves all splits.

    Raises:
        InvalidInput: No split can run; the message says what prevents it.
    """
    sizes = train_sizes(gpus, search)
    if not sizes:
        raise InvalidInput(f"{gpus} GPUs: too few for {search.min_train} that train and "
                           f"{search.min_rollout} that roll out, in steps of "
                           f"{search.granularity}")
    trained = _trained(costs, sizes, search, note, memo)
    best = [one for _, one in trained if one is not None]
    if not best:
        raise InvalidInput(_hopeless(costs, gpus, sizes, search, False))
    most = gpus - min(layout.gpus for layout, _ in best)
    rollouts = _Rollouts(costs, gpus, most, search, memo)
    found = [split for one in best if (split := rollouts.split(*one)) is not None]
    if not found:
        raise InvalidInput(_hopeless(costs, gpus, sizes, search, True))
    return SplitPlan(gpus, tuple(sorted(found, key=lambda s: s.rank)))


def _trained(costs: Costs, sizes: list[int], search: Search, note: Note | None, memo: bool) -> (
        list[tuple[int, tuple[Layout, Price] | None]]):
    """The best layout of each size.

    All layouts are priced in one call, because an external command may compute the prices.
    """
    if not memo:
        return [(size, LayoutTree(costs, search, note).best(size)) for size in sizes]
    tree = LayoutTree(costs, search, note)
    layouts = [tree.layouts(size) for size in sizes]
    prices = costs.train([one for some in layouts for one in some])
    ends = accumulate(len(some) for some in layouts)
    return [(size, tree.priced(size, some, prices, end - len(some)))
            for size, some, end in zip(sizes, layouts, ends, strict=True)]


class _Rollouts:
    """The rollout side of every split of one plan."""

    def __init__(self, costs: Costs, gpus: int, most: int, search: Search, memo: bool) -> None:
        self._costs, self._gpus = costs, gpus
        self._strata = costs.strata(search.strata or groups_for(gpus))
        self._search, self._ahead, self._memo = search, search.ahead, memo
        self._kept = self._planned(most, 0) if memo and not self._ahead else None

    def _planned(self, most: int, train_ns: int) -> tuple[dict[int, Ints], RolloutDpTable]:
        """Instance prices and the table for up to `most` GPUs. Where batches mix, they depend on
        the length of the training step.
        """
        strata = self._strata
        if not (self._memo and self._ahead):
            strata = replace(strata)  # a copy without cached sums, so that each plan is made anew
        segments = segments_of(self._costs, self._costs.rollout.degrees, strata, self._ahead,
                               train_ns)
        return segments, RolloutDpTable(segments, most)

    def split(self, layout: Layout, price: Price) -> Split | None:
        """The split with this training side; None if the rollouts cannot run."""
        ways = [] if self._search.dealt else [self._cut(layout, price)]
        if self._search.dealt or self._search.loss:
            ways += [self._dealt(degree, layout, price) for degree in self._costs.rollout.degrees]
        return min((way for way in ways if way.rollout_ns < NEVER), key=lambda way: way.rollout_ns,
                   default=None)

    def _cut(self, layout: Layout, price: Price) -> Split:
        """The split with the best cuts of the sorted requests."""
        left = self._gpus - layout.gpus
        segments, table = self._kept or self._planned(left, price.ns)
        ns = table.ns(left)
        instances = tuple(instance_of(*piece, self._strata, segments[piece.degree])
                          for piece in table.pieces(left)) if ns < NEVER else ()
        within = int(price.ns / (1 + self._search.loss))  # the table does not contain the loss
        spare = left - table.least_gpus(max(ns, within))
        return Split(self._gpus, layout, price, instances, lossy(ns, self._search), spare)

    def _dealt(self, degree: int, layout: Layout, price: Price) -> Split:
        """The split with the largest number of instances of one degree."""
        left = self._gpus - layout.gpus
        ns, instances = dealt_to(self._costs, degree, left // degree, self._search.ahead, price.ns)
        spare = left - degree * len(instances)
        return Split(self._gpus, layout, price, instances, ns, spare)


def lossy(ns: int, search: Search) -> int:
    """The time of cuts by length if the router only estimates lengths."""
    return min(NEVER, round(ns * (1 + search.loss))) if search.loss and ns < NEVER else ns


def dealt_to(costs: Costs, degree: int, count: int, ahead: int, train_ns: int
             ) -> tuple[int, tuple[Instance, ...]]:
    """The time of `count` equal instances that get the requests in turn, and these instances.

    The longest request is dealt first. The time is that of the slowest instance, in ns, and NEVER
    for no instance. O(instances ** 2 + requests).
    """
    if not count:
        return NEVER, ()
    hands = hands_of(costs.batch, count)
    segments = segments_of(costs, (degree,), hands, ahead, train_ns)[degree]
    instances = tuple(instance_of(degree, k, k + 1, hands, segments) for k in range(len(hands)))
    return max(one.ns for one in instances), instances


def segments_of(costs: Costs, degrees: Iterable[int], strata: Strata, ahead: int,
                train_ns: int) -> dict[int, Ints]:
    """For each degree the matrix [j, i] of the times of strata j .. i-1 on one instance, in ns."""
    if ahead:
        return {degree: costs.flow(degree, strata, ahead, train_ns) for degree in degrees}
    return {degree: costs.segments(degree, strata) for degree in degrees}


def instance_of(degree: int, first: int, end: int, strata: Strata, segments: Ints) -> Instance:
    """The instance that has strata `first` .. `end - 1`."""
    totals = strata.prompt + strata.generated
    low, high = strata.begin(first), strata.begin(end)
    return Instance(degree, low, high - low, int(totals[low]), int(totals[high - 1]),
                    int(segments[first, end]))


def _hopeless(costs: Costs, gpus: int, sizes: list[int], search: Search, trains: bool) -> str:
    """Says why no split was found. If only the layout trees can tell, searches once more with
    notes.
    """
    if trains:
        return (f"{gpus} GPUs: the rollouts cannot run in any split: the longest request does not "
                "fit into the cache of any degree; more GPUs, or shorter requests")
    cut: list[LayoutNode] = []
    _trained(costs, sizes, search, cut.append, True)
    deepest = max(len(node.path) for node in cut)  # the nodes that came nearest to a layout
    cut = [node for node in cut if node.cut and len(node.path) == deepest]
    full = [node for node in cut if node.price is not None and node.price.ns < NEVER]
    if full:
        least = min(full, key=lambda node: node.price.mem_bytes if node.price else 0)
        return f"{gpus} GPUs: no training layout can run in any split; nearest is {least.words()}"
    most = Counter(node.cut for node in cut).most_common(1)[0][0]
    return f"{gpus} GPUs: no training layout can run in any split: {most}"
