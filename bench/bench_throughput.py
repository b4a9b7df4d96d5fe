"""No-op function actions and /bin/true actions per second: one client, one Future each, two CPUs.

Compared in the same run, interleaved, with ProcessPoolExecutor (chunksize 1) on functions and on
`subprocess.run(["/bin/true"])`; the median of the rounds is given.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import common

from tangram_hpc import LocalCluster


def noop() -> None:
    """Nothing."""


def spawn() -> None:
    """One process, its output captured."""
    subprocess.run(["/bin/true"], capture_output=True, check=True)


def rate(submit: Callable[[], Any], count: int) -> float:
    """Actions per second of a burst of `count`, first submit to last result."""
    began = time.perf_counter()
    for future in [submit() for _ in range(count)]:
        future.result()
    return count / (time.perf_counter() - began)


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    functions, programs, rounds = (300, 60, 1) if tiny else (20000, 3000, 5)
    rates: dict[str, list[float]] = {"function": [], "bin_true": [], "pool_function": [],
                                     "pool_bin_true": []}
    with tempfile.TemporaryDirectory() as home, LocalCluster(cpus=2, home=home) as cluster, \
            ProcessPoolExecutor(2) as pool:
        sync = cluster.client.welcome.sync
        rate(lambda: cluster.submit(noop), 50)
        rate(lambda: pool.submit(noop), 50)
        for _ in range(rounds):
            rates["function"].append(rate(lambda: cluster.submit(noop), functions))
            rates["pool_function"].append(rate(lambda: pool.submit(noop), functions))
            rates["bin_true"].append(rate(lambda: cluster.submit(["/bin/true"]), programs))
            rates["pool_bin_true"].append(rate(lambda: pool.submit(spawn), programs))
    median = {name: statistics.median(all_rates) for name, all_rates in rates.items()}
    common.line("throughput", {"functions": functions, "programs": programs, "rounds": rounds,
                               "cpus": 2, "journal_sync": sync}, {
        **{f"{name}_per_s": round(value) for name, value in median.items()},
        "function_over_pool": round(median["function"] / median["pool_function"], 3),
        "bin_true_over_pool": round(median["bin_true"] / median["pool_bin_true"], 3)})


if __name__ == "__main__":
    main()
