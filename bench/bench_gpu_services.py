"""Compares the mean ACT of `elastic` on GPU services with that of two simple rules, in many cells.

The cells (`gpu_services.py`) are drawn by a seed over restores of 0.3 to 30 s, fewer, as many and
more services than GPUs, degrees, steady and bursty arrivals, loads, popularities and batches. Both
simple rules see durations in advance (`oracle`); `elastic` runs with `oracle` and with `learned`
durations. The ratio of a cell is to the better rule; above 1 means that this rule was better than
`elastic`. The line names the worst cells, and the longest wait of calls that need several GPUs,
under `elastic` and under the better rule.

With `--low` the calls take 2 to 40 % of the GPUs' time, as where a trainer calls its reward models
once in a while, and there are fewer services. With `--few` the cells are one, two and four services
on one node of 8 GPUs, whose calls run on 1 to 8 GPUs each and in batches of up to 8. `--added` is
what each further call adds to the run time of a batch, as a part of its own.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import random
from collections.abc import Sequence
from typing import Any

import common
import gpu_services as cells

from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer

SEED, COUNT = 7, 105
SIZES = ((1, 8), (2, 8), (3, 16), (4, 4), (8, 8), (16, 16), (6, 4), (12, 4), (12, 8), (24, 16))
RESTORES_S = (0.3, 1.2, 3.0, 6.0, 10.0, 20.0, 30.0)
BOUND = 1.2
WORST = 8  # number of cells that the line names


def drawn(seed: int, count: int, calls: int = 400) -> list[cells.Cell]:
    """Draws cells at random; their restore times go through the list in turn."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        services, gpus = rng.choice(SIZES)
        found.append(cells.Cell(
            seed * 1000 + i, services, gpus, RESTORES_S[i % len(RESTORES_S)],
            rng.choice(("one", "one", "any", "mixed")), rng.random() < .5,
            rng.choice((.4, .8, 1.3)), rng.random() < .5, rng.choice((1, 1, 1, 8)),
            calls if gpus <= cells.NODE_GPUS else 2 * calls))
    return found


def low(seed: int, count: int) -> list[cells.Cell]:
    """Draws cells of low loads at random."""
    rng = random.Random(seed)
    return [cells.Cell(
        seed * 1000 + i, rng.choice((1, 1, 2, 3, 6, 12)), rng.choice((4, 8, 8, 16)),
        RESTORES_S[i % len(RESTORES_S)], rng.choice(("one", "any", "any", "mixed")),
        rng.random() < .5, rng.choice((.02, .05, .1, .2, .4)), rng.random() < .5,
        calls=rng.choice((30, 100, 300))) for i in range(count)]


def few(seed: int) -> list[cells.Cell]:
    """Cells of few services with batches: all of these restores, loads and kinds of arrivals."""
    return [cells.Cell(seed * 1000 + i, services, cells.NODE_GPUS, restore_s, "any", bursty, load,
                       batch=8)
            for i, (services, restore_s, bursty, load) in enumerate(itertools.product(
                (1, 2, 4), (.3, 3., 10.), (False, True), (.4, .8, 1.3)))]


def compared(cell: cells.Cell) -> list[dict[str, Any]]:
    """Returns a row for `oracle` and a row for `learned` durations."""
    facts = cells.material(cell)
    wides = (False, True) if cell.degrees != "one" else (False,)
    rules = [(name, cells.play(cell, facts, placer, "oracle")) for wide in wides for name, placer in
             (("shares", cells.Shares(facts, wide)), ("pooled", cells.Pooled(2, wide)))]
    name, best = min(rules, key=lambda rule: rule[1].mean_s)
    rows = []
    for durations in ("oracle", "learned"):
        seen = cells.play(cell, facts, make_placer("elastic"), durations)
        rows.append({"ratio": seen.mean_s / best.mean_s, "durations": durations, "better": name,
                     "cell": cell._asdict(), "elastic": seen._asdict(), "rule": best._asdict()})
    return rows


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Describes a distribution of ratios; its mean is the geometric mean."""
    ordered = sorted(ratios)
    if not ordered:
        return {}
    return {"runs": len(ordered), "median": round(ordered[len(ordered) // 2], 3),
            "mean": round(math.exp(sum(map(math.log, ordered)) / len(ordered)), 3),
            "p90": round(ordered[int(.9 * len(ordered))], 3), "worst": round(ordered[-1], 3),
            "above_bound": sum(r > BOUND for r in ordered)}


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of the printed line, from all rows."""
    by = {field: {str(value): spread([r["ratio"] for r in rows if r["cell"][field] == value])
                  for value in sorted({r["cell"][field] for r in rows})}
          for field in ("restore_s", "degrees", "load", "bursty", "skewed", "batch")}
    rows = sorted(rows, key=lambda row: -row["ratio"])
    wide = max((r for r in rows if r["elastic"]["wide_worst_s"]), default=None,
               key=lambda r: r["elastic"]["wide_worst_s"] / r["rule"]["wide_worst_s"])
    return {"ratio": spread([r["ratio"] for r in rows]), "by": by,
            "wide_calls_worst_over_rule": wide, "worst": rows[:WORST]}


def main() -> None:
    """Prints the line of the chosen cells."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tiny", action="store_true", help="few seconds, for the tests")
    p.add_argument("--seed", type=int, default=SEED)
    kind = p.add_mutually_exclusive_group()
    kind.add_argument("--few", action="store_true", help="few services with batches")
    kind.add_argument("--low", action="store_true", help="low loads")
    p.add_argument("--added", type=float, default=cells.BATCH_REST, help="see above")
    args = p.parse_args()
    if args.tiny:
        chosen = drawn(args.seed, 4, 40) + low(args.seed, 4)
    elif args.few:
        chosen = few(args.seed)
    else:
        chosen = (low if args.low else drawn)(args.seed, COUNT)
    cells.BATCH_REST = args.added
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        rows = [row for some in pool.imap(compared, chosen) for row in some]
    common.line("gpu_services", {"seed": args.seed, "few": args.few, "low": args.low,
                                 "added": args.added, "cells": len(chosen), "bound": BOUND},
                figures(rows))


if __name__ == "__main__":
    main()
