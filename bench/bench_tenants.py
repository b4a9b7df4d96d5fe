"""Measures what tenants gain and suffer when they share a broker.

1. *Two trainings, simulated.* The same workload twice, the second one later by a fraction of its
   step, each for a tenant of its own. They run on one broker, and on two brokers of half its size;
   each also runs alone on the whole. The line has the mean ACT and the step of each, as ratios, and
   how many of the cores one broker needs for the mean ACT of the two halves.
2. *Shares, simulated.* Tenants that always want more than there is: two with shares of 3 and 1
   under each placer, and fifty with shares from 1 to 4. The line has, over all windows of 10 s that
   begin at a whole second, the least and the largest part of the units that the tenant
   with 3 shares held, and by how much any of the fifty was off its part, at worst.
3. *Flood, live.* A client of one tenant submits no-op functions without a pause. The line has p50
   and p99 of single calls of another tenant's client, through the broker and as direct calls,
   before the flood and during it; and beside them those of a ProcessPoolExecutor, which suffers
   only from the CPU time that the flood takes.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.config.tenants import Tenant
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.simulator.run_records import RunRecords
from tangram_hpc.simulator.simulate import simulate
from tangram_hpc.simulator.tenant_usage import busy_trajectories, simulated_usage
from tangram_hpc.simulator.workload import (
    Cluster,
    ClusterNode,
    Workload,
    WorkloadTrajectory,
    read_cluster,
    read_workload,
    together,
)

OFFSETS = (0.0, 0.25, 0.5)  # of a step
WINDOW_S = 10
TURNS = 120  # of a trajectory: more than it has time for
# placer, CPUs of a node, nodes, degrees of each action; of 16 CPUs both parts are whole numbers
SHARED = (("elastic", 16, 1, (1, 2, 4, 8)), ("elastic", 10, 1, (1, 2, 4, 8)),
          ("elastic", 16, 1, (4,)), ("elastic", 14, 1, (4,)), ("elastic", 5, 2, (1, 2)),
          ("elastic", 16, 8, (1, 2, 4)), ("fcfs:4", 14, 1, (1, 2, 4)), ("paper", 10, 1, (1, 2, 4)),
          ("first-fit", 10, 1, (1,)))
LEFT = (0.9, 0.8, 0.7, 0.6, 0.5)  # sizes that one broker is tried with


def sized(cluster: Cluster, fraction: float) -> Cluster:
    """The cluster with a fraction of the CPUs, memory and GPUs of each node, and of each quota."""
    def part(amount: float | None) -> int:
        return max(1, math.ceil(amount * fraction)) if amount else 0
    return cluster.model_copy(update={
        "nodes": tuple(n.model_copy(update={"cpus": part(n.cpus), "mem_mib": part(n.mem_mib),
                                            "gpus": part(n.gpus)}) for n in cluster.nodes),
        "endpoints": tuple(e.model_copy(update={
            "concurrency": part(e.concurrency),
            "rate_per_s": e.rate_per_s * fraction if e.rate_per_s else None,
            "burst": max(1., e.burst * fraction) if e.burst else None})
            for e in cluster.endpoints)})


def played(work: Workload, cluster: Cluster, durations: str) -> dict[str, Any]:
    """Mean ACT and step of each tenant, in seconds; the step counts from the tenant's start."""
    run: RunRecords = simulate(work, cluster, make_placer("elastic"), durations)
    starts: dict[str, float] = {}
    for one in work.trajectories:
        starts[one.tenant] = min(starts.get(one.tenant, math.inf), one.start_s)
    acts: dict[str, list[int]] = {tenant: [] for tenant in starts}
    ends: dict[str, int] = dict.fromkeys(starts, 0)
    for record in run.records:
        tenant = record.trajectory.partition("/")[0]
        acts[tenant].append(record.end - record.submit)
        ends[tenant] = max(ends[tenant], record.end)
    return {tenant: {"act_s": sum(each) / len(each) / 1e9,
                     "step_s": ends[tenant] / 1e9 - starts[tenant]}
            for tenant, each in acts.items()}


