"""Pure. The layout search tree of training: TP, EP, PP, DP and micro-batch for a number of GPUs.

The tree is that of Libra (Algorithm 1: TREE). A branch is cut only for a reason that holds for
everything under it, and the reason can be reported. The leaves that remain are exactly the layouts
that the bounds allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from .costs import Costs
from .shapes import NEVER, Layout, Price, Prices, Search, Training


class LayoutNode(NamedTuple):
    """One node of the tree.

    Attributes:
        gpus: GPUs that train.
        path: Degrees from the root to this node, such as (("tp", 2), ("ep", 1)).
        cut: Why the node was cut; empty if it was not.
        price: The price of a leaf that was priced.
    """

    gpus: int
    path: tuple[tuple[str, int], ...]
    cut: str = ""
    price: Price | None = None

    def words(self) -> str:
        """The node as one line of text."""
        place = " ".join(f"{name}{value}" for name, value in self.path)
        if self.cut:
            return f"{self.gpus} GPUs: {place}: cut: {self.cut}"
        told = f"{self.price.ns / 1e9:.3f} s, {_gib(self.price.mem_bytes)}" if self.price else ""
        return f"{self.gpus} GPUs: {place}" + (f": {told}" if told else "")


Note = Callable[[LayoutNode], None]
LayoutPath = tuple[tuple[str, int], ...]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


@lru_cache(maxsize=4096)
def divisors(of: int) -> tuple[int, ...]:
    """All divisors, ascending. O(sqrt(of))."""
    low = [d for d in range(1, int(of ** 0.5) + 1) if of % d == 0]
    return (*low, *(of // d for d in reversed(low) if d * d != of))


class LayoutTree:
    """The trees of one problem. Values that do not depend on the number of GPUs are computed once.
    """

    def __init__(self, costs: Costs, search: Search, note: Note | None = None) -> None:
        self._costs, self._search, self._note = costs, search, note
        self._tp_cuts: dict[int, str] = {}
        self._kept: dict[int, list[tuple[int, int, list[int]]]] = {}

    def layouts(self, gpus: int) -> list[Layout]:
        """Every layout on exactly `gpus` GPUs that no structural bound cuts, in tree order."""
        if self._note is not None:
            return [layout for tp in self._costs.training.degrees
                    for layout in self._under_tp(gpus, tp, self._note)]
        experts = self._costs.model.experts or 1
        return [Layout(tp, ep, pp, dp, micro)
                for tp in self._costs.training.degrees if not gpus % tp and not self._tp_cut(tp)
                for ep in divisors(gcd(experts, gpus // tp))
                for pp, dp, micros in self._pipes(gpus // tp) if not dp % ep
                for micro in micros]

    def _pipes(self, ranks: int) -> list[tuple[int, int, list[int]]]:
        """Returns the PP and DP degrees and micro-batches for `ranks` TP groups that the bounds
        allow.

        They do not depend on TP and EP, so they are computed once.
        """
        found = self._kept.get(ranks)
        if found is None:
            found = self._kept[ranks] = []
            for pp in divisors(gcd(ranks, self._costs.model.layers)):
                dp = ranks // pp
                micros = [] if self._dp_cut(dp) else [
                    micro for micro in self._costs.training.micro_batches
                    if not self._micro_cut(pp, dp, micro)]
                if micros:
                    found.append((pp, dp, micros))
        return found

    def priced(self, gpus: int, layouts: list[Layout], prices: Prices, first: int = 0) -> (
            tuple[Layout, Price] | None):
        """The cheapest layout that fits into memory; among equal ones the first in the tree.

        `first` is the index of the first layout's price in `prices`.
        """
        room, best, least = self._costs.hardware.mem_bytes, -1, NEVER
        for k in range(first, first + len(layouts)):
            if prices.ns[k] < least and prices.mem_bytes[k] <= room:
                best, least = k, prices.ns[k]
            if self._note is not None:
                cut = self._leaf_cut(prices[k])
                self._note(LayoutNode(gpus, _path(layouts[k - first]), cut, prices[k]))
        return None if best < 0 else (layouts[best - first], prices[best])

    def best(self, gpus: int) -> tuple[Layout, Price] | None:
        """The cheapest layout on exactly `gpus` GPUs; None if there is none."""
        layouts = self.layouts(gpus)
        return self.priced(gpus, layouts, self._costs.train(layouts))

    def _leaf_cut(self, price: Price) -> str:
        room = self._costs.hardware.mem_bytes
        if price.mem_bytes > room:
            return f"memory: {_gib(price.mem_bytes)} of {_gib(room)}"
        return "it has no finite cost" if price.ns >= NEVER else ""

    # ---- the same node by node, for callers that want every node ---------------------------------

    def _under_tp(self, gpus: int, tp: int, note: Note) -> Iterator[Layout]:
        path: LayoutPath = (("tp", tp),)
        cut = f"TP does not divide {gpus} GPUs" if gpus % tp else self._tp_cut(tp)
        note(LayoutNode(gpus, path, cut))
        if cut:
            return
        for ep in divisors(self._costs.model.experts or 1):
            there = (*path, ("ep", ep))
            cut = f"EP does not divide {gpus // tp} GPUs" if gpus // tp % ep else ""
            note(LayoutNode(gpus, there, cut))
            if not cut:
                yield from self._under_ep(gpus, there, tp, ep, note)

    def _under_ep(self, gpus: int, path: LayoutPath, tp: int, ep: int,
                  note: Note) -> Iterator[Layout]:
        layers, training = self._costs.model.layers, self._costs.training
        for pp in divisors(gpus // tp):
            there, dp = (*path, ("pp", pp)), gpus // tp // pp
            cut = f"PP does not divide {layers} layers" if layers % pp else ""
            note(LayoutNode(gpus, there, cut))
            if cut:
                continue
            there = (*there, ("dp", dp))
            cut = f"EP does not divide DP {dp}" if dp % ep else self._dp_cut(dp)
            note(LayoutNode(gpus, there, cut))
            for micro in () if cut else training.micro_batches:
                layout = Layout(tp, ep, pp, dp, micro)
                if cut := self._micro_cut(pp, dp, micro):
                    note(LayoutNode(gpus, _path(layout), cut))
                else:
                    yield layout

    # ---- prunes ----------------------------------------------------------------------------------

    def _tp_cut(self, tp: int) -> str:
        if tp not in self._tp_cuts:
            self._tp_cuts[tp] = self._judge_tp(tp)
        return self._tp_cuts[tp]

    def _judge_tp(self, tp: int) -> str:
        if self._costs.hardware.gpus_per_node % tp:
            return f"TP does not divide a node of {self._costs.hardware.gpus_per_node} GPUs"
        if not self._costs.model.fits(tp):
            return "TP does not divide the model's heads or width"
        share = self._costs.tp_share(tp)
        if share > self._search.tp_share:
            return f"TP communication is {share:.2f} of compute, over {self._search.tp_share:.2f}"
        return ""

    def _dp_cut(self, dp: int) -> str:
        training = self._costs.training
        return (f"DP does not divide {_batch(training)}"
                if training.batch % (dp * training.steps) else "")

    def _micro_cut(self, pp: int, dp: int, micro: int) -> str:
        training = self._costs.training
        each, rest = divmod(training.batch, dp * micro * training.steps)
        if rest:
            return f"DP times micro-batch does not divide {_batch(training)}"
        bubble = (pp - 1) / (pp + each - 1)
        if bubble > self._search.bubble:
            return f"the pipeline idles {bubble:.2f} of the time, over {self._search.bubble:.2f}"
        return ""


def _batch(training: Training) -> str:
    """The batch in words, for messages."""
    parts = f" in {training.steps} steps" if training.steps > 1 else ""
    return f"a batch of {training.batch}{parts}"


def _path(layout: Layout) -> LayoutPath:
    return (("tp", layout.tp), ("ep", layout.ep), ("pp", layout.pp), ("dp", layout.dp),
            ("micro", layout.micro))
