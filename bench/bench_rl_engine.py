"""Compares the simulated rollout engine and training step with measurements of Libra's authors.

Their table has 8 A800, Qwen3-14B, batch 512, and 1 K to 32 K tokens. All times are simulated; the
speed of this machine does not matter.

`engines`: tokens/s of 8 x TP1 and of 1 x TP8. A number of trajectories, whose total lengths are
drawn evenly from a bucket, begin at once and are given to the instances in turn. The figure covers
the time from the first start to the last end; in brackets is the figure while all of them run.
`again`: tokens that are read again for each generated token. `rollout_32k_over_1k`: how many times
as long 24 GPUs take for sequences of 32 K tokens as for sequences of 1 K; `training_...`: the same
for an optimizer step of the scenario's batch in its best layout.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import common

import tangram_hpc.libra.simulation
from tangram_hpc.libra.planner.costs import AnalyticCosts
from tangram_hpc.libra.planner.layout_tree import LayoutTree
from tangram_hpc.libra.planner.rollout_cost import RolloutCost
from tangram_hpc.libra.planner.shapes import Request
from tangram_hpc.libra.simulation.rl_engine import DecodeWork, SimulatedEngine
from tangram_hpc.libra.simulation.rl_scenario import Scenario, read_rl_scenario

SCENARIO = Path(tangram_hpc.libra.simulation.__file__).parent / "examples" / "rl-48.toml"
BUCKETS = ((200, 2_048), (16_384, 32_768))
SECOND = 10**9


class Kind(NamedTuple):
    """A kind of trajectory: its prompt, its number of turns, the sizes and times of its tools."""

    turns: int
    prompt: int
    tool: int
    tool_s: float


KINDS = (Kind(1, 500, 0, 0.0), Kind(12, 1200, 200, 1.5))
Turns = tuple[int, list[tuple[int, int, float]]]  # prompt; (generated, returned, seconds) a turn


def drawn(kind: Kind, count: int, low: int, high: int, rng: random.Random) -> list[Turns]:
    """Draws `count` trajectories of total lengths from `low` to `high`."""
    found = []
    for _ in range(count):
        total = rng.randint(low, high)
        prompt = min(kind.prompt, total // 2)
        turns = max(1, min(kind.turns, (total - prompt) // 64))
        each = (total - prompt) // turns
        tool = min(kind.tool, each // 2)
        found.append((prompt, [(each - tool, tool, kind.tool_s) for _ in range(turns)]))
    return found


def played(cost: RolloutCost, degree: int, ones: list[Turns]) -> tuple[float, SimulatedEngine]:
    """Returns the seconds until all trajectories have ended on one engine; all begin at once."""
    engine = SimulatedEngine(cost, degree, cost.rollout.max_batch)
    at, context = [0] * len(ones), [prompt for prompt, _ in ones]
    back: list[tuple[int, int]] = []  # when tools return
    for one, (prompt, turns) in enumerate(ones):
        engine.add(0, DecodeWork(one, prompt, turns[0][0]))
    now = 0
    while (due := engine.due()) is not None or back:
        if back and (due is None or back[0][0] <= due):
            now, one = heapq.heappop(back)
            engine.add(now, DecodeWork(one, context[one], ones[one][1][at[one]][0]))
            continue
        assert due is not None
        now, ended = due, engine.finish(due)
        if ended is None:
            continue
        generated, returned, seconds = ones[ended][1][at[ended]]
        context[ended] += generated + returned
        at[ended] += 1
        if at[ended] < len(ones[ended][1]):
            heapq.heappush(back, (now + round(seconds * SECOND), ended))
    return now / SECOND, engine


def fleet(cost: RolloutCost, degree: int, ones: list[Turns]) -> dict[str, float]:
    """Eight GPUs as instances of one degree."""
    count = 8 // degree
    runs = [played(cost, degree, ones[k::count]) for k in range(min(count, len(ones)))]
    generated = sum(g for _, turns in ones for g, _, _ in turns)
    given = sum(prompt + sum(t for _, t, _ in turns[:-1]) for prompt, turns in ones)
    mean = sum(prompt + sum(g + t for g, t, _ in turns) / 2 for prompt, turns in ones) / len(ones)
    seats = min(cost.rollout.max_batch, len(ones) // count or 1, int(cost.kv_tokens(degree) / mean))
    return {"tokens_s": round(generated / max(s for s, _ in runs)),
            "while_all_run": round(count * seats / cost.step_s(degree, seats, seats * mean)),
            "again": round((sum(e.read for _, e in runs) - given) / generated, 2)}


def engines(cost: RolloutCost, flights: tuple[int, ...]) -> list[dict[str, Any]]:
    """Returns the rates for each bucket, kind and number of trajectories that begin at once."""
    found = []
    for kind in KINDS:
        for low, high in BUCKETS:
            for count in flights:
                ones = drawn(kind, count, low, high, random.Random(1))
                small, large = fleet(cost, 1, ones), fleet(cost, 8, ones)
                found.append({
                    "turns": kind.turns, "tokens": [low, high], "at_once": count,
                    "8xTP1": small, "1xTP8": large,
                    "ratio": round(small["tokens_s"] / large["tokens_s"], 2),
                    "ratio_while_all_run": round(
                        small["while_all_run"] / large["while_all_run"], 2)})
    return found


def growth(cost: RolloutCost, a_gpu: int) -> dict[str, float]:
    """Returns how much longer rollouts of 32 K take than of 1 K, by degree, for `a_gpu` per GPU."""
    found = {}
    for degree in cost.rollout.degrees:
        short, long = (played(cost, degree, [(200, [(n - 200, 0, 0.0)])] * (a_gpu * degree))[0]
                       for n in (1_024, 32_768))
        found[f"TP{degree}"] = round(long / short, 1)
    return found


def training(scenario: Scenario, gpus: int) -> float:
    """Returns how much longer a step of 32 K takes than one of 1 K, each in its best layout."""
    took = []
    for length in (1_024, 32_768):
        costs = AnalyticCosts(scenario.model, scenario.hardware, scenario.training,
                              scenario.rollout, [Request(0, length)])
        best = LayoutTree(costs, scenario.planner.search()).best(gpus)
        assert best is not None
        took.append(best[1].ns)
    return round(took[1] / took[0], 1)


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    scenario = read_rl_scenario(SCENARIO)
    cost = RolloutCost(scenario.model, scenario.hardware, scenario.rollout)
    bare = replace(scenario, hardware=replace(scenario.hardware, update_s=0.0))
    flights, a_gpu = ((8, 16), (2,)) if tiny else ((8, 16, 64, 128, 192, 256, 512),
                                                   (2, 5, 10, 20, 64))
    common.line("rl_engine", {"scenario": scenario.name, "batch": scenario.batch}, {
        "published": {"0-2K": [1852, 591], "16-32K": [430, 1220], "rollout": 95, "training": 3.9},
        "engines": engines(cost, flights),
        "rollout_32k_over_1k": {str(n): growth(cost, n) for n in a_gpu},
        "training_32k_over_1k": training(scenario, 24),
        "training_without_update_s": training(bare, 24)})


if __name__ == "__main__":
    main()