def trainings(work: Workload, cluster: Cluster, durations: str, sizes: tuple[float, ...]
              ) -> list[dict[str, Any]]:
    """A row for each offset."""
    alone = played(together([("a", work, 0)]), cluster, durations)["a"]
    half = played(together([("a", work, 0)]), sized(cluster, .5), durations)["a"]
    rows = []
    for offset in OFFSETS:
        both = together([("a", work, 0), ("b", work, offset * alone["step_s"])])
        shared = played(both, cluster, durations)
        act = sum(t["act_s"] for t in shared.values()) / 2
        step = max(t["step_s"] for t in shared.values())
        enough = 1.0
        for size in sizes:
            less = played(both, sized(cluster, size), durations)
            if sum(t["act_s"] for t in less.values()) / 2 > half["act_s"]:
                break
            enough = size
        rows.append({"offset": offset, "act_to_halves": act / half["act_s"],
                     "act_to_alone": act / alone["act_s"],
                     "slower_of_two_to_alone": max(t["act_s"] for t in shared.values())
                     / alone["act_s"], "step_to_halves": step / half["step_s"],
                     "step_to_alone": step / alone["step_s"],
                     "cores_for_the_act_of_halves": enough})
    return rows


def parts(placer: str, cpus: int, nodes: int, tenants: dict[str, Tenant],
          work: list[WorkloadTrajectory], seconds: int) -> list[dict[str, float]]:
    """The part of the units that each tenant held, in each window of a simulation."""
    cluster = Cluster(nodes=(ClusterNode(name="n", count=nodes, cpus=cpus, mem_mib=1 << 20),),
                      tenants=tenants)
    usage = simulated_usage(placer, cluster, work, seconds)
    found = []
    for first in range(1, seconds - WINDOW_S):
        held = usage.between(first, first + WINDOW_S)
        found.append({tenant: held.get(tenant, 0) / sum(held.values()) for tenant in tenants})
    return found


def shares(cases: tuple[tuple[str, int, int, tuple[int, ...]], ...], many: int,
           nodes: int, seconds: int) -> dict[str, Any]:
    """How closely shares are kept: of two tenants in each case, and of `many` on nodes of 32 CPUs.
    """
    rows = []
    for placer, cpus, number, degrees in cases:
        count = 2 * cpus * number
        windows = parts(placer, cpus, number, {"big": Tenant(shares=3), "small": Tenant()},
                        [*busy_trajectories("big", count, .5, degrees, 1, TURNS),
                         *busy_trajectories("small", count, .5, degrees, 2, TURNS)], seconds)
        big = [each["big"] for each in windows]
        rows.append({"placer": placer, "nodes": number, "cpus": cpus, "degrees": degrees,
                     "windows": len(big), "least": round(min(big), 4),
                     "largest": round(max(big), 4)})
    tenants = {f"t{k}": Tenant(shares=1 + k % 4) for k in range(many)}
    total = sum(each.shares for each in tenants.values())
    windows = parts("elastic", 32, nodes, tenants, [
        each for k in range(many)
        for each in busy_trajectories(f"t{k}", 8, 1., (1, 2, 4), k, TURNS)], seconds)
    off = [abs(each[name] * total / tenant.shares - 1)
           for each in windows for name, tenant in tenants.items()]
    return {"three_to_one": rows, "many": {
        "tenants": many, "nodes": nodes, "cpus": 32, "windows": len(windows),
        "worst_off": round(max(off), 3), "mean_off": round(sum(off) / len(off), 3)}}


def nothing() -> None:
    """A call that does nothing."""


