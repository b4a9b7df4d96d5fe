"""Compares a shared cluster with each tenant's own part of it, on loads that are drawn at random.

A seed draws the nodes, two to four tenants with their shares, and the load of each as in
`bench_drawn.py`. All tenants share one broker; then each runs alone on the nodes with its part of
their CPUs. By simulation, under `elastic`. With `--services` the loads are calls of GPU services,
drawn as in `gpu_services.py`, and the parts are of the GPUs; with `--batch N` up to N calls run as
one. With `--endpoints` they are calls of one endpoint, and the parts are of its concurrent calls
and of its rate. With `--sessions` memory is scarce, and each trajectory holds some in a session
from its first action to its last; the parts are of CPUs and memory.

The line has, with durations that are learned and that are told: the number of tenants; of how many
the mean ACT on the shared cluster is above 1.1 and above 1.5 times that on their own part; and the
geometric mean of these ratios and of those of the 99th percentile. `over` lists the loads with a
tenant above 1.5.
"""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

import bench_drawn
import common
import gpu_services as cells

from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.workload import Cluster, Workload, WorkloadTrajectory, together

BOUNDS = (1.1, 1.5)
SESSION_MIB = 1000
Drawn = tuple[dict[str, Workload], dict[str, int], Cluster]
# (number of nodes, CPUs of each)
_NODES = ((1, 16), (1, 48), (1, 96), (2, 24), (2, 48), (4, 8), (4, 24), (6, 16), (12, 8), (24, 4),
          (3, 32))
_SHARES = ((1, 1), (3, 1), (1, 1, 2), (1, 1, 1, 1), (1, 1))


def _load(rng: random.Random, seed: int, cpus: int, scale: float) -> Workload:
    """The load of one tenant, whose actions fit on `cpus` CPUs."""
    classes = [bench_drawn.drawn_class(rng, number, cpus) for number in range(rng.randint(1, 3))]
    turns, each = rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 1, 1, 2, 4])
    think_s, spread_s = rng.choice([.05, 1, 5, 20]), rng.choice([.1, 3, 30, 120])
    actions = scale * rng.choice([80, 200, 450])
    trajectories = max(2, min(200, round(actions / turns / each)))
    later_s = rng.choice([0, 0, 0, 5, 30])
    return bench_drawn.workload(f"drawn {seed}", random.Random(10 * seed), classes, trajectories,
                                turns, each, think_s, later_s, spread_s)


