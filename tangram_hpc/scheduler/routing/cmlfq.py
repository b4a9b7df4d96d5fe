"""Pure. Causal multi-level feedback queues: which bucket a trajectory's next turn belongs to.

Law: a request starts in the smallest bucket and moves only at a tool's return, and then only as far
as both the mean and the P90 of what is believed to be left ask for. What is believed comes from a
prefix tree over what tools returned (Libra, arXiv 2606.03077: its C-MLFQ), one root a prompt and a
global one. Whole numbers only; nothing is dropped at random; memory is bounded by `TreeLimits`.

Ours, beside the paper's: where mean and P90 name two buckets, a request goes to the nearer one (in
the paper it stays, however far behind both it is); lengths lie in mergeable histograms by epoch
instead of a list of the last samples, so that trees of several ranks add up exactly and drift is
forgotten by epoch; and where the deepest known prefix lies behind the trajectory, what was
generated since is taken off it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import InvalidInput
from ..state.speed import octaves

NEAREST, AGREE, MEAN = "nearest", "agree", "mean"  # rules of moving, see `Cmlfq`
SUCCESS, FAILURE, TIMEOUT = 0, 1, 2
FORMAT = "tangram-cmlfq/1"
_NONE = -1  # the epoch of what was never seen


class ToolSignal(NamedTuple):
    """What one tool returned: its name, the payload's class (0 small, 1, 2 large), its status."""

    tool: str
    payload: int
    status: int


@dataclass(frozen=True)
class TreeLimits:
    """How a tree sees and how much it may hold. Tokens and characters are whole numbers.

    `payload_edges`: the first sizes (characters) of class 1 and class 2. `since`: take off what was
    generated since the known prefix (False is the paper's rule).
    """

    payload_edges: tuple[int, int] = (1_000, 12_000)
    depth: int = 24
    least: int = 4  # a prefix is known after so many trajectories
    enough: int = 200  # the newest epochs that hold so many are believed
    epochs: int = 8  # how many are kept
    nodes_max: int = 50_000
    since: bool = True

    def __post_init__(self) -> None:
        _ascending("payload_edges", self.payload_edges)
        if len(self.payload_edges) != 2:
            raise InvalidInput(f"cmlfq: payload_edges {list(self.payload_edges)}: two numbers")
        for name in ("depth", "least", "enough", "epochs"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"cmlfq: {name} {getattr(self, name)}: at least 1")
        if self.nodes_max < 16:
            raise InvalidInput(f"cmlfq: nodes_max {self.nodes_max}: at least 16")

    def signal(self, tool: str, size: int, status: int) -> ToolSignal:
        """The signal of a return of so many characters."""
        small, large = self.payload_edges
        return ToolSignal(tool, (size >= small) + (size >= large), status)


def bucket_of(edges: Sequence[int], tokens: int) -> int:
    """The bucket of so many remaining tokens; `edges` are the most of each but the last."""
    return bisect_left(edges, tokens)


def _ascending(name: str, edges: Sequence[int]) -> None:
    if list(edges) != sorted(set(edges)) or (edges and edges[0] < 1):
        raise InvalidInput(f"cmlfq: {name} {list(edges)}: ascending numbers from 1")


class Belief(NamedTuple):
    """What is left by a known prefix of `depth` returns, from so many trajectories."""

    mean: int
    p90: int
    depth: int
    visits: int
    own: bool  # from the prompt's own root


class LengthHistogram:
    """Lengths by octave bucket: count and sum of each, so that adding two is exact."""

    __slots__ = ("cells", "count")

    def __init__(self) -> None:
        self.cells: dict[int, tuple[int, int]] = {}
        self.count = 0

    def add(self, length: int, times: int = 1) -> None:
        """One more length; O(1)."""
        cell = octaves(length)
        n, total = self.cells.get(cell, (0, 0))
        self.cells[cell] = (n + times, total + times * length)
        self.count += times

    def absorb(self, other: LengthHistogram) -> None:
        """All of another's; O(its cells)."""
        for cell, (n, total) in other.cells.items():
            mine = self.cells.get(cell, (0, 0))
            self.cells[cell] = (mine[0] + n, mine[1] + total)
        self.count += other.count

    def beyond(self, done: int) -> tuple[int, int, int]:
        """How many are longer than `done` (to a cell's width), and mean and P90 of what they have
        left; O(cells log cells)."""
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
        raise AssertionError("a tally's tail is longer than its count")


