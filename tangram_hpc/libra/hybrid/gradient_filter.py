"""Pure. Whether a gradient payload may be added, and who computes which samples.

Law: a payload is added whole or not at all, once, and only under the very plan it was computed
under; all else is told apart by a reason, so that it can be counted. Every sample of a step has one
owner; the samples of a replica whose payload does not come are its core's to compute.
"""

from __future__ import annotations

from ...domain.hybrid import Label, Seat, StepPlan


def split(samples: int, parts: int) -> list[tuple[int, int]]:
    """`samples` as contiguous ranges (begin, end) of sizes that differ by one at most, the larger
    ones first; O(parts)."""
    size, more = divmod(samples, parts)
    ends = [size * (n + 1) + min(n + 1, more) for n in range(parts)]
    return list(zip([0, *ends], ends, strict=False))


def contributors(plan: StepPlan, core: int) -> list[Seat]:
    """Those whose gradients are added to this core."""
    return [seat for seat in plan.counting if seat.core == core]


class GradientFilter:
    """What one core believes during one step.

    Args:
        counting: its seats, with the number of samples that each one was given. Whoever else
            sends anything contributes nothing.
        size, dtype: of the gradient.
    """

    def __init__(self, plan: StepPlan, counting: dict[Seat, int], size: int, dtype: str) -> None:
        self._plan, self._size, self._dtype, self._samples = plan, size, dtype, counting
        self._given = {seat.replica: seat for seat in counting}
        self._open = dict.fromkeys(self._given)

    @property
    def missing(self) -> list[int]:
        """Replicas that were given samples and have not answered, nor been expelled."""
        return [n for n in self._open if self._samples[self._given[n]]]

    def expel(self, replica: int, generation: int) -> None:
        """Nothing of this seat is added any more."""
        seat = self._given.get(replica)
        if seat is not None and seat.generation == generation:
            self._open.pop(replica, None)

    def refusal(self, label: Label) -> str:
        """Why this payload is not to be added, in one word; empty if it is, which holds once."""
        plan, seat = self._plan, self._given.get(label.replica)
        if seat is None:
            return "replica"
        for name, theirs, ours in (
                ("generation", label.generation, seat.generation),
                ("step", label.step, plan.step), ("epoch", label.epoch, plan.epoch),
                ("version", label.version, plan.version), ("size", label.size, self._size),
                ("dtype", label.dtype, self._dtype),
                ("samples", label.samples, self._samples[seat])):
            if theirs != ours:
                return name
        if label.replica not in self._open:
            return "again"
        del self._open[label.replica]
        return ""
