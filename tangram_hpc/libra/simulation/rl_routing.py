"""The bucketing policies with which C-MLFQ is compared, and how often each decides correctly.

Invariants: all policies see the same calls in the same order: a start, each tool's return, the end.
There is one decision at each return; it is right when it names the bucket of the tokens that are
really left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...scheduler.routing.cmlfq import CausalTree, Cmlfq, ToolSignal, TreeLimits, bucket_of
from .rl_lengths import TrajectoryLengths


class Bucketing(Protocol):
    """Chooses buckets. `edges` holds the most remaining tokens of each bucket but the last."""

    edges: tuple[int, ...]

    def started(self, request: int, prompt: int) -> int:
        """The first bucket."""

    def returned(self, request: int, signal: ToolSignal, generated: int) -> int:
        """The bucket after a tool has returned."""

    def ended(self, request: int, total: int, epoch: int) -> None:
        """The request has ended with `total` generated tokens."""


class Mlfq:
    """Plain multi-level feedback queue: the bucket follows from the number of generated tokens."""

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges = tuple(edges)

    def started(self, request: int, prompt: int) -> int:
        """Always the smallest bucket."""
        return 0

    def returned(self, request: int, signal: ToolSignal, generated: int) -> int:
        """One level down for each edge that the request has outgrown."""
        return bucket_of(self.edges, generated)

    def ended(self, request: int, total: int, epoch: int) -> None:
        """Does nothing: this policy learns nothing."""


class LengthPredictor:
    """Predicts the length by the prompt; it does not see what tools return.

    The prediction is the mean length of the prompt's earlier samples, or of all samples while the
    prompt has too few. Only samples count that are longer than the tokens generated so far.
    """

    def __init__(self, edges: Sequence[int], shape: TreeLimits | None = None) -> None:
        self.edges = tuple(edges)
        self._tree = CausalTree(shape)
        self._prompts: dict[int, int] = {}

    def started(self, request: int, prompt: int) -> int:
        """The bucket of the expected length."""
        self._prompts[request] = prompt
        return self._bucket(request, 0)

    def returned(self, request: int, signal: ToolSignal, generated: int) -> int:
        """The bucket of the expected remaining tokens."""
        return self._bucket(request, generated)

    def ended(self, request: int, total: int, epoch: int) -> None:
        """Learns one more length of the prompt."""
        self._tree.learn(self._prompts.pop(request), epoch, (), (), total)

    def _bucket(self, request: int, generated: int) -> int:
        # the tree gets no tool returns, only the number of generated tokens
        estimate = self._tree.estimate(self._prompts[request], (), (generated,))
        return bucket_of(self.edges, estimate.mean) if estimate else 0


@dataclass(frozen=True)
class Accuracy:
    """How good a policy's decisions were. Shares lie between 0 and 1."""

    right: float  # fraction of right decisions
    decisions: int
    base_rate: float  # the same if every decision named the most frequent bucket
    moved: float  # context tokens that changed their bucket, over all tokens generated
    by_bucket: tuple[float, ...]  # fraction of right decisions, by the true bucket


def play(policy: Bucketing, trajectories: Iterable[TrajectoryLengths], epoch: int,
         learn: bool = True, shape: TreeLimits | None = None) -> Accuracy:
    """Plays whole trajectories one by one; without `learn` the policy does not see their ends."""
    shape, edges = shape or TreeLimits(), policy.edges
    right: Counter[int] = Counter()
    truth: Counter[int] = Counter()
    moved = generated_in_all = 0
    for request, one in enumerate(trajectories):
        bucket = policy.started(request, one.prompt)
        done, context = 0, one.prompt_tokens
        for turn in one.turns:
            done += turn.generated
            context += turn.generated + turn.tokens
            before = bucket
            bucket = policy.returned(request, shape.signal(turn.tool, turn.chars, turn.status),
                                     done)
            true = bucket_of(edges, one.generated - done)
            truth[true] += 1
            right[true] += bucket == true
            moved += context if bucket != before else 0
        generated_in_all += one.generated
        if learn:
            policy.ended(request, one.generated, epoch)
        elif isinstance(policy, Cmlfq):
            policy.dropped(request)
    n = sum(truth.values())
    return Accuracy(
        sum(right.values()) / max(1, n), n, max(truth.values(), default=0) / max(1, n),
        moved / max(1, generated_in_all),
        tuple(right[b] / truth[b] if truth[b] else 1.0
              for b in range(len(edges) + 1)))


def teach(policy: Bucketing, trajectories: Sequence[TrajectoryLengths], epochs: int = 1) -> None:
    """Teaches a policy, with the trajectories divided over `epochs` epochs."""
    for epoch in range(epochs):
        share = trajectories[epoch * len(trajectories) // epochs:
                             (epoch + 1) * len(trajectories) // epochs]
        play(policy, share, epoch)