class PrefixNode:
    """A prefix: what its trajectories had left, by epoch, and what was returned next."""

    __slots__ = ("by_epoch", "children", "recent")

    def __init__(self) -> None:
        self.by_epoch: dict[int, LengthHistogram] = {}
        self.children: dict[ToolSignal, PrefixNode] = {}
        self.recent: LengthHistogram | None = None  # the newest epochs together, while still true

    @property
    def newest(self) -> int:
        """The newest epoch in which it was seen."""
        return max(self.by_epoch, default=_NONE)

    @property
    def visits(self) -> int:
        """Trajectories that came by, of all kept epochs."""
        return sum(t.count for t in self.by_epoch.values())

    def learn(self, epoch: int, length: int) -> None:
        """One trajectory had so much left here."""
        tally = self.by_epoch.get(epoch)
        if tally is None:
            tally = self.by_epoch[epoch] = LengthHistogram()
        tally.add(length)
        self.recent = None

    def forget_before(self, epoch: int) -> None:
        """Drops what is older."""
        old = [e for e in self.by_epoch if e < epoch]
        for e in old:
            del self.by_epoch[e]
            self.recent = None

    def tally(self, enough: int) -> LengthHistogram:
        """The newest epochs that together hold enough, or all."""
        if self.recent is None:
            self.recent = LengthHistogram()
            for epoch in sorted(self.by_epoch, reverse=True):
                self.recent.absorb(self.by_epoch[epoch])
                if self.recent.count >= enough:
                    break
        return self.recent


ToolPath = Sequence[ToolSignal]


class CausalTree:
    """What was learned of whole trajectories. Prompts are told apart by any whole number."""

    def __init__(self, shape: TreeLimits | None = None) -> None:
        self.shape = shape or TreeLimits()
        self.root = PrefixNode()
        self.prompts: dict[int, PrefixNode] = {}
        self.nodes = 1
        self.newest = _NONE  # epoch

    # ---- asking ------------------------------------------------------------------------------

    def belief(self, prompt: int, path: ToolPath, generated: Sequence[int]) -> Belief | None:
        """What is left after these returns, or None where nothing is known.

        `generated[i]` is how many tokens were generated by return i. The deepest prefix that is
        known wins, at equal depth the prompt's own. O(depth + cells of one node).
        """
        best: Belief | None = None
        own = self.prompts.get(prompt)
        for node, mine in ((own, True), (self.root, False)):
            if node is not None:
                found = self._deepest(node, path, generated, mine)
                if found is not None and (best is None or found.depth > best.depth):
                    best = found
        return best

    def _deepest(self, node: PrefixNode, path: ToolPath, generated: Sequence[int], own: bool
                 ) -> Belief | None:
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
                return Belief(mean, p90, depth, count, own)
        return None

    # ---- learning ----------------------------------------------------------------------------

    def learn(self, prompt: int, epoch: int, path: ToolPath, generated: Sequence[int],
              total: int) -> None:
        """One trajectory ended with `total` generated tokens, in this epoch, of which the last
        `TreeLimits.epochs` numbers are kept. O(depth), and that of the tree in a new epoch or to
        prune.
        """
        assert len(path) == len(generated), "one count of tokens a return"
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
        """Both together, as a tree of its own: as if one had learned all. Commutative; and
        associative while `nodes_max` is not reached.

        Raises:
            InvalidInput: the two see in different ways.
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
        """It is this epoch now: what is too old goes."""
        self.newest = epoch
        first = epoch - self.shape.epochs + 1
        for node in self.prompts.values():
            _forget(node, first)
        _forget(self.root, first)
        self.prompts = {p: n for p, n in self.prompts.items() if n.by_epoch}
        self.nodes = sum(1 for _ in self.walk())

    def _bound(self) -> None:
        """Leaves go until an eighth is free: oldest epoch first, then least visited, prompts'
        before the global root's, then by name. O(n log n) once in n/8 new nodes."""
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
        """Every node: whether it is of a prompt, of which, its path."""
        tops = [(True, p, self.prompts[p]) for p in sorted(self.prompts)]
        for own, prompt, top in [*tops, (False, 0, self.root)]:
            stack: list[tuple[tuple[ToolSignal, ...], PrefixNode]] = [((), top)]
            while stack:
                path, node = stack.pop()
                yield own, prompt, path, node
                stack += [((*path, s), node.children[s])
                          for s in sorted(node.children, reverse=True)]

    def check(self) -> None:
        """The laws: the bound holds, counts add up, nothing is older than may be."""
        assert self.nodes == sum(1 for _ in self.walk()) <= self.shape.nodes_max, "nodes"
        for _, _, path, node in self.walk():
            assert len(path) <= self.shape.depth, "depth"
            assert all(self.newest - self.shape.epochs < e <= self.newest for e in node.by_epoch)
            below = sum(c.visits for c in node.children.values())
            assert below <= node.visits, f"{path}: more went on than came"
            for tally in node.by_epoch.values():
                assert tally.count == sum(n for n, _ in tally.cells.values()) > 0

    # ---- as plain values ---------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """All of it as lists and numbers, in one order; equal trees give equal values."""
        return {"format": FORMAT, "shape": _plain_shape(self.shape), "newest": self.newest,
                "nodes": [[own, prompt, [list(s) for s in path],
                           [[e, [[c, *node.by_epoch[e].cells[c]]
                                 for c in sorted(node.by_epoch[e].cells)]]
                            for e in sorted(node.by_epoch)]]
                          for own, prompt, path, node in self.walk()]}

    @staticmethod
    def from_plain(told: Any) -> CausalTree:
        """The tree of such values.

        Raises:
            InvalidInput: they are not a tree's.
        """
        try:
            if told["format"] != FORMAT:
                raise InvalidInput(f"cmlfq: format {told['format']!r} is not {FORMAT}")
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
    """Raises TypeError where what was saved has other types than `plain` gives."""
    numbers = [prompt, *(n for _, *both in path for n in both), *(e for e, _ in epochs),
               *(n for _, cells in epochs for cell in cells for n in cell)]
    if not all(type(n) is int for n in numbers) or not all(type(t) is str for t, *_ in path):
        raise TypeError("a node is not of numbers and tools' names")


