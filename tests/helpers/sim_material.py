"""Small random workloads and clusters for tests of the simulator, and plain references for them."""

from __future__ import annotations

import heapq
import random
from typing import Any

from tangram_hpc.simulator.workload import Cluster, Workload, WorkloadTrajectory

CLUSTER = {
    "nodes": [{"name": "c", "count": 2, "cpus": 12, "mem_mib": 900},
              {"name": "g", "cpus": 4, "gpus": 6, "mem_mib": 400}],
    "services": [{"name": "judge", "restore_s": 0.3}, {"name": "teacher", "restore_s": 0.7}],
    "endpoints": [{"name": "search", "concurrency": 3, "rate_per_s": 7, "burst": 2}],
}


def action(rng: random.Random, resource: str) -> dict[str, Any]:
    """One action of a resource."""
    elastic = resource != "cpu" or rng.random() < 0.5
    degrees = {"c": [[1, 2, 4, 8], [2, 3], [1, 4]], "s": [[1, 2, 4], [1], [2]], "e": [[1]]}
    chosen = rng.choice(degrees[resource[0]]) if elastic else [1]
    told = {"name": f"{resource[0]}{len(chosen)}", "resource": resource, "degrees": chosen,
            "work_s": rng.choice([0.05, rng.random(), rng.random() * 4]),
            "serial": rng.choice([0.0, 0.25, 0.1])}
    if rng.random() < 0.2:
        told["resize"] = False
    return told


def workload(seed: int, size: int = 12, resources: tuple[str, ...] = ("cpu",)) -> Workload:
    """Trajectories with ties, empty thoughts and several actions a turn."""
    rng, found = random.Random(seed), []
    for i in range(size):
        turns = [{"think_s": rng.choice([0, 0.25, rng.random()]),
                  "actions": [action(rng, rng.choice(resources))
                              for _ in range(rng.choice([1, 1, 1, 2, 3]))]}
                 for _ in range(rng.randrange(1, 5))]
        found.append(WorkloadTrajectory.model_validate({
            "trajectory": f"t{i}", "start_s": rng.choice([0, 0.5, rng.random() * 3]),
            "session": {"mem_mib": rng.choice([10, 100, 300])}, "turns": turns}))
    return Workload(name=f"random-{seed}", trajectories=tuple(found))


def one_node(cpus: int) -> Cluster:
    """A cluster of one node with plenty of memory."""
    return Cluster.model_validate({"nodes": [{"name": "c", "cpus": cpus, "mem_mib": 10**6}]})


def _degree(work: Any, k: int) -> int:
    return max((d for d in work.degrees if d <= k), default=min(work.degrees))


def reference_fcfs(work: Workload, cpus: int, k: int
                   ) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(trajectory, turn, index) -> (submit, end) in ns, by the words of the format alone."""
    events = [(round(t.start_s * 1e9) + round(t.turns[0].think_s * 1e9), 1, i, 0, 0)
              for i, t in enumerate(work.trajectories)]
    heapq.heapify(events)
    queue: list[tuple[int, int, int, int]] = []
    free, left, told = cpus, {}, {}
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, kind, i, turn, k_or_units = heapq.heappop(events)
            if kind == 1:
                left[i] = len(work.trajectories[i].turns[turn].actions)
                for index in range(left[i]):
                    heapq.heappush(queue, (now, i, turn, index))
                    told[i, turn, index] = (now, 0)
            else:
                free += k_or_units
                left[i] -= 1
                turns = work.trajectories[i].turns
                if not left[i] and turn + 1 < len(turns):
                    think = round(turns[turn + 1].think_s * 1e9)
                    heapq.heappush(events, (now + think, 1, i, turn + 1, 0))
        while queue:
            _, i, turn, index = queue[0]
            a = work.trajectories[i].turns[turn].actions[index]
            d = _degree(a, k)
            if d > free:
                break
            heapq.heappop(queue)
            free -= d
            end = now + round(a.work_s * (a.serial + (1 - a.serial) / d) * 1e9)
            told[i, turn, index] = (told[i, turn, index][0], end)
            heapq.heappush(events, (end, 0, i, turn, d))
    return told


def reference_static(work: Workload, cpus: int, k: int
                     ) -> dict[tuple[int, int, int], tuple[int, int]]:
    """The same for `static:K`: each trajectory alone on its K, admitted in order of start."""
    order = sorted(range(len(work.trajectories)), key=lambda i: (work.trajectories[i].start_s, i))
    slots, told = [0] * (cpus // k), {}
    heapq.heapify(slots)
    last = 0
    for i in order:
        t = work.trajectories[i]
        start = round(t.start_s * 1e9)
        now = last = max(start, last, heapq.heappop(slots))
        late = now - start
        for turn, spec in enumerate(t.turns):
            now += round(spec.think_s * 1e9)
            ready = now - (late if turn == 0 else 0)
            for index, a in enumerate(spec.actions):
                d = _degree(a, k)
                now += round(a.work_s * (a.serial + (1 - a.serial) / d) * 1e9)
                told[i, turn, index] = (ready, now)
        heapq.heappush(slots, now)
    return told
