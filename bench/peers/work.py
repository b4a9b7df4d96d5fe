"""The work that every peer is given. Workers of all peers import this module by its name."""

from __future__ import annotations

import random
import subprocess
from typing import NamedTuple

TRUE = "/bin/true"
CORES_MAX = 4  # the most cores of a mixed task
LOAD = 0.8  # the share of the cores that the mixed tasks would keep busy without any gap


class Task(NamedTuple):
    """One of the mixed tasks: it arrives at `at_s`, and holds `cores` cores for `seconds`."""

    at_s: float
    cores: int
    seconds: float


def noop(number: int) -> int:
    """Returns its argument."""
    return number


def true(_number: int) -> int:
    """Runs /bin/true with its output captured, as a peer without commands has to."""
    return subprocess.run([TRUE], capture_output=True, check=True).returncode


def hold(seconds: float) -> int:
    """Runs `sleep`, which stands for a program that keeps its cores busy for `seconds`."""
    return subprocess.run(["/bin/sleep", f"{seconds:.4f}"], check=True).returncode


def mixed_tasks(seed: int, count: int, cores: int) -> list[Task]:
    """Draws the mixed tasks: 1 to 4 cores alike, times of a lognormal distribution (median 80 ms,
    sigma 0.7, mean 100 ms, at most 1 s), and arrivals of a Poisson process that loads `cores`
    cores to 80 %."""
    draw, at_s, tasks = random.Random(seed), 0.0, []
    mean_s, mean_cores = 0.1, (1 + CORES_MAX) / 2
    for _ in range(count):
        seconds = min(1.0, draw.lognormvariate(-2.526, 0.7))
        tasks.append(Task(at_s, draw.randint(1, CORES_MAX), round(seconds, 4)))
        at_s += draw.expovariate(LOAD * cores / (mean_s * mean_cores))
    return tasks
