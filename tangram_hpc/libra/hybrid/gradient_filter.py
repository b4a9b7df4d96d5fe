"""Pure. Decides which gradient payloads a core adds, and which replica computes which samples.

Replicas die and come late, so a core may receive gradients that belong to another step or plan.
Each payload carries a header, and it is added only if the header agrees with the plan of the
running step.

Invariants: a payload is added completely or not at all, at most once, and only in the step whose
plan its header names. Every refusal has a reason, so that refusals can be counted. Every sample of
a step has one owner; the core computes the samples of a replica whose payload does not arrive.
"""

from __future__ import annotations

from ...domain.hybrid import ContributorId, GradientHeader, StepPlan


def split(samples: int, parts: int) -> list[tuple[int, int]]:
    """Cuts `samples` into `parts` contiguous ranges (begin, end) whose sizes differ by at most one.

    Larger ranges come first. O(parts).
    """
    size, more = divmod(samples, parts)
    ends = [size * (n + 1) + min(n + 1, more) for n in range(parts)]
    return list(zip([0, *ends], ends, strict=False))


def contributors(plan: StepPlan, core: int) -> list[ContributorId]:
    """The replicas whose gradients are added to this core."""
    return [contributor for contributor in plan.counting if contributor.core == core]


class GradientFilter:
    """Decides during one step which payloads a core adds.

    Args:
        plan: The plan of the running step.
        counting: The contributors of this core, with the number of samples that each was given.
            Payloads of all other replicas are refused.
        size, dtype: Number of elements of the gradient, and numpy's name of their type.
    """

    def __init__(self, plan: StepPlan, counting: dict[ContributorId, int], size: int, dtype: str
                 ) -> None:
        self._plan, self._size, self._dtype, self._samples = plan, size, dtype, counting
        self._given = {contributor.replica: contributor for contributor in counting}
        self._open = dict.fromkeys(self._given)

    @property
    def missing(self) -> list[int]:
        """Replicas that were given samples, have not answered, and were not evicted."""
        return [n for n in self._open if self._samples[self._given[n]]]

    def evict(self, replica: int, generation: int) -> None:
        """Refuses every later payload of this replica in this generation."""
        contributor = self._given.get(replica)
        if contributor is not None and contributor.generation == generation:
            self._open.pop(replica, None)

    def refusal(self, header: GradientHeader) -> str:
        """The first field of a payload's header that is wrong; "" if the payload is to be added.

        `again` means that it was added before or that its replica was evicted. A call that returns
        "" counts the payload as added, so the next call with the same header returns `again`.
        """
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