def drawn(seed: int, scale: float) -> Drawn:
    """Returns the load and the shares of each tenant of a seed, and the cluster that they share."""
    rng = random.Random(seed * 7 + 3)
    count, cpus = rng.choice(_NODES)
    shares = rng.choice([s for s in _SHARES if cpus % sum(s) == 0 and cpus // sum(s) >= 2])
    resize_s = rng.choice([0, 0, 0, .05, .3])
    least = min(shares) * cpus // sum(shares)
    works = {f"u{k}": _load(rng, seed * 100 + k, least, scale) for k in range(len(shares))}
    granted = {f"u{k}": each for k, each in enumerate(shares)}
    cluster = Cluster.model_validate({
        "nodes": [{"name": "c", "count": count, "cpus": cpus, "mem_mib": 1 << 20,
                   "resize_s": resize_s}],
        "tenants": {tenant: {"shares": each} for tenant, each in granted.items()}})
    return works, granted, cluster


def drawn_services(seed: int, scale: float) -> Drawn:
    """As `drawn`, for calls of GPU services. In a third of the seeds all tenants call one service.
    """
    rng = random.Random(seed)
    gpus = rng.choice([8, 8, 16])
    shares = rng.choice([(1, 1), (1, 1), (3, 1), (1, 1, 2)])
    same, restore_s = rng.random() < .3, rng.choice([.3, 1.2, 3., 6., 10.])
    degrees = rng.choice(["one", "any", "any"])
    works, services = {}, dict[str, None]()
    for k, each in enumerate(shares):
        facts = cells.material(cells.Cell(
            seed * 10 + k, 1 if same else rng.choice([1, 1, 2, 3]), gpus * each // sum(shares),
            restore_s, degrees, rng.random() < .5, rng.choice([.2, .5, .8, 1.2]),
            calls=max(4, round(scale * rng.choice([100, 300])))))
        prefix, most = "" if same else f"u{k}-", min(8, gpus) * each // sum(shares)
        services.update(dict.fromkeys(prefix + service.name for service in facts.cluster.services))
        works[f"u{k}"] = Workload(name="calls", trajectories=tuple(
            _renamed(one, prefix, most) for one in facts.work.trajectories))
    cluster = Cluster.model_validate({
        "nodes": [{"name": "g", "count": gpus // 8, "cpus": 8, "gpus": 8, "mem_mib": 1000}],
        "services": [{"name": name, "restore_s": restore_s} for name in services],
        "tenants": {f"u{k}": {"shares": each} for k, each in enumerate(shares)}})
    return works, {f"u{k}": each for k, each in enumerate(shares)}, cluster


def drawn_endpoints(seed: int, scale: float) -> Drawn:
    """As `drawn`, for calls of one endpoint that all tenants share."""
    rng = random.Random(seed * 17 + 5)
    shares = rng.choice([(1, 1), (1, 1), (3, 1), (1, 1, 2), (1, 1, 1, 1)])
    concurrency = max(2 * sum(shares), rng.choice([4, 8, 16, 32, 64]))
    rate_per_s = rng.choice([None, None, 2, 10, 50])
    cluster = Cluster.model_validate({
        "nodes": [{"name": "c", "cpus": 4, "mem_mib": 1 << 20}],
        "endpoints": [{"name": "api", "concurrency": concurrency, "rate_per_s": rate_per_s}],
        "tenants": {f"u{k}": {"shares": each} for k, each in enumerate(shares)}})
    works = {f"u{k}": _calls(rng, random.Random(seed * 100 + k), scale)
             for k in range(len(shares))}
    return works, {f"u{k}": each for k, each in enumerate(shares)}, cluster


def _calls(rng: random.Random, each: random.Random, scale: float) -> Workload:
    """The calls of one tenant: `rng` draws their kind, and `each` every call."""
    kinds = [(f"e{n}", math.exp(rng.uniform(math.log(.2), math.log(60))),
              rng.choice([0, .3, .8, 1.4])) for n in range(rng.choice([1, 1, 2, 3]))]
    turns, at_once = rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 1, 2, 4])
    think_s, spread_s = rng.choice([.05, 1, 5, 20]), rng.choice([.1, 3, 30, 120])
    later_s = rng.choice([0, 0, 0, 5, 30])
    trajectories = round(scale * rng.choice([80, 200, 450]) / turns / at_once)

    def call() -> dict[str, Any]:
        name, median_s, spread = each.choice(kinds)
        return {"name": name, "resource": "endpoint:api", "degrees": [1],
                "work_s": round(median_s * each.lognormvariate(0, spread), 4)}

    return Workload.model_validate({"name": "calls", "trajectories": [
        {"trajectory": f"t{n}", "start_s": round(later_s + each.uniform(0, spread_s), 3),
         "turns": [{"think_s": round(each.expovariate(1 / think_s), 3),
                    "actions": [call() for _ in range(at_once)]} for _ in range(turns)]}
        for n in range(max(2, min(200, trajectories)))]})


def drawn_sessions(seed: int, scale: float) -> Drawn:
    """As `drawn`, for trajectories whose sessions wait for memory."""
    rng = random.Random(seed * 13 + 1)
    shares = rng.choice([(1, 1), (3, 1), (1, 1, 2), (1, 1, 1, 1)])
    nodes, open_at_once = rng.choice([1, 1, 2, 4]), rng.choice([2, 4, 8]) * sum(shares)
    works = {}
    for k in range(len(shares)):
        median_s = math.exp(rng.uniform(math.log(.2), math.log(10)))
        kind = bench_drawn.Class("a", median_s, .5, .1, 1, [1], True, 0)
        turns, think_s = rng.choice([1, 4, 8, 16]), rng.choice([.05, 1, 5])
        spread_s, later_s = rng.choice([.1, 3, 30, 120]), rng.choice([0, 0, 5, 30])
        trajectories = round(scale * rng.choice([60, 150, 400]) / turns)
        works[f"u{k}"] = bench_drawn.workload(
            "sessions", random.Random(seed * 1000 + k), [kind], max(2, min(150, trajectories)),
            turns, 1, think_s, later_s, spread_s, SESSION_MIB)
    cluster = Cluster.model_validate({
        "nodes": [{"name": "c", "count": nodes, "cpus": open_at_once,
                   "mem_mib": open_at_once * SESSION_MIB}],
        "tenants": {f"u{k}": {"shares": each} for k, each in enumerate(shares)}})
    return works, {f"u{k}": each for k, each in enumerate(shares)}, cluster


def _renamed(one: WorkloadTrajectory, prefix: str, most: int) -> WorkloadTrajectory:
    """A trajectory whose services have a prefix and whose calls run on `most` GPUs at most."""
    return one.model_copy(update={"turns": tuple(turn.model_copy(update={"actions": tuple(
        call.model_copy(update={
            "name": prefix + call.name, "resource": f"service:{prefix}{call.name}",
            "degrees": tuple(d for d in call.degrees if d <= most) or (1,)})
        for call in turn.actions)}) for turn in one.turns)})


def _acts(works: dict[str, Workload], cluster: Cluster, durations: str, batch: int
          ) -> dict[str, tuple[float, float]]:
    """The mean ACT of each tenant and its 99th percentile, in ns."""
    run = cells.BatchWorld(together([(tenant, work, 0) for tenant, work in works.items()]), cluster,
                           make_placer("elastic"), durations == "oracle", batch=batch).run()
    acts: dict[str, list[int]] = {tenant: [] for tenant in works}
    for record in run.records:
        acts[record.trajectory.partition("/")[0]].append(record.end - record.submit)
    return {tenant: (sum(each) / len(each), sorted(each)[int(.99 * (len(each) - 1))])
            for tenant, each in acts.items()}


def ratios(of: Drawn, durations: str, batch: int = 1) -> dict[str, tuple[float, float]]:
    """The mean ACT of each tenant and its 99th percentile, to those on its part of the nodes."""
    works, shares, cluster = of
    shared, found = _acts(works, cluster, durations, batch), {}
    for tenant, work in works.items():
        part = _part(cluster, shares[tenant], sum(shares.values()))
        alone = _acts({tenant: work}, part, durations, batch)[tenant]
        found[tenant] = shared[tenant][0] / alone[0], shared[tenant][1] / alone[1]
    return found


def _part(cluster: Cluster, shares: int, total: int) -> Cluster:
    """The part of a cluster that is a tenant's with so many of all shares."""
    nodes = [node.model_copy(update={"cpus": node.cpus * shares // total,
                                     "gpus": node.gpus * shares // total,
                                     "mem_mib": node.mem_mib * shares // total})
             for node in cluster.nodes]
    endpoints = [each.model_copy(update={
        "concurrency": each.concurrency * shares // total,
        "rate_per_s": None if each.rate_per_s is None else each.rate_per_s * shares / total})
        for each in cluster.endpoints]
    return cluster.model_copy(update={"nodes": tuple(nodes), "endpoints": tuple(endpoints)})


DRAWS = {"cpus": drawn, "services": drawn_services, "endpoints": drawn_endpoints,
         "sessions": drawn_sessions}


def compared(seeds: range, scale: float, of: str, batch: int = 1) -> dict[str, Any]:
    """The figures of the line over these seeds, for loads of one of DRAWS."""
    draw = DRAWS[of]
    found: dict[str, Any] = {"loads": len(seeds)}
    for durations in ("learned", "oracle"):
        rows = {seed: ratios(draw(seed, scale), durations, batch) for seed in seeds}
        tenants = [each for row in rows.values() for each in row.values()]
        mean, p99 = (round(math.exp(sum(math.log(each[i]) for each in tenants) / len(tenants)), 4)
                     for i in (0, 1))
        found[durations] = {
            "tenants": len(tenants), "mean_act": mean, "p99_act": p99,
            "above": {bound: sum(each[0] > bound for each in tenants) for bound in BOUNDS},
            "over": {seed: {tenant: [round(figure, 3) for figure in each]
                            for tenant, each in row.items()}
                     for seed, row in rows.items()
                     if any(each[0] > BOUNDS[-1] for each in row.values())}}
    return found


def main() -> None:
    """Prints the line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--loads", type=int, default=100, help="how many; about 3 s each")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--services", action="store_true", help="calls of GPU services")
    kind.add_argument("--endpoints", action="store_true", help="calls of an endpoint")
    kind.add_argument("--sessions", action="store_true", help="sessions that wait for memory")
    parser.add_argument("--batch", type=int, default=1,
                        help="calls that run as one, at most; only with --services")
    parser.add_argument("--tiny", action="store_true", help="about a second, for the tests")
    args = parser.parse_args()
    if args.batch > 1 and not args.services:
        parser.error("--batch: only calls of services run in batches; add --services")
    of = next((name for name in DRAWS if getattr(args, name, False)), "cpus")
    seeds = range(args.seed, args.seed + (3 if args.tiny else args.loads))
    found = compared(seeds, 0.1 if args.tiny else 1.0, of, args.batch)
    if args.tiny and of == "cpus":  # so that the tests see all kinds
        found["with_services"] = compared(seeds, 0.1, "services", 4)
        found["with_endpoints"] = compared(seeds, 0.1, "endpoints")
        found["with_sessions"] = compared(seeds, 0.1, "sessions")
    common.line("drawn_tenants", {"seed": args.seed, "of": of, "batch": args.batch,
                                  "tiny": args.tiny, "bounds": BOUNDS}, found)


if __name__ == "__main__":
    main()
