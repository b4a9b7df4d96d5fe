"""Measures how often each policy names the bucket that fits the remaining tokens of a trajectory.

The trajectories of the test were not seen before. C-MLFQ (with our rule and with the paper's) is
compared with plain MLFQ and a predictor of lengths, on the same data. In `cmlfq_shuffled` the
returns of all tools are assigned at random; it should then be no better than `cmlfq_blind`, in
which all returns are equal and only the number and lengths of turns are seen. `base_rate` always
names the most frequent bucket. `spread` is the noise in the relation between a return and what
follows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import common

from tangram_hpc.libra.simulation.rl_lengths import (
    Source,
    TrajectoryLengths,
    shuffled,
    three_phases,
)
from tangram_hpc.libra.simulation.rl_routing import Bucketing, LengthPredictor, Mlfq, play, teach
from tangram_hpc.scheduler.routing.cmlfq import AGREE, CausalTree, Cmlfq, TreeLimits

EDGES = (4_000, 12_000)
EPOCHS = 4
POLICIES: dict[str, Callable[[], Bucketing]] = {
    "cmlfq": lambda: Cmlfq(CausalTree(), EDGES),
    "cmlfq_paper": lambda: Cmlfq(CausalTree(TreeLimits(since=False)), EDGES, AGREE),
    "mlfq": lambda: Mlfq(EDGES),
    "length_predictor": lambda: LengthPredictor(EDGES),
}


def blind(trajectories: list[TrajectoryLengths]) -> list[TrajectoryLengths]:
    """Returns the trajectories with all returns made equal: only their number and lengths differ.
    """
    return [replace(one, turns=tuple(t._replace(tool="tool", chars=1, status=0)
                                     for t in one.turns)) for one in trajectories]


def score(make: Callable[[], Bucketing], train: list[TrajectoryLengths],
          test: list[TrajectoryLengths]
          ) -> dict[str, Any]:
    """Returns the share of right decisions of a policy on `test`, after it has learned `train`."""
    policy = make()
    teach(policy, train, EPOCHS)
    began = time.perf_counter()
    told = play(policy, test, EPOCHS, learn=False)
    took = time.perf_counter() - began
    found = {"accuracy": round(told.right, 3), "moved": round(told.moved, 2),
             "by_bucket": [round(v, 3) for v in told.by_bucket]}
    if isinstance(policy, Cmlfq):
        found["us_per_decision"] = round(took / max(1, told.decisions) * 1e6, 1)
        found["nodes"] = policy.tree.nodes
        found["bytes"] = len(json.dumps(policy.tree.plain(), separators=(",", ":")))
    return found


def cell(spread: float, progress: float, prompts: int, samples: int, seed: int) -> dict[str, Any]:
    """All policies at one noise and one part of the run."""
    source = Source(three_phases(spread, prompts), seed)

    def drawn(first: int, last: int) -> list[TrajectoryLengths]:
        return [source.trajectory(p, s, progress)
                for s in range(first, last) for p in range(prompts)]

    train, test = drawn(0, samples), drawn(samples, samples + max(2, samples // 4))
    lengths = [t.generated for t in test]
    told, make = play(POLICIES["mlfq"](), test, 0), POLICIES["cmlfq"]
    return {
        "spread": spread, "progress": progress, "mean_tokens": sum(lengths) // len(lengths),
        "decisions": told.decisions, "base_rate": round(told.base_rate, 3),
        **{name: score(make_one, train, test) for name, make_one in POLICIES.items()},
        "cmlfq_shuffled": score(make, shuffled(train, seed), shuffled(test, seed + 1)),
        "cmlfq_blind": score(make, blind(train), blind(test))}


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    prompts, samples, seed = (16, 8, 7) if tiny else (256, 16, 7)
    spreads = (0.06,) if tiny else (0.06, 0.12, 0.24)
    cells = [cell(spread, progress, prompts, samples, seed)
             for spread in spreads for progress in (0.5, 1.0)]
    common.line("routing", {"prompts": prompts, "samples": samples, "seed": seed,
                            "bucket_edges": EDGES}, {"cells": cells})


if __name__ == "__main__":
    main()
