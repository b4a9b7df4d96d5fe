"""Cells of GPU services for `bench_gpu_services.py`: generated calls, and two simple rules to beat.

A *cell* is one setting: how many services share how many GPUs, what a restore costs, which degrees
their calls have, how calls arrive, how much load there is, and how many calls run as one batch. A
cell draws its calls from its seed, so every placer is given the same ones.

The two simple rules are placers of their own. Like `elastic` they begin with nothing on any GPU.

* `Shares` knows the load of each service in advance and deals the GPUs out once, in proportion to
  it. Where there are more services than blocks, several services share a block and take turns.
* `Pooled` may put every service on any block. It never parks a service whose calls wait, and brings
  in another copy only when the wait for the resident copies exceeds a number of restores.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tangram_hpc.domain import decision as de
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import service_of
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.placement.placers.base import Placement
from tangram_hpc.scheduler.placement.placers.copy_map import CopyMap, PlacedCopy
from tangram_hpc.scheduler.placement.snapshot import NodeView, Snapshot
from tangram_hpc.scheduler.state.queue import GPU, ActionShape, Walk
from tangram_hpc.simulator import progress
from tangram_hpc.simulator.workload import Cluster, Workload, WorkloadTrajectory
from tangram_hpc.simulator.world import SimulationWorld

NODE_GPUS = 8
MEAN_S, SIGMA = 2.0, 0.7  # run time of a call on its smallest degree: mean, and spread of its log
SERIAL = 0.05
BATCH_REST = 0.2  # in a batch, each call except the longest adds this fraction of its run time


class Cell(NamedTuple):
    """One setting. `degrees`: `one` (all calls on 1 GPU), `any` (each on 1, 2, 4 or 8), `mixed`
    (services differ: fixed sizes and a choice). `load`: GPU time of all calls on their smallest
    degree, over the GPUs' time. `skewed`: popularity falls as 1/rank. `batch`: calls that run as
    one, at most."""

    seed: int
    services: int
    gpus: int
    restore_s: float
    degrees: str = "one"
    bursty: bool = False
    load: float = 0.8
    skewed: bool = False
    batch: int = 1
    calls: int = 400


class Material(NamedTuple):
    """The calls and the cluster of a cell. `load_s`: GPU seconds of each service."""

    work: Workload
    cluster: Cluster
    load_s: dict[str, float]
    degrees: dict[str, tuple[int, ...]]


_MIXED = ((1,), (1, 2, 4, 8), (2,), (1, 2), (4,), (8,), (2, 4))


def _degrees_of(cell: Cell, service: int) -> tuple[int, ...]:
    if cell.degrees == "one":
        return (1,)
    if cell.degrees == "any":
        return (1, 2, 4, 8)
    fitting = [d for d in _MIXED if d[-1] <= max(cell.gpus, 1)]
    return fitting[service % len(fitting)]


def material(cell: Cell) -> Material:
    """The calls and the cluster of a cell. O(calls)."""
    rng = random.Random(f"{cell}")
    names = [f"s{i}" for i in range(cell.services)]
    weights = [1 / (i + 1) if cell.skewed else 1.0 for i in range(cell.services)]
    degrees = {n: _degrees_of(cell, i) for i, n in enumerate(names)}
    mean = {n: MEAN_S * rng.choice((0.6, 1.0, 1.6)) for n in names}
    drawn = []
    for service in rng.choices(names, weights, k=cell.calls):
        run_s = mean[service] * rng.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)
        drawn.append((service, max(0.05, run_s)))
    load_s = dict.fromkeys(names, 0.0)
    for service, run_s in drawn:
        load_s[service] += run_s * degrees[service][0]
    span_s = sum(load_s.values()) / (cell.load * cell.gpus)
    times = _arrivals(cell, rng, [service for service, _ in drawn], span_s)
    found = []
    for i, ((service, run_s), at) in enumerate(zip(drawn, times, strict=True)):
        least = degrees[service][0]
        work_s = run_s / (SERIAL + (1 - SERIAL) / least)
        found.append(WorkloadTrajectory.model_validate({
            "trajectory": f"t{i}", "start_s": round(at, 6), "turns": [{"think_s": 0, "actions": [{
                "name": service, "resource": f"service:{service}", "work_s": round(work_s, 6),
                "degrees": degrees[service], "serial": SERIAL}]}]}))
    nodes, left = [], cell.gpus
    while left > 0:
        nodes.append({"name": f"g{len(nodes)}", "cpus": 1, "mem_mib": 1000,
                      "gpus": min(left, NODE_GPUS)})
        left -= NODE_GPUS
    cluster = Cluster.model_validate({"nodes": nodes, "services": [
        {"name": n, "restore_s": cell.restore_s} for n in names]})
    return Material(Workload(name="cell", trajectories=tuple(found)), cluster, load_s, degrees)


def _arrivals(cell: Cell, rng: random.Random, services: list[str], span_s: float) -> list[float]:
    """Steady: at any time. Bursty: each service's calls in pulses of an eighth of the span."""
    if not cell.bursty:
        return [rng.uniform(0, span_s) for _ in services]
    pulses = {s: [rng.uniform(0, span_s) for _ in range(4)] for s in sorted(set(services))}
    return [abs(rng.gauss(rng.choice(pulses[s]), span_s / 40)) for s in services]


