"""Time per placement decision and memory per queued action, from 1k to 1M queued actions.

The benchmark feeds a scheduler directly: all units are lent, a few actions end, and `plan` lends
their units again. The time of a decision is the time of `plan` and `handle` divided by the number
of grants. What counts is that the time of a row does not grow from left to right.
"""

from __future__ import annotations

import gc
import itertools
import time
from pathlib import Path

import common

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Profile
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.node import NodeSpec
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler

CPUS, ENDS = 64, 8
DEGREES = ((1,), (1, 2, 4, 8, 16))
DONE = Outcome(ActionState.COMPLETED, exec_ns=10**9)


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def loaded(placer: str, nodes: int, queued: int) -> tuple[Scheduler, float]:
    """Returns a scheduler whose CPUs are all lent and in which `queued` actions wait, and the bytes
    that each waiting action takes."""
    scheduler = Scheduler(make_placer(placer))
    scheduler.handle(ev.ClientJoined(0, 1, "uid", "bench", 0, 1, "bench"))
    for n in range(1, nodes + 1):
        scheduler.handle(ev.NodeJoined(0, n, NodeSpec(f"n{n}", "host", tuple(range(CPUS)), 10**6,
                                                      untrusted=("model",))))
    scheduler.handle(ev.NodesComplete(0, nodes))
    filling = nodes * CPUS
    gc.collect()
    before = 0
    for i in range(1, filling + queued + 1):
        if i == filling + 1:
            drain(scheduler, 1)
            gc.collect()
            before = rss_bytes()
        degrees = DEGREES[i % 2] if i > filling else (1,)
        action = Action(mint(1, i), ("shell", "build")[i % 2], degrees=degrees,
                        profile=Profile(10**8 + i * 7919 % 10**9, 100_000))
        scheduler.handle(ev.ActionSubmitted(i, action))
    return scheduler, (rss_bytes() - before) / queued


def drain(scheduler: Scheduler, now: int) -> int:
    """Plans until no further action can start; returns the number of grants."""
    grants = 0
    while True:
        events = scheduler.plan(now)
        if not events and now < scheduler.next_deadline() <= now + 1:
            now += 1  # the placer goes on at once
            continue
        if not events:
            return grants
        for event in events:
            scheduler.handle(event)
            grants += isinstance(event, ev.LeaseGranted)


def measure(placer: str, nodes: int, queued: int, rounds: int) -> dict[str, float]:
    """One cell of the table."""
    scheduler, memory = loaded(placer, nodes, queued)
    now, took, grants = 10**9, 0.0, 0
    for _ in range(rounds):
        now += 10**6
        for lease in list(itertools.islice(scheduler.ledger.leases, ENDS)):
            scheduler.handle(ev.LeaseFinished(now, lease, DONE, True))
        began = time.perf_counter()
        grants += drain(scheduler, now)
        took += time.perf_counter() - began
    return {"nodes": nodes, "queued": queued, "decisions": grants,
            "us_per_decision": round(took / max(1, grants) * 1e6, 2),
            "us_per_plan": round(took / rounds * 1e6, 1), "bytes_per_queued": round(memory)}


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    sizes = (1000, 4000) if tiny else (1000, 10_000, 100_000, 1_000_000)
    counts = (10,) if tiny else (10, 1000)
    rounds = 20 if tiny else 200
    figures = {placer: [measure(placer, nodes, queued, rounds)
                        for nodes in counts for queued in sizes]
               for placer in ("first-fit", "fcfs:4", "elastic")}
    common.line("placement", {"cpus": CPUS, "ends_per_plan": ENDS, "rounds": rounds}, figures)


if __name__ == "__main__":
    main()
