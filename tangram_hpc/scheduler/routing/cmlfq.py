"""Causal multi-level feedback queues: which bucket a trajectory's next turn belongs to. Pure.

A request starts in the smallest bucket. It moves only when a tool returns. Its next bucket follows
from the mean and the 90th percentile of the tokens that it is estimated to have left. The estimate
comes from prefix trees over tool returns: one for each prompt and a global one. Trajectories whose
tools returned similar results tend to have similar lengths. Source: Libra, arXiv 2606.03077,
section on C-MLFQ.

Three rules differ from the paper's. If mean and percentile name two buckets, a request goes to the
nearer one; in the paper it stays where it is, even if both are far away. Lengths are in mergeable
histograms by epoch instead of a list of the last samples, so that trees of several ranks add up
exactly and drift is forgotten by epoch. And if the deepest known prefix is shorter than the
trajectory, the tokens that were generated since that prefix are subtracted.

All numbers are whole, nothing is dropped at random, and memory is bounded by `TreeLimits`. An
estimate costs O(depth), learning a trajectory O(depth) amortised.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import InvalidInput
from ..state.speed import octaves

NEAREST, AGREE, MEAN = "nearest", "agree", "mean"  # the rules by which requests move, see `Cmlfq`
SUCCESS, FAILURE, TIMEOUT = 0, 1, 2
FORMAT = "tangram-cmlfq/1"
_NONE = -1  # the epoch of a prefix that was never seen


class ToolSignal(NamedTuple):
    """The return of one tool call, in classes.

    Attributes:
        tool: name of the tool.
        payload: class of the payload's size: 0 (small), 1 or 2 (large).
        status: SUCCESS, FAILURE or TIMEOUT.
    """

    tool: str
    payload: int
    status: int


@dataclass(frozen=True)
class TreeLimits:
    """The resolution and the size limits of a tree.

    Attributes:
        payload_edges: the sizes in characters at which payload classes 1 and 2 begin.
        depth: how many tool returns of a trajectory the tree distinguishes.
        least: after how many trajectories a prefix counts as known.
        enough: an estimate uses the newest epochs that together hold at least this many
            trajectories.
        epochs: how many epochs are kept.
        nodes_max: how many nodes the tree may have.
        since: whether to subtract the tokens that were generated since the known prefix; False is
            the paper's rule.
    """

    payload_edges: tuple[int, int] = (1_000, 12_000)
    depth: int = 24
    least: int = 4
    enough: int = 200
    epochs: int = 8
    nodes_max: int = 50_000
    since: bool = True

    def __post_init__(self) -> None:
        _ascending("payload_edges", self.payload_edges)
        if len(self.payload_edges) != 2:
            raise InvalidInput(f"cmlfq: payload_edges {list(self.payload_edges)}: must be two "
                               "numbers")
        for name in ("depth", "least", "enough", "epochs"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"cmlfq: {name} {getattr(self, name)}: must be at least 1")
        if self.nodes_max < 16:
            raise InvalidInput(f"cmlfq: nodes_max {self.nodes_max}: must be at least 16")

    def signal(self, tool: str, size: int, status: int) -> ToolSignal:
        """Returns the signal of a tool's return of `size` characters."""
        small, large = self.payload_edges
        return ToolSignal(tool, (size >= small) + (size >= large), status)


def bucket_of(edges: Sequence[int], tokens: int) -> int:
    """Returns the bucket for a number of remaining tokens; `edges` are as in `Cmlfq`."""
    return bisect_left(edges, tokens)


def _ascending(name: str, edges: Sequence[int]) -> None:
    if list(edges) != sorted(set(edges)) or (edges and edges[0] < 1):
        raise InvalidInput(f"cmlfq: {name} {list(edges)}: must be ascending numbers from 1")


class LengthEstimate(NamedTuple):
    """How many tokens a trajectory has left.

    Attributes:
        mean: the mean.
        p90: the 90th percentile.
        depth: how many returns the known prefix has.
        visits: from how many trajectories the estimate comes.
        own: whether these trajectories had the same prompt.
    """

    mean: int
    p90: int
    depth: int
    visits: int
    own: bool


