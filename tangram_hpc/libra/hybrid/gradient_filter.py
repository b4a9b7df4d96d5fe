"""Pure. Whether a gradient payload may be added, and who computes which samples.

Law: a payload is added whole or not at all, once, and only under the very plan it was computed
under; all else is told apart by a reason, so that it can be counted. Every sample of a step has one
owner; the samples of a replica whose payload does not come are its core's to compute.
"""

from __future__ import annotations

from ...domain.hybrid import ContributorId, GradientHeader, StepPlan


def split(samples: int, parts: int) -> list[tuple[int, int]]:
    """`samples` as contiguous ranges (begin, end) of sizes that differ by one at most, the larger
    ones first; O(parts)."""
    size, more = divmod(samples, parts)
    ends = [size * (n + 1) + min(n + 1, more) for n in range(parts)]
    return list(zip([0, *ends], ends, strict=False))


def contributors(plan: StepPlan, core: int) -> list[ContributorId]:
    """Those whose gradients are added to this core."""
    return [contributor for contributor in plan.counting if contributor.core == core]


class GradientFilter:
    """What one core believes during one step.

    Args:
        counting: its contributors, with the number of samples that each one was given. Whoever else
            sends anything contributes nothing.
        size, dtype: of the gradient.
    """

    def __init__(self, plan: StepPlan, counting: dict[ContributorId, int], size: int, dtype: str
                 ) -> None:
        self._plan, self._size, self._dtype, self._samples = plan, size, dtype, counting
        self._given = {contributor.replica: contributor for contributor in counting}
        self._open = dict.fromkeys(self._given)

    @property
    def missing(self) -> list[int]:
        """Replicas that were given samples and have not answered, nor been evicted."""
        return [n for n in self._open if self._samples[self._given[n]]]

    def evict(self, replica: int, generation: int) -> None:
        """Nothing of this contributor is added any more."""
        contributor = self._given.get(replica)
        if contributor is not None and contributor.generation == generation:
            self._open.pop(replica, None)

    def refusal(self, header: GradientHeader) -> str:
        """Why this payload is not to be added, in one word; empty if it is, which holds once."""
        plan, contributor = self._plan, self._given.get(header.replica)
        if contributor is None:
            return "replica"
        for name, theirs, ours in (
                ("generation", header.generation, contributor.generation),
                ("step", header.step, plan.step), ("epoch", header.epoch, plan.epoch),
                ("version", header.version, plan.version), ("size", header.size, self._size),
                ("dtype", header.dtype, self._dtype),
                ("samples", header.samples, self._samples[contributor])):
            if theirs != ours:
                return name
        if header.replica not in self._open:
            return "again"
        del self._open[header.replica]
        return ""
