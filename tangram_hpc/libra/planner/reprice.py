"""Pure. Computes the time of the plan in force for requests of other lengths than it was made for.

The layout and the instances stay. The requests are divided anew among the instances, in the best
way, so that a comparison with a new plan is fair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .costs import Costs
from .shapes import NEVER, Layout, Search
from .split import Instance, Split, dealt_to, groups_for, instance_of, lossy, segments_of


def reprice(costs: Costs, gpus: int, layout: Layout, degrees: Sequence[int],
             search: Search) -> Split | None:
    """The split with this layout and instances of these degrees, for the batch of `costs`.

    The instances keep their order, short requests first; with a smaller batch some may idle.
    O(instances x strata ** 2).

    Returns:
        The split; None if the plan cannot run any more: it does not fit into memory, the batch
        cannot
            be divided by it, or no instance can hold a request.
    """
    if not _divides(costs, gpus, layout):
        return None
    price = costs.train([layout])[0]
    if price.ns >= NEVER or price.mem_bytes > costs.hardware.mem_bytes:
        return None
    ways = []
    if (search.dealt or search.loss) and len(set(degrees)) == 1:
        ways.append(dealt_to(costs, degrees[0], len(degrees), search.ahead, price.ns))
    if not search.dealt:
        ways.append(_cut(costs, gpus, degrees, search, price.ns))
    ns, instances = min(ways, key=lambda way: way[0], default=(NEVER, ()))
    return Split(gpus, layout, price, instances, ns, 0) if ns < NEVER else None


def _cut(costs: Costs, gpus: int, degrees: Sequence[int], search: Search, train_ns: int
         ) -> tuple[int, tuple[Instance, ...]]:
    """The least time of these instances, over all cuts of the sorted requests."""
    strata = costs.strata(search.strata or groups_for(gpus))
    segments = segments_of(costs, sorted(set(degrees)), strata, search.ahead, train_ns)
    least = np.full(len(strata) + 1, NEVER, np.int64)
    least[0] = 0
    firsts = []
    for degree in degrees:
        takes = np.maximum(segments[degree], least[:, None])  # [j, i]
        firsts.append(takes.argmin(axis=0))
        least = takes.min(axis=0)
    ns = lossy(int(least[-1]), search)
    instances: list[Instance] = []
    at = len(strata) if ns < NEVER else 0
    for degree, first in zip(reversed(degrees), reversed(firsts), strict=True):
        begin = int(first[at])
        if begin < at:
            instances.append(instance_of(degree, begin, at, strata, segments[degree]))
        at = begin
    return ns, tuple(reversed(instances))


def _divides(costs: Costs, gpus: int, layout: Layout) -> bool:
    """Whether the layout divides this model and this batch."""
    return (layout.gpus < gpus and costs.model.layers % layout.pp == 0
            and layout.dp % layout.ep == 0 and max(1, costs.model.experts) % layout.ep == 0
            and costs.training.batch % (layout.dp * layout.micro * costs.training.steps) == 0)
