"""Checks the invariants of a simulated run from its records alone, in whole nanoseconds.

Every checker reads records, workload and cluster and nothing of the scheduler, so the checkers
cannot share a fault with the scheduler. Each returns one line for each fault. Ends count before
starts at the same instant, and an attempt that takes no time holds nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from fractions import Fraction
from itertools import pairwise

from ..domain.service import endpoint_of, service_of
from ..scheduler.state.ledger import RESIZE_GAP_NS
from .run_records import Record, RunRecords
from .workload import Cluster, WorkAction, Workload, to_ns

_Spans = dict[Hashable, list[tuple[int, int, int]]]  # held unit -> (from, to, amount)


def faults(run: RunRecords, work: Workload, cluster: Cluster) -> list[str]:
    """All faults of a run; empty if it kept every invariant."""
    return [*complete(run, work), *run_times(run, cluster), *amounts(run, work, cluster),
            *residents(run, cluster), *quotas(run, cluster)]


def complete(run: RunRecords, work: Workload) -> list[str]:
    """Checks that every action ends once, was submitted when its turn was ready, and stays on one
    node.
    """
    tries: dict[tuple[int, ...], list[Record]] = defaultdict(list)
    for r in run.records:
        tries[r.order[:3]].append(r)
    done: dict[tuple[int, ...], Record] = {key: of[-1] for key, of in tries.items()}
    found = []
    for key, of in tries.items():
        states = [r.state for r in of]
        if [r.order[3] for r in of] != [*range(len(of))] or states.index("COMPLETED") + 1 < len(of):
            found.append(f"{key}: attempts {[r.order[3] for r in of]} ended {states}")
    moved = {r.order[0] for r in run.records if r.migrated}
    for i, t in enumerate(work.trajectories):
        clock, homes = to_ns(t.start_s), set()
        for j, turn in enumerate(t.turns):
            ready = end = clock + to_ns(turn.think_s)
            for k, action in enumerate(turn.actions):
                where = f"{t.trajectory}.{j}.{k}"
                if (i, j, k) not in done:
                    found.append(f"{where}: no record")
                    continue
                r = done.pop((i, j, k))
                if not ready == r.submit <= r.start <= r.end:
                    found.append(f"{where}: ready {ready}, {r.submit}, {r.start}, {r.end}")
                if action.resource == "cpu":
                    homes.add(r.node)
                end = max(end, r.end)
            clock = end
        if len(homes) > 1 and i not in moved:
            found.append(f"{t.trajectory}: ran on {sorted(homes)}")
    return found + [f"{key}: no such action" for key in done]


def run_times(run: RunRecords, cluster: Cluster) -> list[str]:
    """Checks that attempts of one size take their run time, and that resized ones do all the work.
    """
    found, takes = [], cluster.resize_ns()
    for r in (r for r in run.records if r.state == "COMPLETED"):
        if not r.resized:
            want = r.action.run_ns(r.grants[0][1]) + r.restore
            if r.end - r.start != want:
                found.append(f"{r.trajectory} {r.order}: ran {r.end - r.start} ns, not {want}")
            continue
        cuts = [since for since, _, _ in r.grants]
        if not r.action.resize or r.action.resource != "cpu":
            found.append(f"{r.trajectory} {r.order}: may not be resized")
        if any(b - a < RESIZE_GAP_NS for a, b in pairwise(cuts)):
            found.append(f"{r.trajectory} {r.order}: resized twice within {RESIZE_GAP_NS} ns")
        if any(not 0 <= units <= r.action.degrees[-1] for _, units, _ in r.grants):
            found.append(f"{r.trajectory} {r.order}: {r.grants} of {r.action.degrees}")
        left = Fraction(1)
        for n, (since, end, units, _) in enumerate(r.spans):
            ns = max(0, end - since - (takes[r.node] if n else 0))
            left -= ns * _rate(r.action, units) if units else 0
        # An error of more than one ns of work.
        if abs(left) > _rate(r.action, r.action.degrees[-1]):
            found.append(f"{r.trajectory} {r.order}: {float(left):.2e} of its work is left")
    return found


def amounts(run: RunRecords, work: Workload, cluster: Cluster) -> list[str]:
    """Checks that all cores, GPUs and memory that are granted exist, and are granted once at a
    time.
    """
    spans: _Spans = defaultdict(list)
    nodes = {n.name: n for n in cluster.node_specs()}
    stay: dict[tuple[str, int], list[int]] = {}
    for r in run.records:
        if r.action.resource == "cpu":
            for since, end, units, cores in r.spans:
                if len(cores) != units or not set(cores) <= set(nodes[r.node].cores):
                    return [f"{r.trajectory} {r.order}: {units} units, cores {cores}"]
                for core in cores:
                    spans["core", r.node, core].append((since, end, 1))
            # The trajectory's last stay on the node.
            held = stay.setdefault((r.node, r.order[0]), [r.start, r.end])
            if r.migrated:
                held[:] = [r.start, r.end]
            held[:] = [min(held[0], r.start), max(held[1], r.end)]
        for gpu in r.gpus:
            spans["GPU", r.node, gpu].append((r.start, r.end, 1))
    room = {"core": 1, "GPU": 1}
    found = [f"{what} is lent twice" for what, held in spans.items()
             if _peak(held) > room[what[0]]]  # type: ignore[index]
    memory: _Spans = defaultdict(list)
    for (node, index), (since, end) in stay.items():
        memory[node].append((since, end, work.trajectories[index].session.mem_mib))
    return found + [f"memory of {node} is overdrawn" for node, held in memory.items()
                    if _peak(held) > nodes[str(node)].mem_mib]


def residents(run: RunRecords, cluster: Cluster) -> list[str]:
    """Checks that blocks are aligned, and that a call waits for a restore if and only if its block
    holds another service.
    """
    cost = {s.name: to_ns(s.restore_s) for s in cluster.services}
    lent = {n.name: set(n.gpus) for n in cluster.node_specs()}
    warm, found = run.head.get("services_warm", False), []
    stands: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = {}
    deaths = sorted((at, node) for node, at, _ in run.head.get("failures", ()))
    calls = [r for r in run.records if service_of(r.action.resource)]
    for r in sorted(calls, key=lambda r: (r.start, r.end)):
        while deaths and deaths[0][0] <= r.start:
            _, dead = deaths.pop(0)
            stands.update({(dead, g): ("", ()) for g in lent[dead]})
        block, size = (service_of(r.action.resource), r.gpus), len(r.gpus)
        if size != r.grants[0][1] or r.gpus != tuple(range(r.gpus[0], r.gpus[0] + size)) or (
                r.gpus[0] % size or not set(r.gpus) <= lent[r.node]):
            found.append(f"{r.trajectory} {r.order}: {r.gpus} is no aligned block of {r.node}")
        there = all(stands[r.node, g] == block if (r.node, g) in stands else warm for g in r.gpus)
        if r.restore != (0 if there else cost[block[0]]):
            found.append(f"{r.trajectory} {r.order}: restore of {r.restore} ns on {block}")
        stands.update({(r.node, g): block for g in r.gpus})
    return found


def quotas(run: RunRecords, cluster: Cluster) -> list[str]:
    """Checks that no endpoint serves more calls at once, or grants more tokens, than its quota."""
    found, calls = [], defaultdict(list)
    for r in run.records:
        if name := endpoint_of(r.action.resource):
            calls[name].append((r.start, r.end, 1))
    for spec in cluster.endpoint_specs():
        spans = sorted(calls.get(spec.name, ()))
        if _peak(spans) > spec.concurrency:
            found.append(f"endpoint {spec.name}: more than {spec.concurrency} at once")
        full = level = spec.burst_micro * 10**9
        last = 0
        for start, _, _ in spans if spec.rate_micro else ():
            level = min(full, level + (start - last) * spec.rate_micro) - 10**15
            last = start
            if level < 0:
                found.append(f"endpoint {spec.name}: no token at {start}")
                break
    return found


def _rate(action: WorkAction, units: int) -> Fraction:
    """The fraction of the work that is done in a nanosecond."""
    serial = Fraction(action.serial)
    time = Fraction(action.work_s) * 10**9 * (serial + (1 - serial) / units)
    return 1 / max(time, Fraction(1, 1 << 20))


def _peak(spans: list[tuple[int, int, int]]) -> int:
    """The largest amount that is held at once; ends come before starts at the same instant."""
    kept = [(s, e, a) for s, e, a in spans if e > s]
    steps = sorted([(e, 0, -a) for s, e, a in kept] + [(s, 1, a) for s, e, a in kept])
    level = most = 0
    for _, _, change in steps:
        level += change
        most = max(most, level)
    return most
