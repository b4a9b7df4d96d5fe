"""Measures how long a plan takes, and how much time one table for all splits saves.

The planner keeps the rollout table and the prices of segments from one split to the next. Of the
two other variants one computes the table for each split again, and one the prices as well. All
three must give the same plan.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from common import arguments, line

from tangram_hpc.libra.planner.costs import AnalyticCosts
from tangram_hpc.libra.planner.lengths import Ints, Strata
from tangram_hpc.libra.planner.shapes import (
    Hardware,
    ModelShape,
    Request,
    Rollout,
    Search,
    Training,
)
from tangram_hpc.libra.planner.split import SplitPlan, plan

DENSE = ModelShape("14b", 40, 5120, 40, 8, 128, 17408, 151936)
MOE = ModelShape("30b-a3b", 48, 2048, 32, 4, 128, 0, 151936, experts=128, top_k=8, expert_ffn=768)
HARDWARE = Hardware("a800", 8, 80 << 30, 312e12, 2.039e12, 200e9, 3.125e9)


class KeptSegments(AnalyticCosts):
    """Costs that keep the prices of segments, for the variant that does not keep the tables."""

    def segments(self, degree: int, strata: Strata) -> Ints:
        """Asked once for each degree and length."""
        kept: dict[tuple[int, int], Ints] = self.__dict__.setdefault("kept", {})
        if (degree, len(strata)) not in kept:
            kept[degree, len(strata)] = super().segments(degree, strata)
        return kept[degree, len(strata)]


def history(seed: int, mean: int) -> list[Request]:
    """Lengths with a long tail, as agents have them."""
    r = random.Random(seed)
    return [Request(r.randint(200, 2000), min(38000, 1 + int(r.lognormvariate(0, 1.1) * mean / 2)))
            for _ in range(4096)]


def least(times: int, ways: list[tuple[Callable[[], AnalyticCosts], bool]], gpus: int
          ) -> list[tuple[float, SplitPlan]]:
    """Returns for each variant the least CPU seconds of several plans, and the last plan. Each plan
    is of a new problem. The variants take turns, because other programs share this machine."""
    took, found = [[0.0] * times for _ in ways], list[SplitPlan]()
    for n in range(times):
        found = []
        for each, (problem, memo) in zip(took, ways, strict=True):
            costs = problem()
            began = time.process_time()
            found.append(plan(costs, gpus, Search(), memo=memo))
            each[n] = time.process_time() - began
    return list(zip(map(min, took), found, strict=True))


def case(model: ModelShape, batch: int, gpus: int, times: int) -> dict[str, Any]:
    """One problem, planned three ways."""
    def problem(kind: type[AnalyticCosts]) -> Callable[[], AnalyticCosts]:
        return lambda: kind(model, HARDWARE, Training(batch), Rollout(), lengths)

    lengths = history(1, 4000)
    ways = [(problem(AnalyticCosts), True), (problem(KeptSegments), False),
            (problem(AnalyticCosts), False)]
    (memo_s, found), (kept_s, kept), (anew_s, anew) = least(times, ways, gpus)
    assert found == kept == anew, "the same plan"
    return {"model": model.name, "batch": batch, "gpus": gpus, "splits": len(found.splits),
            "train_gpus": found.best.train_gpus, "step_s": round(found.best.step_ns / 1e9, 3),
            "memo_s": round(memo_s, 4), "kept_segments_s": round(kept_s, 4),
            "unmemoised_s": round(anew_s, 4), "faster_than_kept": round(kept_s / memo_s, 2),
            "faster": round(anew_s / memo_s, 2)}


def main() -> None:
    """Measures both models at 128 GPUs, with batches that have as many divisors as real ones."""
    tiny = arguments(__doc__).tiny
    gpus, times = (16, 1) if tiny else (128, 5)
    cases = [(DENSE, 512), (DENSE, 960), (MOE, 512), (MOE, 960), (MOE, 1920)]
    figures = [case(model, batch, gpus, times) for model, batch in cases[:2 if tiny else None]]
    line("planner", {"gpus": gpus, "history": 4096, "times": times}, {"cases": figures})


if __name__ == "__main__":
    main()