def flood(access: str, most: int) -> None:
    """Submits no-op functions until stdin ends, at most `most` of them open at a time; prints how
    many were submitted and how many ended."""
    ended, sent, futures = threading.Event(), 0, deque[Any]()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with tangram_hpc.connect(access, tenant="flood") as client:
        while not ended.is_set():
            futures += [client.submit(nothing) for _ in range(200)]
            if not sent:
                print("begun", flush=True)
            sent += 200
            while futures and (len(futures) > most or futures[0].done()):
                futures.popleft().result()
        done = sent - sum(not future.done() for future in futures)
    print(sent, done, flush=True)


def flooded(calls: int, seconds: float, most: int) -> dict[str, Any]:
    """Latency of single calls before and during another tenant's flood, which begins `seconds`
    before they are measured and has at most `most` actions open at a time."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(cpus=2))
        small = stack.enter_context(tangram_hpc.connect(cluster.access, tenant="small"))
        direct = stack.enter_context(small.direct(term_s=3600))
        pool = stack.enter_context(ProcessPoolExecutor(1))
        ways: dict[str, Callable[[], Any]] = {
            "broker": lambda: small.submit(nothing).result(),
            "direct": lambda: direct.call(nothing),
            "pool": lambda: pool.submit(nothing).result()}
        before = {way: latency(call, calls) for way, call in ways.items()}
        other = subprocess.Popen([sys.executable, __file__, "--flood", str(cluster.access),
                                  "--open", str(most)],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None and other.stdout.readline() == "begun\n"
        began = time.monotonic()
        time.sleep(seconds)
        during = {way: latency(call, calls) for way, call in ways.items()}
        told, _ = other.communicate("")
        lasted = time.monotonic() - began
    sent, done = map(int, told.split())
    return {"before": before, "during": during, "flood_sent": sent, "flood_done": done,
            "flood_s": round(lasted, 1),
            **{f"{q}_ratio": {way: during[way][f"{q}_ms"] / before[way][f"{q}_ms"] for way in ways}
               for q in ("p50", "p99")},
            "direct_p99_over_idle_broker": during["direct"]["p99_ms"] / before["broker"]["p99_ms"]}


def latency(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """p50 and p99 of single calls, 10 ms apart, after one that does not count."""
    call()
    return common.percentiles(common.timed(call, calls, .01))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tiny", action="store_true", help="about a second, for the tests")
    p.add_argument("--workload", type=Path, default=Path("coding-200"), help="workload file")
    p.add_argument("--cluster", type=Path, default=Path("coding-200"), help="cluster file")
    p.add_argument("--cores", type=float, default=1.0, help="fraction of the cluster's cores")
    p.add_argument("--durations", choices=("oracle", "learned"), default="learned")
    p.add_argument("--calls", type=int, default=500, help="single calls before and in the flood")
    p.add_argument("--open", type=int, default=1_000_000, help="most open actions of the flood")
    part = p.add_mutually_exclusive_group()
    part.add_argument("--only-flood", action="store_true", help="without the simulations")
    part.add_argument("--only-shares", action="store_true", help="the second part alone")
    p.add_argument("--flood", default="", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.flood:
        flood(args.flood, args.open)
        return
    if args.tiny:
        work, cluster = read_workload(Path("mixed-24")), read_cluster(Path("24"))
        sizes, calls, seconds = (0.5,), 5, .1
        shared = (("elastic", 4, 1, (1, 2)),), 12, 1, WINDOW_S + 2
    else:
        work, cluster = read_workload(args.workload), read_cluster(args.cluster)
        sizes, calls, seconds = LEFT, args.calls, 3.0
        shared = SHARED, 50, 4, WINDOW_S + 11
    cluster = sized(cluster, args.cores)
    figures: dict[str, Any] = {}
    if not args.only_flood:
        if not args.only_shares:
            figures["trainings"] = trainings(work, cluster, args.durations, sizes)
        figures["shares"] = shares(*shared)
    if not args.only_shares:
        figures["flood"] = flooded(calls, seconds, args.open)
    common.line("tenants", {"workload": work.name, "cores": args.cores,
                            "durations": args.durations, "calls": calls, "open": args.open},
                figures | {"load": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