# ---- batches in a simulated run -----------------------------------------------------------------


@dataclass
class _Block:
    """The leases on one block: those that run as one batch, and those that follow."""

    running: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    took_ns: int = 0  # the run time of the batch that runs


class BatchWorld(SimulationWorld):
    """A simulated run in which calls that follow on a busy copy run as one batch with it."""

    batch = 1

    def __init__(self, *args: object, batch: int = 1, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.batch = batch
        self._blocks: dict[tuple[int, tuple[int, ...]], _Block] = {}

    def _record_event(self, fact: ev.Event) -> None:
        if isinstance(fact, ev.NodeJoined) and self.batch > 1:
            spec = msgspec.structs.replace(fact.spec, ahead=4 * self.batch)
            fact = msgspec.structs.replace(fact, spec=spec)
        elif isinstance(fact, ev.ServiceDeclared):
            declared = msgspec.structs.replace(fact.spec, batch=self.batch)
            fact = msgspec.structs.replace(fact, spec=declared)
        super()._record_event(fact)

    def _perform(self, order: de.Decision) -> None:
        if self.batch > 1 and isinstance(order, de.StartLease):
            block = self._blocks.setdefault((order.node, order.gpus), _Block())
            block.behind.append(order.lease)
            work = self.client.submission(order.action).work
            self._runs[order.lease] = progress.SimulatedAttempt(work, len(order.gpus),
                                                                self.event_queue.now, 0)
            if not block.running:
                self._start(order.node, order.gpus, order.restore_ns)
            return
        super()._perform(order)

    def _start(self, node: int, gpus: tuple[int, ...], restore_ns: int = 0) -> None:
        block = self._blocks[node, gpus]
        block.running, block.behind = block.behind[:self.batch], block.behind[self.batch:]
        spans = sorted(run.end_at - run.start for lease in block.running
                       if (run := self._runs[lease]).end_at is not None)
        took = spans[-1] + round(BATCH_REST * sum(spans[:-1]))
        block.took_ns = took
        self.event_queue.put(self.event_queue.now + restore_ns + took, 0, (block.running[0], -1))

    def _finish(self, lease: int, end_at: int) -> None:
        if end_at != -1:
            super()._finish(lease, end_at)
            return
        where, now = self.scheduler.ledger.leases[lease], self.event_queue.now
        node, gpus = where.node, where.gpus
        block = self._blocks[node, gpus]
        ran, block.running = block.running, []
        for one in ran:
            del self._runs[one]
            self._record_event(ev.LeaseFinished(now, one, Outcome(
                ActionState.COMPLETED, exec_ns=block.took_ns, batch=len(ran)), True))
        ended, self._ended = self._ended, []
        for action in ended:
            self.client.ended(action)
            self._record_event(ev.ActionAcknowledged(now, (action,)))
        if block.behind:
            self._start(node, gpus)


# ---- the simple rules ---------------------------------------------------------------------------


class _Calls:
    """The waiting calls of one pass, by service in order of readiness."""

    def __init__(self, view: Snapshot) -> None:
        self.of: dict[str, list[tuple[int, ActionShape]]] = {}
        walk = Walk(view.ledger.ready.shards(GPU))
        while (head := walk.head()) is not None:
            self.of.setdefault(service_of(head[1].key), []).append(head)
            walk.next()
        self._came = {a: view.ledger.actions[a].submitted_at for of in self.of.values()
                      for a, _ in of}

    def came(self, service: str) -> int:
        """Returns when the oldest call that waits for a service was submitted."""
        return self._came[self.of[service][0][0]]

    def by_age(self) -> list[str]:
        """Returns the services with waiting calls, ordered by the age of their oldest call."""
        return sorted((s for s in self.of if self.of[s]), key=lambda s: (self.came(s), s))


class Shares:
    """The rule that divides the GPUs once, in proportion to the known load of each service."""

    reserve, block_max = 0, 8

    def __init__(self, facts: Material, wide: bool = False) -> None:
        self.name = "shares"
        self._size = {s: d[0] for s, d in facts.degrees.items()}
        nodes = [(n, len(spec.gpus)) for n, spec in enumerate(facts.cluster.node_specs(), 1)]
        self._blocks = _dealt(facts, nodes, self._size)
        if wide:
            self._join(facts)

    def _join(self, facts: Material) -> None:
        """Joins neighbouring blocks of each service to the widest blocks that it can use."""
        for service, blocks in self._blocks.items():
            for size in facts.degrees[service][1:]:
                owned = {(n, g) for n, gpus in blocks for g in gpus}
                joined = [(n, tuple(range(g, g + size))) for n, g in sorted(owned) if g % size == 0
                          and all((n, x) in owned for x in range(g, g + size))]
                if sum(len(g) for _, g in joined) == len(owned):
                    self._blocks[service] = joined

    def place(self, view: Snapshot) -> Placement:
        """Serves each service on its own blocks. A block that services share goes to the one that
        has waited longest once those calls are served that came before it was last restored."""
        placement = Placement()
        copies, calls = CopyMap(view, placement), _Calls(view)
        held: set[tuple[int, int]] = set()
        for service in calls.by_age():
            for node, gpus in self._blocks[service]:
                waiting = calls.of[service]
                if not waiting:
                    break
                if self._others_turn(copies, calls, service, node, gpus):
                    continue
                if all(view.nodes[node].gpus.is_free(g) and (node, g) not in held for g in gpus):
                    action, shape = waiting.pop(0)
                    _start(copies, view.nodes[node], gpus, action, shape)
                else:
                    held |= {(node, g) for g in gpus
                             if (c := copies.at.get((node, g))) is None or c.service != service}
        return placement

    def _others_turn(self, copies: CopyMap, calls: _Calls, service: str, node: int,
                     gpus: tuple[int, ...]) -> bool:
        """Returns whether the service that is resident here has calls that came before its restore.
        """
        for gpu in gpus:
            there = copies.at.get((node, gpu))
            if there is not None and there.service != service and calls.of.get(there.service):
                since = there.node.gpus.resident[gpu].since
                if calls.came(there.service) <= since:
                    return True
        return False


def _dealt(facts: Material, nodes: list[tuple[int, int]], size: dict[str, int]
           ) -> dict[str, list[tuple[int, tuple[int, ...]]]]:
    """The blocks of each service: one each, widest first, then more where the load per GPU is
    highest. Services that find no block of their own share the one that has least load."""
    free = {(n, g) for n, count in nodes for g in range(count)}
    weight = dict.fromkeys(sorted(free), 0.0)
    blocks: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
    aligned = {s: [(n, tuple(range(g, g + s))) for n, count in nodes for g in range(0, count, s)
                   if g + s <= count] for s in (1, 2, 4, 8)}
    order = sorted(size, key=lambda s: (-size[s], -facts.load_s[s], s))
    for s in order:
        best = min(aligned[size[s]], key=lambda b: (
            max(weight[b[0], g] for g in b[1]), any((b[0], g) not in free for g in b[1]), b))
        blocks[s] = [best]
        for g in best[1]:
            weight[best[0], g] += facts.load_s[s] / size[s]
            free.discard((best[0], g))
    while True:
        for s in sorted(size, key=lambda s: (-facts.load_s[s] / (size[s] * len(blocks[s])), s)):
            more = next((b for b in aligned[size[s]] if all((b[0], g) in free for g in b[1])), None)
            if more is not None:
                blocks[s].append(more)
                free -= {(more[0], g) for g in more[1]}
                break
        else:
            return blocks


class Pooled:
    """Never parks a service whose calls wait; restores only for waits above `restores` of them."""

    reserve, block_max = 0, 8

    def __init__(self, restores: float, wide: bool = False) -> None:
        self.name, self._restores, self._wide = f"pooled:{restores}", restores, wide

    def place(self, view: Snapshot) -> Placement:
        """Serves the services in order of their oldest calls."""
        placement = Placement()
        copies, calls = CopyMap(view, placement), _Calls(view)
        for service in calls.by_age():
            self._serve(view, copies, calls, service)
        return placement

    def _serve(self, view: Snapshot, copies: CopyMap, calls: _Calls, service: str) -> None:
        waiting = calls.of[service]
        while waiting:
            action, shape = waiting[0]
            fit = copies.usable(shape)
            idle = next((c for c in fit if copies.is_idle(c)), None)
            if idle is not None:
                copies.begin(idle, action, shape)
            else:
                limit = self._restores * view.ledger.services[service].restore_ns
                if fit and self._wait(view, copies, waiting, fit) <= limit:
                    return
                sizes = shape.degrees[::-1] if self._wide else shape.degrees[:1]
                spot = next((s for d in sizes if (s := self._spot(copies, calls, shape, d))), None)
                if spot is None:
                    return
                copies.open(spot[0], spot[1], action, shape)
            waiting.pop(0)

    def _wait(self, view: Snapshot, copies: CopyMap, waiting: list[tuple[int, ActionShape]],
              fit: list[PlacedCopy]) -> int:
        """Returns how long the last waiting call would wait if the resident copies served all
        calls.
        """
        ends = [(max(0, copies.free_at(c, view.now_ns) - view.now_ns), c.size) for c in fit]
        heapq.heapify(ends)
        for action, _ in waiting[:-1][:64]:
            at, size = ends[0]
            run = copies.run_ns(view.ledger.actions[action].action, size)
            heapq.heapreplace(ends, (at + run, size))
        return ends[0][0]

    def _spot(self, copies: CopyMap, calls: _Calls, shape: ActionShape, size: int
              ) -> tuple[NodeView, tuple[int, ...]] | None:
        found = [(max((c.used_at for c in over), default=-1), node.node, gpus)
                 for node, gpus, over in copies.blocks(shape, size)
                 if not any(calls.of.get(c.service) for c in over)]
        if not found:
            return None
        _, number, gpus = min(found)
        return copies.view.nodes[number], gpus


def _start(copies: CopyMap, node: NodeView, gpus: tuple[int, ...], action: int, shape: ActionShape
           ) -> None:
    there = copies.at.get((node.node, gpus[0]))
    if there is not None and there.service == service_of(shape.key) and there.gpus == gpus:
        copies.begin(there, action, shape)
    else:
        copies.open(node, gpus, action, shape)


# ---- one run ------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """A run in numbers; seconds. `wide`: of calls whose smallest degree is above 1."""

    mean_s: float
    p99_s: float
    worst_s: float
    wide_p99_s: float
    wide_worst_s: float
    restores: int


def play(cell: Cell, facts: Material, placer: object, durations: str) -> Seen:
    """One cell under one placer."""
    world = BatchWorld(facts.work, facts.cluster, placer, durations == "oracle", batch=cell.batch)
    run = world.run()
    act = sorted((r.end - r.submit) / 1e9 for r in run.records)
    wide = sorted((r.end - r.submit) / 1e9 for r in run.records if r.action.degrees[0] > 1)

    def p99(of: list[float]) -> float:
        return of[min(len(of) - 1, math.floor(.99 * len(of)))] if of else 0.0

    return Seen(sum(act) / len(act), p99(act), act[-1], p99(wide), max(wide, default=0.0),
                sum(1 for r in run.records if r.restore))
