"""One simulated run: the function that `tangram sim`, searches and tests call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..scheduler.placement.placers.base import Placer
from .message_world import Failure, MessageWorld
from .run_records import RunRecords
from .workload import Cluster, Workload
from .world import SimulationWorld


def simulate(work: Workload, cluster: Cluster, placer: Placer, durations: str = "oracle",
             seed: int = 0, check: bool = False, latency_us: int | None = None,
             failures: Sequence[Failure] = (),
             on_progress: Callable[[int], object] = lambda left: None) -> RunRecords:
    """Simulates a workload to its end under one placer.

    Without `latency_us` and failures the scheduler is called directly (`SimulationWorld`);
    otherwise everything goes through the drivers of broker and workers and over simulated links
    (`MessageWorld`).

    Args:
        work, cluster, placer: What is simulated.
        durations: With `oracle` placers see run times before an action has run, with `learned` they
            do not.
        seed: Seeds the draws of latencies.
        check: Whether the ledger's invariants are checked after every event (slow).
        latency_us: The least latency of a message; each takes at most twice as long.
        failures: Nodes that die.
        on_progress: Called again and again with the number of trajectories that have not ended.

    Raises:
        InvalidInput: Workload, cluster and policy do not go together; one line.
    """
    oracle = durations == "oracle"
    if latency_us is None and not failures:
        run = SimulationWorld(work, cluster, placer, oracle, check).run(on_progress)
    else:
        run = MessageWorld(work, cluster, placer, oracle, (latency_us or 0) * 1000, seed, failures,
                         check).run(on_progress)
    run.head |= {"durations": durations, "seed": seed}
    return run
