"""Pure. Draws a batch from a history of requests, and divides a batch into strata by length.

The planner assigns groups of requests (strata) instead of single ones, which keeps its dynamic
program small. A stratum is assigned whole, and its sums are those of all its requests. So strata
restrict only where a batch may be cut; the cost of a part is the same as without them. Nothing is
random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .shapes import Request

Ints = NDArray[np.int64]


def sorted_requests(requests: Sequence[Request]) -> list[Request]:
    """The requests in order of total length; ties are ordered by prompt and tool time."""
    return sorted(requests, key=lambda r: (r.prompt + r.generated, r.prompt, r.tool_ns))


def batch_of(history: Sequence[Request], batch: int) -> list[Request]:
    """`batch` requests that represent a history's lengths. O(n log n).

    The history is cut into `batch` equal parts, and the middle request of each part is taken. A
    history of `batch` requests is returned as it is, in order.
    """
    ordered, n = sorted_requests(history), len(history)
    return [ordered[(2 * k + 1) * n // (2 * batch)] for k in range(batch)]


@dataclass(frozen=True)
class Strata:
    """A batch in groups: arrays over its requests, and the index at which each group begins.

    Attributes:
        prompt, generated: Tokens of each request.
        tool_ns: Tool time of each request.
        turns: How often each request is sent to the engine.
        starts: Index of the first request of each group.
    """

    prompt: Ints
    generated: Ints
    tool_ns: Ints
    turns: Ints
    starts: Ints

    def __len__(self) -> int:
        return len(self.starts)

    def begin(self, group: int) -> int:
        """The index of a group's first request; for `len(self)`, the number of requests."""
        return int(self.starts[group]) if group < len(self) else len(self.prompt)

    @cached_property
    def totals(self) -> Ints:
        """The largest total (prompt plus generated tokens) of a request of each group."""
        return np.maximum.reduceat(self.prompt + self.generated, self.starts)

    @cached_property
    def longest(self) -> Ints:
        """The most tokens that one request of each group generates."""
        return np.maximum.reduceat(self.generated, self.starts)

    @cached_property
    def prompts(self) -> Ints:
        """Sum of prompt tokens of each group."""
        return np.add.reduceat(self.prompt, self.starts)

    @cached_property
    def tokens(self) -> Ints:
        """Sum of generated tokens of each group."""
        return np.add.reduceat(self.generated, self.starts)

    @cached_property
    def squares(self) -> Ints:
        """Sum of prompt ** 2 of each group."""
        return np.add.reduceat(self.prompt ** 2, self.starts)

    @cached_property
    def areas(self) -> Ints:
        """Sum of generated * (2 prompt + generated) of each group.

        It is twice the number of keys that all decode steps together read.
        """
        return np.add.reduceat(self.generated * (2 * self.prompt + self.generated), self.starts)

    @cached_property
    def contexts(self) -> Any:
        """Sum of each group's context tokens if every turn reads its whole context, as floats.

        Every context of a request counts with its mean length, prompt + generated / 2.
        """
        return np.add.reduceat(self.turns * (self.prompt + self.generated / 2), self.starts)

    @cached_property
    def context_squares(self) -> Any:
        """As `contexts`, but the sum of the squares of the contexts."""
        return np.add.reduceat(self.turns * (self.prompt + self.generated / 2) ** 2, self.starts)

    @cached_property
    def growth(self) -> tuple[Ints, Ints]:
        """Two arrays that `peaks` needs. O(requests x groups).

        The first holds the length of each request. The second holds, for each request and each last
        group, the number of requests from this one to the end of the group.
        """
        ends = np.array([self.begin(k + 1) for k in range(len(self))], np.int64)
        places = np.arange(len(self.prompt))[:, None]
        return (self.prompt + self.generated)[:, None], np.maximum(ends[None, :] - places, 0)

    def peaks(self, at_once: int) -> Any:
        """[j, i]: the most tokens that groups j .. i-1 want to hold in a cache at once.

        It is 0 for no group. All requests are assumed to begin together and to grow at the same
        rate. At most `at_once` of them decode at a time. A request that waits for a place holds
        nothing unless it returns from a tool, so the limit `at_once` is applied only where every
        request has one turn. O(requests x groups).
        """
        n, (totals, live) = len(self), self.growth
        if self.turns.max() == 1:
            live = np.minimum(live, at_once)
        high = np.maximum.reduceat(totals * live, self.starts)  # [group, last group]
        found = np.zeros((n + 1, n + 1))
        found[:n, 1:] = np.triu(np.maximum.accumulate(high[::-1])[::-1])
        return found


def strata_of(batch: Sequence[Request], most: int) -> Strata:
    """The batch in `most` groups whose sizes differ by at most one, or in one group per request."""
    ordered = sorted_requests(batch)
    groups = min(most, len(ordered))
    return _strata(ordered, [k * len(ordered) // groups for k in range(groups)])


def hands_of(batch: Sequence[Request], most: int) -> Strata:
    """The batch in `most` groups, to which requests are assigned in turn, or in one group per
    request.

    The longest request comes first and goes to the last group.
    """
    ordered = sorted_requests(batch)[::-1]
    count = min(most, len(ordered))
    hands = [ordered[k::count][::-1] for k in reversed(range(count))]
    starts = [0, *accumulate(len(hand) for hand in hands)]
    return _strata([request for hand in hands for request in hand], starts[:-1])


def _strata(ordered: Sequence[Request], starts: Sequence[int]) -> Strata:
    table = np.array([(r.prompt, r.generated, r.tool_ns, r.turns) for r in ordered], np.int64)
    prompt, generated, tool_ns, turns = table.T
    return Strata(prompt, generated, tool_ns, turns, np.array(starts, np.int64))
