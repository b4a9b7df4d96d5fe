"""Compares `elastic` with the best simple rule where simple rules are hard to beat, by simulation.

Each regime is a kind of load, generated from a seed. A simple rule is `fcfs:K`, `first-fit` or
`static:K`; the line has the best of them by mean ACT, and the mean ACT, the 99th percentile and the
step of `elastic` as ratios to that rule's, with durations that it learns and with durations that it
is told. Simple rules use no durations. `worst` is the highest ratio of mean ACT with learned ones.
`blind` is the ratio of mean ACT, with learned durations, to the best simple rule that does not know
the load beforehand, as `static` does; `pooled` is such a rule for GPU services (`gpu_services.py`).

    rigid       actions with several degrees that keep the size with which they start, on a node of
                little, medium and much room for them, and on six nodes
    half-rigid  the same, with half of them resizable
    widths      programs of one class, each of which runs on 1, 2, 3 or 4 cores and on no other
                number, on one node and on four
    nodes       the same actions, all resizable, on 4 nodes of 24 cores, 12 of 8, or 24 of 4
    overload    the same on a quarter of the cores that they could use
    resize      the same on 24, 48, 96 and 256 cores, where each resize takes 0, 0.1 or 0.5 s
    parallel    the same work in each action, which divides among cores perfectly
    burst       800 actions at once
    services    six GPU services on 16 GPUs, whose restores take 1, 3 or 8 s
    one-service one GPU service on 16 GPUs

`--curve` instead prints what the placer's TAIL trades under overload: for the load of `overload` on
0.25, 0.29 and 0.5 of 96 cores and each TAIL, the mean ACT as a ratio to that of the simple rule
with the least, and the 99th percentile and the step as ratios to those of `fcfs:4`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from typing import Any

import common
import gpu_services

from tangram_hpc.errors import TangramError
from tangram_hpc.scheduler.placement.placers.placer_name import TAIL_MAX
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.workload import Cluster, Workload

DEGREES = [1, 2, 4, 8, 16]
FCFS = tuple(f"fcfs:{k}" for k in DEGREES)
Regime = tuple[str, Workload, Cluster, tuple[str, ...]]


def action(name: str, resource: str, work_s: float, degrees: list[int], serial: float = 0.0,
           **more: Any) -> dict[str, Any]:
    """An action of a workload file."""
    return {"name": name, "resource": resource, "work_s": round(work_s, 4), "degrees": degrees,
            "serial": serial, **more}


def trajectories(rng: random.Random, count: int, turns: int, think_s: float, spread_s: float,
                 draw: Callable[[], dict[str, Any]], mem_mib: int = 64) -> Workload:
    """A workload with one drawn action in each turn; starts are spread over `spread_s` seconds."""
    return Workload.model_validate({"name": "regime", "trajectories": [
        {"trajectory": f"t{n}", "start_s": round(rng.uniform(0, spread_s), 3),
         "session": {"mem_mib": mem_mib},
         "turns": [{"think_s": round(rng.expovariate(1 / think_s), 3), "actions": [draw()]}
                   for _ in range(turns)]} for n in range(count)]})


def coding(rng: random.Random, rigid: float = 0.0, most: int = 16, scale: float = 1.0) -> Workload:
    """Short commands of one core, and builds of some 27 s; a share `rigid` of them keeps its size.
    """
    def draw() -> dict[str, Any]:
        if rng.random() < 0.7:
            return action("shell", "cpu", rng.lognormvariate(-0.7, 0.7), [1])
        kept: dict[str, Any] = {"resize": False} if rng.random() < rigid else {}
        return action("make" if kept else "build", "cpu", 20 * rng.lognormvariate(0, 0.8),
                      [d for d in DEGREES if d <= most], round(rng.uniform(0.02, 0.2), 3), **kept)

    return trajectories(rng, max(2, round(60 * scale)), 8, 3.0, 3.0, draw)


def widths(rng: random.Random, scale: float) -> Workload:
    """Programs of one name that keep their only size. What is learned of them does not tell short
    ones from long ones."""
    def draw() -> dict[str, Any]:
        cpus = rng.randint(1, 4)
        return action("program", "cpu", cpus * rng.lognormvariate(0.4, 0.7), [cpus], resize=False)

    return trajectories(rng, max(2, round(70 * scale)), 12, 4.0, 4.0, draw)


def nodes(count: int, cpus: int, resize_s: float = 0.0) -> Cluster:
    """CPU nodes with more memory than is needed, on which each resize takes `resize_s`."""
    return Cluster.model_validate({"nodes": [
        {"name": "c", "count": count, "cpus": cpus, "mem_mib": 1 << 20, "resize_s": resize_s}]})


def gpus(services: list[str], restore_s: float) -> Cluster:
    """Two nodes of 8 GPUs, and services of one restore time."""
    return Cluster.model_validate({
        "nodes": [{"name": "g", "count": 2, "cpus": 8, "gpus": 8, "mem_mib": 1 << 20}],
        "services": [{"name": each, "restore_s": restore_s, "weights_mib": 4096}
                     for each in services]})


def calls(rng: random.Random, services: list[str], degrees: list[int], work_s: float,
          scale: float) -> Workload:
    """Calls of services that are drawn with equal chances."""
    def draw() -> dict[str, Any]:
        name = rng.choice(services)
        return action(name, f"service:{name}", rng.lognormvariate(0, 0.5) * work_s, degrees, 0.1)

    return trajectories(rng, max(2, round(150 * scale)), 4, 4.0, 40.0, draw, mem_mib=16)


def regimes(seed: int, scale: float) -> Iterator[Regime]:
    """All regimes; `scale` is the number of trajectories and cores relative to the full size."""
    def rng() -> random.Random:
        return random.Random(seed)

    def part(cpus: int) -> int:
        return max(16, round(cpus * scale))

    for cpus in (32, 96, 256):
        yield f"rigid {cpus}", coding(rng(), 1.0, scale=scale), nodes(1, part(cpus)), FCFS
    yield ("rigid 6x16", coding(rng(), 1.0, scale=scale),
           nodes(max(1, round(6 * scale)), 16), FCFS)
    yield "half-rigid 96", coding(rng(), 0.5, scale=scale), nodes(1, part(96)), FCFS
    for count, cpus in ((1, 56), (4, 14)):
        yield (f"widths {count}x{cpus}", widths(rng(), scale),
               nodes(max(1, round(count * scale)), max(4, round(cpus * scale))),
               (*FCFS, "first-fit"))
    for count, cpus in ((4, 24), (12, 8), (24, 4)):
        yield (f"nodes {count}x{cpus}", coding(rng(), most=cpus, scale=scale),
               nodes(max(1, round(count * scale)), cpus), FCFS)
    yield "overload", coding(rng(), scale=scale), nodes(1, part(24)), FCFS
    for resize_s in (0.0, 0.1, 0.5):
        for cpus in (24, 48, 96, 256):
            yield (f"resize-{resize_s:g} {cpus}", coding(rng(), scale=scale),
                   nodes(1, part(cpus), resize_s), FCFS)
    draws = rng()
    yield ("parallel", trajectories(draws, max(2, round(16 * scale)), 10, 1.0, 0.5,
                                    lambda: action("p", "cpu", 4.0, DEGREES)),
           nodes(1, part(128)), FCFS)
    yield ("burst", trajectories(draws, max(2, round(800 * scale)), 1, 0.1, 0.2,
                                 lambda: action("t", "cpu", 4 * draws.lognormvariate(0, 1.2), [1])),
           nodes(1, part(64)), FCFS)
    six = [f"s{n}" for n in range(6)]
    for restore_s in (1.0, 3.0, 8.0):
        yield (f"services {restore_s:g}", calls(rng(), six, [1, 2, 4], 3.0, scale),
               gpus(six, restore_s), ("static:4", "pooled"))
    yield ("one-service", calls(rng(), ["s"], [1, 2, 4, 8], 6.0, scale), gpus(["s"], 1.5),
           ("static:4", "pooled"))


def figures(work: Workload, cluster: Cluster, placer: str, durations: str) -> dict[str, float]:
    """Mean ACT, its 99th percentile and the step, in seconds."""
    rule = gpu_services.Pooled(2) if placer == "pooled" else make_placer(placer)
    told = simulate(work, cluster, rule, durations).figures()
    return {key: told[key] for key in ("mean_act_s", "p99_act_s", "step_s")}


def simple(work: Workload, cluster: Cluster, rules: tuple[str, ...]
           ) -> tuple[str, dict[str, dict[str, float]]]:
    """The best simple rule by mean ACT, and the figures of all that the cluster can run."""
    found: dict[str, dict[str, float]] = {}
    for rule in rules:
        try:
            found[rule] = figures(work, cluster, rule, "oracle")
        except TangramError:
            continue  # K is more than a node has
    return min(found, key=lambda rule: found[rule]["mean_act_s"]), found


def compared(work: Workload, cluster: Cluster, rules: tuple[str, ...]) -> dict[str, Any]:
    """The best simple rule that the cluster can run, and the ratios of `elastic` to it."""
    best, found = simple(work, cluster, rules)
    row: dict[str, Any] = {"rule": best, "mean_act_s": round(found[best]["mean_act_s"], 3)}
    for durations in ("learned", "oracle"):
        ours = figures(work, cluster, "elastic", durations)
        row[durations] = [round(ours[key] / found[best][key], 3) for key in ours]
    blind = min(each["mean_act_s"] for rule, each in found.items() if not rule.startswith("static"))
    row["blind"] = round(row["learned"][0] * found[best]["mean_act_s"] / blind, 3)
    return row


def curve(seed: int, scale: float) -> dict[str, Any]:
    """The ratios of `elastic` with each TAIL under overload, by the share of 96 cores."""
    rows: dict[str, Any] = {}
    for share in (0.25, 0.29, 0.5):
        work = coding(random.Random(seed), scale=scale)
        cluster = nodes(1, max(4, round(96 * share * scale)))
        best, found = simple(work, cluster, FCFS)
        row: dict[str, Any] = {"rule": best}
        for tail in range(TAIL_MAX + 1):
            row[f"elastic:{tail}"] = each = {}
            for durations in ("learned", "oracle"):
                ours = figures(work, cluster, f"elastic:{tail}", durations)
                each[durations] = [
                    round(ours[key] / found[best if key == "mean_act_s" else "fcfs:4"][key], 3)
                    for key in ours]
        rows[f"{share:g}x"] = row
    return rows


def main() -> None:
    """Prints one line for each seed."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", default="", help="only regimes whose names begin with this")
    parser.add_argument("--curve", action="store_true",
                        help="print what TAIL trades under overload, instead of the regimes")
    parser.add_argument("--tiny", action="store_true", help="about a second, for the tests")
    args = parser.parse_args()
    scale = 0.1 if args.tiny else 1.0
    for seed in args.seeds[:1] if args.tiny else args.seeds:
        if args.curve:
            common.line("tail_curve", {"seed": seed, "tiny": args.tiny}, curve(seed, scale))
            continue
        rows = {name: compared(work, cluster, rules)
                for name, work, cluster, rules in regimes(seed, scale)
                if name.startswith(args.only)}
        if not rows:
            parser.error(f"--only {args.only!r}: no regime's name begins with this; choose one of "
                         + ", ".join(name for name, *_ in regimes(seed, 0.1)))
        worst = max(row["learned"][0] for row in rows.values())
        common.line("regimes", {"seed": seed, "tiny": args.tiny, "only": args.only},
                    {"worst": worst, "regimes": rows})


if __name__ == "__main__":
    main()
