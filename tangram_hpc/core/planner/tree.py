"""Pure. The training side: the tree TP -> EP -> PP -> DP -> micro-batch of one number of GPUs.

Law: a branch is cut only for a reason that holds for all that lies under it, and the reason can be
told; what is left is every layout that the bounds allow. (Libra, Algorithm 1: TREE.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from .costs import Costs
from .shapes import NEVER, Layout, Price, Search, Training


class Node(NamedTuple):
    """One node of the tree: where it is, and why it was cut; a leaf that was not cut has a price.
    """

    gpus: int  # of training
    path: tuple[tuple[str, int], ...]  # such as (("tp", 2), ("ep", 1))
    cut: str = ""
    price: Price | None = None

    def words(self) -> str:
        """One line."""
        place = " ".join(f"{name}{value}" for name, value in self.path)
        if self.cut:
            return f"{self.gpus} GPUs: {place}: cut: {self.cut}"
        told = f"{self.price.ns / 1e9:.3f} s, {_gib(self.price.mem_bytes)}" if self.price else ""
        return f"{self.gpus} GPUs: {place}" + (f": {told}" if told else "")


Note = Callable[[Node], None]
Path = tuple[tuple[str, int], ...]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


@lru_cache(maxsize=4096)
def divisors(of: int) -> tuple[int, ...]:
    """All divisors, ascending. O(sqrt)."""
    low = [d for d in range(1, int(of ** 0.5) + 1) if of % d == 0]
    return (*low, *(of // d for d in reversed(low) if d * d != of))


class Tree:
    """The trees of one problem. What does not depend on the number of GPUs is asked once."""

    def __init__(self, costs: Costs, search: Search, note: Note | None = None) -> None:
        self._costs, self._search, self._note = costs, search, note
        self._tp_cuts: dict[int, str] = {}

    def layouts(self, gpus: int) -> list[Layout]:
        """Every layout on exactly so many GPUs that no structural prune cuts."""
        return [layout for tp in self._costs.training.degrees
                for layout in self._under_tp(gpus, tp)]

    def priced(self, gpus: int, layouts: list[Layout], prices: list[Price]) -> (
            tuple[Layout, Price] | None):
        """The cheapest layout that fits into memory; of equal ones the first in the tree."""
        best: tuple[Layout, Price] | None = None
        for layout, price in zip(layouts, prices, strict=True):
            cut = self._leaf_cut(price)
            if self._note is not None:
                self._note(Node(gpus, _path(layout), cut, price))
            if not cut and (best is None or price.ns < best[1].ns):
                best = layout, price
        return best

    def best(self, gpus: int) -> tuple[Layout, Price] | None:
        """The cheapest layout on exactly so many GPUs, if there is one."""
        layouts = self.layouts(gpus)
        return self.priced(gpus, layouts, self._costs.train(layouts))

    def _leaf_cut(self, price: Price) -> str:
        room = self._costs.hardware.mem_bytes
        if price.mem_bytes > room:
            return f"memory: {_gib(price.mem_bytes)} of {_gib(room)}"
        return "it has no finite cost" if price.ns >= NEVER else ""

    def _visit(self, gpus: int, path: Path, cut: str) -> bool:
        """Notes an inner node; whether to go on under it."""
        if self._note is not None:
            self._note(Node(gpus, path, cut))
        return not cut

    def _choices(self, of: int, other: int) -> tuple[int, ...]:
        """Divisors of `of`; those that do not divide the other too are cut at once, so they are
        there only if somebody is told."""
        return divisors(of if self._note is not None else gcd(of, other))

    def _under_tp(self, gpus: int, tp: int) -> Iterator[Layout]:
        path: Path = (("tp", tp),)
        cut = f"TP does not divide {gpus} GPUs" if gpus % tp else self._tp_cut(tp)
        if not self._visit(gpus, path, cut):
            return
        experts = self._costs.model.experts
        for ep in self._choices(experts or 1, gpus // tp):
            there = (*path, ("ep", ep))
            cut = f"EP does not divide {gpus // tp} GPUs" if gpus // tp % ep else ""
            if self._visit(gpus, there, cut):
                yield from self._under_ep(gpus, there, tp, ep)

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

    def _under_ep(self, gpus: int, path: Path, tp: int, ep: int) -> Iterator[Layout]:
        layers, training = self._costs.model.layers, self._costs.training
        for pp in self._choices(gpus // tp, layers):
            there, dp = (*path, ("pp", pp)), gpus // tp // pp
            cut = f"PP does not divide {layers} layers" if layers % pp else ""
            if not self._visit(gpus, there, cut):
                continue
            there = (*there, ("dp", dp))
            cut = f"EP does not divide DP {dp}" if dp % ep else (
                f"DP does not divide {_batch(training)}"
                if training.batch % (dp * training.steps) else "")
            if not self._visit(gpus, there, cut):
                continue
            for micro in training.micro_batches:
                layout = Layout(tp, ep, pp, dp, micro)
                cut = self._micro_cut(layout)
                if not cut:
                    yield layout
                elif self._note is not None:
                    self._note(Node(gpus, _path(layout), cut))

    def _micro_cut(self, layout: Layout) -> str:
        training = self._costs.training
        each, rest = divmod(training.batch, layout.dp * layout.micro * training.steps)
        if rest:
            return f"DP times micro-batch does not divide {_batch(training)}"
        bubble = (layout.pp - 1) / (layout.pp + each - 1)
        if bubble > self._search.bubble:
            return f"the pipeline idles {bubble:.2f} of the time, over {self._search.bubble:.2f}"
        return ""


def _batch(training: Training) -> str:
    """Its words."""
    parts = f" in {training.steps} steps" if training.steps > 1 else ""
    return f"a batch of {training.batch}{parts}"


def _path(layout: Layout) -> Path:
    return (("tp", layout.tp), ("ep", layout.ep), ("pp", layout.pp), ("dp", layout.dp),
            ("micro", layout.micro))