def _absorb(mine: PrefixNode, other: PrefixNode) -> None:
    """Adds another's counts to a node, and all below."""
    stack = [(mine, other)]
    while stack:
        to, of = stack.pop()
        to.recent = None
        for epoch, tally in of.by_epoch.items():
            to.by_epoch.setdefault(epoch, LengthHistogram()).absorb(tally)
        stack += [(to.children.setdefault(s, PrefixNode()), c) for s, c in of.children.items()]


def _forget(top: PrefixNode, first: int) -> None:
    """Drops epochs before `first`, and what was seen in none since."""
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
    """A request under way."""

    __slots__ = ("bucket", "generated", "path", "prompt")

    def __init__(self, prompt: int) -> None:
        self.prompt, self.bucket = prompt, 0
        self.path: list[ToolSignal] = []
        self.generated: list[int] = []


class Cmlfq:
    """The queues of one rank: requests under way, each in a bucket, and the tree they teach.

    `edges`: the most remaining tokens of each bucket but the last. `rule`: `nearest` goes to the
    bucket between those of mean and P90 that is nearest, `agree` only if both name one (the
    paper's), `mean` to the mean's. Memory: the tree's bound, and O(returns) a request
    under way.

    Raises:
        InvalidInput: the edges do not ascend.
    """

    def __init__(self, tree: CausalTree, edges: Sequence[int] = (4_000, 12_000),
                 rule: str = NEAREST) -> None:
        self.tree, self.rule = tree, rule
        self._live: dict[int, _Live] = {}
        self.rebucket(edges)

    def rebucket(self, edges: Sequence[int]) -> None:
        """Other buckets from now on, as after a new plan; who is under way goes to the bucket that
        is believed of it, or to the last there is."""
        _ascending("edges", edges)
        self.edges = tuple(edges)
        for live in self._live.values():
            live.bucket = self._bucket(live, min(live.bucket, len(self.edges)))

    def _bucket(self, live: _Live, before: int) -> int:
        belief = self.tree.belief(live.prompt, live.path, live.generated) if live.path else None
        if belief is None:
            return before
        mean = bucket_of(self.edges, belief.mean)
        if self.rule == MEAN:
            return mean
        low, high = sorted((mean, bucket_of(self.edges, belief.p90)))
        return before if self.rule == AGREE and low != high else min(max(before, low), high)

    def started(self, request: int, prompt: int) -> int:
        """A request begins: the smallest bucket."""
        assert request not in self._live, f"request {request} started twice"
        self._live[request] = _Live(prompt)
        return 0

    def returned(self, request: int, signal: ToolSignal, generated: int) -> int:
        """A tool returned after so many generated tokens: the bucket for what follows."""
        live = self._live[request]
        live.path.append(signal)
        live.generated.append(generated)
        live.bucket = self._bucket(live, live.bucket)
        return live.bucket

    def believed(self, request: int) -> Belief | None:
        """What is believed to be left of it."""
        live = self._live[request]
        return self.tree.belief(live.prompt, live.path, live.generated)

    def story(self, request: int) -> tuple[int, ToolPath, Sequence[int]]:
        """Its prompt, what was returned to it, and how much it had generated by each return."""
        live = self._live[request]
        return live.prompt, live.path, live.generated

    def ended(self, request: int, total: int, epoch: int) -> None:
        """It ended by itself, with so many tokens in all: the tree learns it."""
        live = self._live.pop(request)
        self.tree.learn(live.prompt, epoch, live.path, live.generated, total)

    def dropped(self, request: int) -> None:
        """It was cut off: its length says nothing. A request that is not known is no error."""
        self._live.pop(request, None)

    def planning_copy(self, requests: Iterable[int]) -> Cmlfq:
        """Queues that go on from here by themselves with these requests, and the same tree."""
        queues = Cmlfq(self.tree, self.edges, self.rule)
        for request in requests:
            live = self._live[request]
            other = queues._live[request] = _Live(live.prompt)
            other.bucket = live.bucket
            other.path, other.generated = list(live.path), list(live.generated)
        return queues

    @property
    def under_way(self) -> int:
        """Requests between start and end."""
        return len(self._live)
