"""Pure. Requests in order of length: a batch out of a history, and a batch in strata.

Law: a stratum is assigned whole; its sums are those of all its requests, so strata restrict only
where a batch may be cut and lose nothing of what it costs. Nothing is drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .shapes import Request

Ints = NDArray[np.int64]


def sorted_requests(requests: Sequence[Request]) -> list[Request]:
    """Shortest first, by total length; equal ones by prompt and tool time."""
    return sorted(requests, key=lambda r: (r.total, r.prompt, r.tool_ns))


def batch_of(history: Sequence[Request], batch: int) -> list[Request]:
    """`batch` requests that are spread over the history's lengths as it is: the middle of each of
    so many equal shares of it. O(n log n). A history of `batch` requests is itself."""
    ordered, n = sorted_requests(history), len(history)
    return [ordered[(2 * k + 1) * n // (2 * batch)] for k in range(batch)]


@dataclass(frozen=True)
class Strata:
    """A sorted batch, in groups: each array has one entry a group."""

    counts: Ints
    prompts: Ints  # sum of tokens
    generated: Ints  # sum of tokens
    squares: Ints  # sum of prompt ** 2
    areas: Ints  # sum of generated * (2 prompt + generated): twice the key-steps in the cache
    members: tuple[tuple[Request, ...], ...]

    def __len__(self) -> int:
        return len(self.members)


def strata_of(batch: Sequence[Request], most: int) -> Strata:
    """The batch in `most` groups whose sizes differ by at most one, or one a request."""
    ordered = sorted_requests(batch)
    groups = min(most, len(ordered))
    cuts = [k * len(ordered) // groups for k in range(groups + 1)]
    members = tuple(tuple(ordered[a:b]) for a, b in pairwise(cuts))

    def sums(of: list[list[int]]) -> Ints:
        return np.array([sum(one) for one in of], np.int64)

    return Strata(
        counts=np.array([len(m) for m in members], np.int64),
        prompts=sums([[r.prompt for r in m] for m in members]),
        generated=sums([[r.generated for r in m] for m in members]),
        squares=sums([[r.prompt ** 2 for r in m] for m in members]),
        areas=sums([[r.generated * (2 * r.prompt + r.generated) for r in m] for m in members]),
        members=members)
