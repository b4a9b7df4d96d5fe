"""One simulated run from values to a `Run`: what `tangram sim`, searches and tests call."""

from __future__ import annotations

from ..core.placers.base import Placer
from .records import Run
from .workload import Cluster, Workload
from .world import World


def simulate(work: Workload, cluster: Cluster, placer: Placer, durations: str = "oracle",
             seed: int = 0, check: bool = False) -> Run:
    """Plays a workload to its end under one placer.

    `durations`: `oracle` lets placers see the workload's run times before an action has run,
    `learned` does not. `check` proves the ledger's laws after every event (slow).

    Raises:
        InvalidInput: workload, cluster and policy do not go together; one line.
    """
    run = World(work, cluster, placer, durations == "oracle", check).run()
    run.head |= {"durations": durations, "seed": seed}
    return run