class LengthHistogram:
    """A histogram of lengths in octave cells. Each cell has a count and a sum, so adding two
    histograms is exact.

    Attributes:
        cells: (count, sum of the lengths in tokens) of each cell.
        count: how many lengths there are.
    """

    __slots__ = ("cells", "count")

    def __init__(self) -> None:
        self.cells: dict[int, tuple[int, int]] = {}
        self.count = 0

    def add(self, length: int, times: int = 1) -> None:
        """Adds a length `times` times. O(1)."""
        cell = octaves(length)
        n, total = self.cells.get(cell, (0, 0))
        self.cells[cell] = (n + times, total + times * length)
        self.count += times

    def absorb(self, other: LengthHistogram) -> None:
        """Adds all lengths of another histogram. O(its cells)."""
        for cell, (n, total) in other.cells.items():
            mine = self.cells.get(cell, (0, 0))
            self.cells[cell] = (mine[0] + n, mine[1] + total)
        self.count += other.count

    def beyond(self, done: int) -> tuple[int, int, int]:
        """Returns how many lengths exceed `done`, and mean and 90th percentile of their excess.

        It is exact to the width of a cell. O(cells log cells).
        """
        first = octaves(done) if done > 0 else -1
        tail = [(cell, *self.cells[cell]) for cell in sorted(self.cells) if cell > first]
        count = sum(n for _, n, _ in tail)
        if not count:
            return 0, 0, 0
        mean = sum(total for _, _, total in tail) // count - done
        upto, wanted = 0, -(-9 * count // 10)
        for _, n, total in tail:
            upto += n
            if upto >= wanted:
                return count, max(0, mean), max(0, total // n - done)
        raise AssertionError("the cells of a histogram hold less than its count")


class PrefixNode:
    """A prefix of tool returns, with the lengths of the trajectories that began with it.

    Attributes:
        by_epoch: tokens that these trajectories had left, by epoch.
        children: the prefixes that are one return longer.
        recent: the newest epochs together; None if a length was learned or dropped since.
    """

    __slots__ = ("by_epoch", "children", "recent")

    def __init__(self) -> None:
        self.by_epoch: dict[int, LengthHistogram] = {}
        self.children: dict[ToolSignal, PrefixNode] = {}
        self.recent: LengthHistogram | None = None

    @property
    def newest(self) -> int:
        """The newest epoch in which the prefix was seen; -1 for none."""
        return max(self.by_epoch, default=_NONE)

    @property
    def visits(self) -> int:
        """How many trajectories of all kept epochs began with this prefix."""
        return sum(t.count for t in self.by_epoch.values())

    def learn(self, epoch: int, length: int) -> None:
        """Adds the tokens that one trajectory had left here."""
        tally = self.by_epoch.get(epoch)
        if tally is None:
            tally = self.by_epoch[epoch] = LengthHistogram()
        tally.add(length)
        self.recent = None

    def forget_before(self, epoch: int) -> None:
        """Drops the lengths of epochs before this one."""
        old = [e for e in self.by_epoch if e < epoch]
        for e in old:
            del self.by_epoch[e]
            self.recent = None

    def tally(self, enough: int) -> LengthHistogram:
        """Returns the newest epochs that together hold `enough` lengths, or else all epochs."""
        if self.recent is None:
            self.recent = LengthHistogram()
            for epoch in sorted(self.by_epoch, reverse=True):
                self.recent.absorb(self.by_epoch[epoch])
                if self.recent.count >= enough:
                    break
        return self.recent


ToolPath = Sequence[ToolSignal]


class CausalTree:
    """The prefix trees, which hold the lengths of whole trajectories.

    Attributes:
        shape: the limits of the trees.
        root: the tree of all trajectories.
        prompts: the tree of each prompt, by any whole number that names the prompt.
        nodes: how many nodes all trees have.
        newest: the current epoch; -1 before the first trajectory.
    """

    def __init__(self, shape: TreeLimits | None = None) -> None:
        self.shape = shape or TreeLimits()
        self.root = PrefixNode()
        self.prompts: dict[int, PrefixNode] = {}
        self.nodes = 1
        self.newest = _NONE

    # ---- estimating --------------------------------------------------------------------------

    def estimate(self, prompt: int, path: ToolPath, generated: Sequence[int],
                 ) -> LengthEstimate | None:
        """Estimates the tokens left after these returns; None if no prefix of the returns is known.

        The estimate comes from the deepest known prefix; if the prompt's own tree and the global
        tree know prefixes of equal depth, from the prompt's tree. O(depth + cells of one node).

        Args:
            prompt: number of the prompt.
            path: what the tools returned so far.
            generated: how many tokens had been generated at each return.
        """
        best: LengthEstimate | None = None
        own = self.prompts.get(prompt)
        for node, mine in ((own, True), (self.root, False)):
            if node is not None:
                found = self._deepest(node, path, generated, mine)
                if found is not None and (best is None or found.depth > best.depth):
                    best = found
        return best

    def _deepest(self, node: PrefixNode, path: ToolPath, generated: Sequence[int], own: bool
                 ) -> LengthEstimate | None:
        chain = [node]
        for signal in path[:self.shape.depth]:
            below = chain[-1].children.get(signal)
            if below is None:
                break
            chain.append(below)
        now = generated[-1] if generated else 0
        for depth in range(len(chain) - 1, -1, -1):
            tally = chain[depth].tally(self.shape.enough)
            if tally.count < self.shape.least:
                continue
            since = now - (generated[depth - 1] if depth else 0) if self.shape.since else 0
            count, mean, p90 = tally.beyond(since)
            if count >= self.shape.least:
                return LengthEstimate(mean, p90, depth, count, own)
        return None

    # ---- learning ----------------------------------------------------------------------------

    def learn(self, prompt: int, epoch: int, path: ToolPath, generated: Sequence[int],
              total: int) -> None:
        """Learns a trajectory that has ended.

        Costs O(depth), but O(nodes) in a new epoch or when nodes must be removed.

        Args:
            prompt: number of the prompt.
            epoch: the epoch in which it ended; epochs that are too old are ignored.
            path: what the tools returned.
            generated: how many tokens had been generated at each return.
            total: how many tokens it generated in all.
        """
        assert len(path) == len(generated), "each return needs its count of tokens"
        if epoch > self.newest:
            self._age(epoch)
        if epoch <= self.newest - self.shape.epochs:
            return
        if prompt not in self.prompts:
            self.prompts[prompt] = PrefixNode()
            self.nodes += 1
        for node in (self.prompts[prompt], self.root):
            node.learn(epoch, total)
            for signal, done in zip(path[:self.shape.depth], generated, strict=False):
                below = node.children.get(signal)
                if below is None:
                    below = node.children[signal] = PrefixNode()
                    self.nodes += 1
                node = below
                node.learn(epoch, max(0, total - done))
        self._bound()

    def merged(self, other: CausalTree) -> CausalTree:
        """Returns a new tree, as if it had learned all trajectories of both.

        Merging is commutative, and associative while `nodes_max` is not reached.

        Raises:
            InvalidInput: the trees have different limits.
        """
        if other.shape != self.shape:
            raise InvalidInput("cmlfq: trees of different shapes cannot be merged; use one "
                               "configuration on all ranks")
        both = CausalTree(self.shape)
        both._age(max(self.newest, other.newest))
        for tree in (self, other):
            _absorb(both.root, tree.root)
            for prompt, node in tree.prompts.items():
                _absorb(both.prompts.setdefault(prompt, PrefixNode()), node)
        both._age(both.newest)
        both._bound()
        return both

    def _age(self, epoch: int) -> None:
        """Makes this the current epoch and drops epochs that are too old."""
        self.newest = epoch
        first = epoch - self.shape.epochs + 1
        for node in self.prompts.values():
            _forget(node, first)
        _forget(self.root, first)
        self.prompts = {p: n for p, n in self.prompts.items() if n.by_epoch}
        self.nodes = sum(1 for _ in self.walk())

    def _bound(self) -> None:
        """Removes leaves until an eighth of the allowed nodes is free.

        Leaves of the oldest epoch are removed first, among them the least visited, then leaves of
        prompts' trees before those of the global tree, then by name. O(n log n) once in n/8 new
        nodes.
        """
        if self.nodes <= self.shape.nodes_max:
            return
        while self.nodes > self.shape.nodes_max * 7 // 8:
            leaves = sorted(((node.newest, node.visits, not own, prompt, path)
                             for own, prompt, path, node in self.walk()
                             if not node.children and (own or path)))
            for _, _, root, prompt, path in leaves[:self.nodes - self.shape.nodes_max * 7 // 8]:
                self.nodes -= 1
                if not path:
                    del self.prompts[prompt]
                    continue
                node = self.root if root else self.prompts[prompt]
                for signal in path[:-1]:
                    node = node.children[signal]
                del node.children[path[-1]]

    def walk(self) -> Iterator[tuple[bool, int, tuple[ToolSignal, ...], PrefixNode]]:
        """Yields all nodes in a fixed order, as (whether in a prompt's tree, prompt, path, node).
        """
        tops = [(True, p, self.prompts[p]) for p in sorted(self.prompts)]
        for own, prompt, top in [*tops, (False, 0, self.root)]:
            stack: list[tuple[tuple[ToolSignal, ...], PrefixNode]] = [((), top)]
            while stack:
                path, node = stack.pop()
                yield own, prompt, path, node
                stack += [((*path, s), node.children[s])
                          for s in sorted(node.children, reverse=True)]

    def check(self) -> None:
        """Asserts that the bounds hold, that counts add up, and that no epoch is too old."""
        assert self.nodes == sum(1 for _ in self.walk()) <= self.shape.nodes_max, "nodes"
        for _, _, path, node in self.walk():
            assert len(path) <= self.shape.depth, "depth"
            assert all(self.newest - self.shape.epochs < e <= self.newest for e in node.by_epoch)
            below = sum(c.visits for c in node.children.values())
            assert below <= node.visits, f"{path}: its children have more visits than it has"
            for tally in node.by_epoch.values():
                assert tally.count == sum(n for n, _ in tally.cells.values()) > 0

    # ---- as plain values ---------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """Returns the tree as lists and numbers in a fixed order; equal trees give equal values."""
        return {"format": FORMAT, "shape": _plain_shape(self.shape), "newest": self.newest,
                "nodes": [[own, prompt, [list(s) for s in path],
                           [[e, [[c, *node.by_epoch[e].cells[c]]
                                 for c in sorted(node.by_epoch[e].cells)]]
                            for e in sorted(node.by_epoch)]]
                          for own, prompt, path, node in self.walk()]}

    @staticmethod
    def from_plain(told: Any) -> CausalTree:
        """Returns the tree that `plain` gave as these values.

        Raises:
            InvalidInput: the values are not those of a tree.
        """
        try:
            if told["format"] != FORMAT:
                raise InvalidInput(f"cmlfq: the saved tree has format {told['format']!r}, but this "
                                   f"release reads {FORMAT}")
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v
                                      for k, v in told["shape"].items()}
            tree = CausalTree(TreeLimits(**fields))
            tree.newest = int(told["newest"])
            for own, prompt, path, epochs in told["nodes"]:
                _of_a_tree(prompt, path, epochs)
                node = tree.prompts.setdefault(prompt, PrefixNode()) if own else tree.root
                for signal in path:
                    node = node.children.setdefault(ToolSignal(*signal), PrefixNode())
                for epoch, cells in epochs:
                    tally = node.by_epoch[epoch] = LengthHistogram()
                    for cell, n, total in cells:
                        tally.cells[cell] = (n, total)
                        tally.count += n
            tree.nodes = sum(1 for _ in tree.walk())
            tree.check()
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError,
                AssertionError) as error:
            raise InvalidInput(f"cmlfq: not a saved tree ({type(error).__name__}: {error})"
                               ) from None
        return tree


def _of_a_tree(prompt: Any, path: Any, epochs: Any) -> None:
    """Raises TypeError if saved values have other types than those that `plain` gives."""
    numbers = [prompt, *(n for _, *both in path for n in both), *(e for e, _ in epochs),
               *(n for _, cells in epochs for cell in cells for n in cell)]
    if not all(type(n) is int for n in numbers) or not all(type(t) is str for t, *_ in path):
        raise TypeError("a node holds more than numbers and names of tools")


def _absorb(mine: PrefixNode, other: PrefixNode) -> None:
    """Adds the lengths of another node, and of all nodes below it, to a node."""
    stack = [(mine, other)]
    while stack:
        to, of = stack.pop()
        to.recent = None
        for epoch, tally in of.by_epoch.items():
            to.by_epoch.setdefault(epoch, LengthHistogram()).absorb(tally)
        stack += [(to.children.setdefault(s, PrefixNode()), c) for s, c in of.children.items()]


def _forget(top: PrefixNode, first: int) -> None:
    """Drops epochs before `first`, and nodes that were seen in no later epoch."""
    stack = [top]
    while stack:
        node = stack.pop()
        node.forget_before(first)
        gone = [s for s, c in node.children.items() if c.newest < first]
        for signal in gone:
            del node.children[signal]
        stack += node.children.values()


def _plain_shape(shape: TreeLimits) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(shape).items()}


