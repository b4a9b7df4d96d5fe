"""Pure. Requests in order of length: a batch out of a history, and a batch in strata.

Law: a stratum is assigned whole; its sums are those of all its requests, so strata restrict only
where a batch may be cut and lose nothing of what it costs. Nothing is drawn at random.
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
    """Shortest first, by total length; equal ones by prompt and tool time."""
    return sorted(requests, key=lambda r: (r.prompt + r.generated, r.prompt, r.tool_ns))


def batch_of(history: Sequence[Request], batch: int) -> list[Request]:
    """`batch` requests that are spread over the history's lengths as it is: the middle of each of
    so many equal shares of it. O(n log n). A history of `batch` requests is itself."""
    ordered, n = sorted_requests(history), len(history)
    return [ordered[(2 * k + 1) * n // (2 * batch)] for k in range(batch)]


@dataclass(frozen=True)
class Strata:
    """A batch in groups whose longest ascend: the arrays of requests, and where each group begins
    in them."""

    prompt: Ints
    generated: Ints
    tool_ns: Ints
    turns: Ints
    starts: Ints

    def __len__(self) -> int:
        return len(self.starts)

    def begin(self, group: int) -> int:
        """The index of a group's first request; of the one after the last: how many there are."""
        return int(self.starts[group]) if group < len(self) else len(self.prompt)

    @cached_property
    def totals(self) -> Ints:
        """The longest total of each group; ascends."""
        return np.maximum.reduceat(self.prompt + self.generated, self.starts)

    @cached_property
    def longest(self) -> Ints:
        """The most tokens that a request of each group generates."""
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
        """Sum of generated * (2 prompt + generated) of each group: twice the times that the keys of
        a token are read."""
        return np.add.reduceat(self.generated * (2 * self.prompt + self.generated), self.starts)

    @cached_property
    def contexts(self) -> Any:
        """Sum of each group's tokens if every turn reads its whole context, which is that of the
        middle; floats, as are their squares."""
        return np.add.reduceat(self.turns * (self.prompt + self.generated / 2), self.starts)

    @cached_property
    def context_squares(self) -> Any:
        """The same of the contexts' squares."""
        return np.add.reduceat(self.turns * (self.prompt + self.generated / 2) ** 2, self.starts)

    @cached_property
    def growth(self) -> tuple[Ints, Ints]:
        """For each request and each last group: how long the request gets, and how many up to that
        group, it among them, are no shorter: O(requests x groups)."""
        ends = np.array([self.begin(k + 1) for k in range(len(self))], np.int64)
        places = np.arange(len(self.prompt))[:, None]
        return (self.prompt + self.generated)[:, None], np.maximum(ends[None, :] - places, 0)

    def peaks(self, at_once: int) -> Any:
        """[j, i]: the most tokens that groups j .. i-1 want to have in a cache at once, if all
        begin together and grow alike; 0 for none. Who waits for one of `at_once` places has nothing
        there if nobody comes back from a tool. O(requests x groups)."""
        n, (totals, live) = len(self), self.growth
        if self.turns.max() == 1:
            live = np.minimum(live, at_once)
        high = np.maximum.reduceat(totals * live, self.starts)  # [group, last group]
        found = np.zeros((n + 1, n + 1))
        found[:n, 1:] = np.triu(np.maximum.accumulate(high[::-1])[::-1])
        return found


def strata_of(batch: Sequence[Request], most: int) -> Strata:
    """The batch in `most` groups whose sizes differ by at most one, or one a request."""
    ordered = sorted_requests(batch)
    groups = min(most, len(ordered))
    return _strata(ordered, [k * len(ordered) // groups for k in range(groups)])


def hands_of(batch: Sequence[Request], most: int) -> Strata:
    """The batch dealt in turn to `most` groups, or one a request, from the longest on, which comes
    to the last group."""
    ordered = sorted_requests(batch)[::-1]
    count = min(most, len(ordered))
    hands = [ordered[k::count][::-1] for k in reversed(range(count))]
    starts = [0, *accumulate(len(hand) for hand in hands)]
    return _strata([request for hand in hands for request in hand], starts[:-1])


def _strata(ordered: Sequence[Request], starts: Sequence[int]) -> Strata:
    table = np.array([(r.prompt, r.generated, r.tool_ns, r.turns) for r in ordered], np.int64)
    prompt, generated, tool_ns, turns = table.T
    return Strata(prompt, generated, tool_ns, turns, np.array(starts, np.int64))
