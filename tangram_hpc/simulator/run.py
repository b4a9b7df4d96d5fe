"""One simulated run from values to a `Run`: what `tangram sim`, searches and tests call."""

from __future__ import annotations

from collections.abc import Sequence

from ..scheduler.placement.placers.base import Placer
from .message_world import Failure, MessageWorld
from .records import Run
from .workload import Cluster, Workload
from .world import World


def simulate(work: Workload, cluster: Cluster, placer: Placer, durations: str = "oracle",
             seed: int = 0, check: bool = False, latency_us: int | None = None,
             failures: Sequence[Failure] = ()) -> Run:
    """Plays a workload to its end under one placer.

    `durations`: `oracle` lets placers see the workload's run times before an action has run,
    `learned` does not. `check` proves the ledger's laws after every event (slow). With `latency_us`
    all goes through the broker's and workers' drivers and over links whose one way takes so long
    to twice that, by the seed; `failures` of nodes happen there only.

    Raises:
        InvalidInput: workload, cluster and policy do not go together; one line.
    """
    oracle = durations == "oracle"
    if latency_us is None and not failures:
        run = World(work, cluster, placer, oracle, check).run()
    else:
        run = MessageWorld(work, cluster, placer, oracle, (latency_us or 0) * 1000, seed, failures,
                         check).run()
    run.head |= {"durations": durations, "seed": seed}
    return run