class _Live:
    """A request that is under way.

    Attributes:
        prompt: number of its prompt.
        bucket: its bucket.
        path: what its tools returned.
        generated: how many tokens it had generated at each return.
    """

    __slots__ = ("bucket", "generated", "path", "prompt")

    def __init__(self, prompt: int) -> None:
        self.prompt, self.bucket = prompt, 0
        self.path: list[ToolSignal] = []
        self.generated: list[int] = []


class Cmlfq:
    """The queues of one rank: requests in their buckets, and the tree that learns from them.

    Memory is bounded by the tree's limits, and by O(returns) for each request under way.

    Args:
        tree: gives the estimates, and learns from requests that end.
        edges: the most remaining tokens of each bucket but the last, in ascending order.
        rule: how a request moves. Its estimate names two buckets, one by the mean and one by the
            90th percentile. `nearest`: it moves to the nearest bucket from the one to the other;
            `agree`: it moves only if both are the same (the paper's rule); `mean`: it moves to the
            bucket of the mean.

    Raises:
        InvalidInput: the edges do not ascend.
    """

    def __init__(self, tree: CausalTree, edges: Sequence[int] = (4_000, 12_000),
                 rule: str = NEAREST) -> None:
        self.tree, self.rule = tree, rule
        self._live: dict[int, _Live] = {}
        self.rebucket(edges)

    def rebucket(self, edges: Sequence[int]) -> None:
        """Changes the buckets, as after a new plan.

        Requests under way go to the bucket of their estimate; without an estimate they stay, in the
        last bucket at most.
        """
        _ascending("edges", edges)
        self.edges = tuple(edges)
        for live in self._live.values():
            live.bucket = self._bucket(live, min(live.bucket, len(self.edges)))

    def _bucket(self, live: _Live, before: int) -> int:
        estimate = self.tree.estimate(live.prompt, live.path, live.generated) if live.path else None
        if estimate is None:
            return before
        mean = bucket_of(self.edges, estimate.mean)
        if self.rule == MEAN:
            return mean
        low, high = sorted((mean, bucket_of(self.edges, estimate.p90)))
        return before if self.rule == AGREE and low != high else min(max(before, low), high)

    def started(self, request: int, prompt: int) -> int:
        """Adds a request; returns its bucket, which is the smallest one."""
        assert request not in self._live, f"request {request} started twice"
        self._live[request] = _Live(prompt)
        return 0

    def returned(self, request: int, signal: ToolSignal, generated: int) -> int:
        """Records a tool's return and the tokens generated until then; returns the next bucket."""
        live = self._live[request]
        live.path.append(signal)
        live.generated.append(generated)
        live.bucket = self._bucket(live, live.bucket)
        return live.bucket

    def estimate(self, request: int) -> LengthEstimate | None:
        """Returns the estimate of a request's remaining tokens; None if nothing is known."""
        live = self._live[request]
        return self.tree.estimate(live.prompt, live.path, live.generated)

    def story(self, request: int) -> tuple[int, ToolPath, Sequence[int]]:
        """Returns a request's prompt, its tools' returns, and the tokens up to each return."""
        live = self._live[request]
        return live.prompt, live.path, live.generated

    def ended(self, request: int, total: int, epoch: int) -> None:
        """Removes a request that ended by itself with `total` tokens, which the tree learns."""
        live = self._live.pop(request)
        self.tree.learn(live.prompt, epoch, live.path, live.generated, total)

    def dropped(self, request: int) -> None:
        """Removes a request that was cut off, without learning from it; ignores an unknown one."""
        self._live.pop(request, None)

    def planning_copy(self, requests: Iterable[int]) -> Cmlfq:
        """Returns queues that continue on their own with these requests and the same tree."""
        queues = Cmlfq(self.tree, self.edges, self.rule)
        for request in requests:
            live = self._live[request]
            other = queues._live[request] = _Live(live.prompt)
            other.bucket = live.bucket
            other.path, other.generated = list(live.path), list(live.generated)
        return queues

    @property
    def under_way(self) -> int:
        """How many requests have started and not ended."""
        return len(self._live)
