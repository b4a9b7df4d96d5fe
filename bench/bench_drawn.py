"""Compares `elastic` with the best simple rule on loads that are drawn at random, by simulation.

The regimes of `bench_regimes.py` were written by hand, each for a reason. Here a seed draws all:
the nodes, the classes of actions (work, degrees, serial fraction, memory, whether they can be
resized), what a resize costs, the turns of the trajectories and when they begin. So kinds of loads
come up that nobody has thought of. The simple rules are `fcfs:1` to `fcfs:16` and `first-fit`; the
best is the one with the least mean ACT.

The line has, with durations that are learned and that are told: on how many loads the mean ACT, its
99th percentile and the step are above 1.1 times those of the best simple rule, and the geometric
mean of these ratios. `over` lists the loads whose mean ACT with learned durations is above 1.1.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass
from typing import Any

import bench_regimes as regimes
import common

from tangram_hpc.simulator.workload import Cluster, Workload

RULES = (*regimes.FCFS, "first-fit")
KEYS = ("mean_act", "p99_act", "step")
BOUND = 1.1
# (number of nodes, CPUs of each)
_NODES = ((1, 8), (1, 32), (1, 96), (2, 16), (2, 48), (4, 8), (4, 24), (6, 16), (12, 8), (24, 4),
          (3, 64))


@dataclass(frozen=True)
class Class:
    """One class of actions.

    Attributes:
        name: several classes may have the same name, so that estimates mix them.
        median_s: the median of their work on one CPU.
        spread: the standard deviation of the logarithm of their work.
        serial: their serial fraction.
        weight: how often they are drawn.
        degrees: the sizes on which they run.
        resizable: whether they may be resized.
        mem_mib: the memory that each takes.
    """

    name: str
    median_s: float
    spread: float
    serial: float
    weight: float
    degrees: list[int]
    resizable: bool
    mem_mib: int


def drawn_class(rng: random.Random, number: int, cpus: int) -> Class:
    """Draws a class of actions that fit on `cpus` CPUs."""
    median = math.exp(rng.uniform(math.log(.1), math.log(40)))
    spread, serial = rng.choice([0, .3, .8, 1.4]), rng.choice([0, .02, .1, .3, .6])
    weight = rng.uniform(.1, 1)
    kind = rng.choice(["one", "one", "powers", "powers", "wide", "rigid", "some"])
    most, only = rng.choice([4, 8, 16]), rng.randint(1, min(cpus, 8))
    degrees = {"one": [1], "powers": [d for d in regimes.DEGREES if d <= cpus],
               "wide": list(range(1, min(cpus, most) + 1)), "rigid": [only],
               "some": [d for d in (2, 4, 8) if d <= cpus]}[kind]
    resizable = rng.random() < .6
    mem_mib = rng.choice([0, 0, 0, rng.choice([256, 1024])])
    name = rng.choice(["a", "b", "c"]) if rng.random() < .3 else f"k{number}"
    return Class(name, median, spread, serial, weight, degrees, resizable, mem_mib)


def workload(name: str, rng: random.Random, classes: list[Class], trajectories: int, turns: int,
             each: int, think_s: float, later_s: float, spread_s: float, session_mib: int = 16,
             ) -> Workload:
    """Draws a load from its classes, whatever was drawn for them.

    Args:
        name: its name.
        rng: what draws the actions, the pauses and the starts.
        classes: the classes of its actions.
        trajectories: how many there are.
        turns: how many each has.
        each: how many actions a turn has.
        think_s: the mean pause before a turn.
        later_s: when the first trajectory may begin.
        spread_s: over how many seconds they begin.
        session_mib: the memory that each trajectory's session takes.
    """
    def draw() -> dict[str, Any]:
        of = rng.choices(classes, [each.weight for each in classes])[0]
        more: dict[str, Any] = {} if of.resizable else {"resize": False}
        return regimes.action(of.name, "cpu", of.median_s * rng.lognormvariate(0, of.spread),
                              of.degrees, of.serial, mem_mib=of.mem_mib, **more)

    return Workload.model_validate({"name": name, "trajectories": [
        {"trajectory": f"t{n}", "start_s": round(later_s + rng.uniform(0, spread_s), 3),
         "session": {"mem_mib": session_mib},
         "turns": [{"think_s": round(rng.expovariate(1 / think_s), 3),
                    "actions": [draw() for _ in range(each)]} for _ in range(turns)]}
        for n in range(trajectories)]})


def drawn(seed: int, scale: float) -> tuple[Workload, Cluster]:
    """Returns the load of a seed; `scale` is its number of actions relative to the full size."""
    rng = random.Random(seed)
    count, cpus = rng.choice(_NODES)
    resize_s = rng.choice([0, 0, 0, .05, .3])
    classes = [drawn_class(rng, number, cpus) for number in range(rng.randint(1, 4))]
    turns, each = rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 1, 1, 2, 4])
    think_s, spread_s = rng.choice([.05, 1, 5, 20]), rng.choice([.1, 3, 30, 120])
    actions = scale * rng.choice([150, 400, 900])
    trajectories = max(4, min(400, round(actions / turns / each)))
    session_mib, mem_mib = rng.choice([16, 16, 16, 2000]), rng.choice([1 << 20] * 3 + [16000])

    work = workload(f"drawn {seed}", random.Random(10 * seed), classes, trajectories, turns, each,
                    think_s, 0, spread_s, session_mib)
    return work, Cluster.model_validate({"nodes": [
        {"name": "c", "count": count, "cpus": cpus, "mem_mib": mem_mib, "resize_s": resize_s}]})


def compared(seeds: range, scale: float) -> dict[str, Any]:
    """The figures of the line over these seeds."""
    rows = {seed: regimes.compared(*drawn(seed, scale), RULES) for seed in seeds}
    found: dict[str, Any] = {"loads": len(rows)}
    for durations in ("learned", "oracle"):
        ratios = [list(map(float, row[durations])) for row in rows.values()]
        found[durations] = {key: {
            "above": sum(each[i] > BOUND for each in ratios),
            "ratio": round(math.exp(sum(math.log(each[i]) for each in ratios) / len(ratios)), 4),
        } for i, key in enumerate(KEYS)}
    found["over"] = {seed: [row["rule"], row["learned"], row["oracle"]]
                     for seed, row in rows.items() if row["learned"][0] > BOUND}
    return found


def main() -> None:
    """Prints the line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--loads", type=int, default=100, help="how many; about a second each")
    parser.add_argument("--tiny", action="store_true", help="about a second, for the tests")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + (3 if args.tiny else args.loads))
    common.line("drawn_loads", {"seed": args.seed, "tiny": args.tiny, "bound": BOUND},
                compared(seeds, 0.1 if args.tiny else 1.0))


if __name__ == "__main__":
    main()
