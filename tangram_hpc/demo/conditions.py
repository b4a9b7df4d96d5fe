"""The conditions under which the demo's figures were taken: the machine, its load, and how much CPU
time other work took from each run.

A ratio of two runs is only worth what the machine gave to both. `/proc/stat` counts the time for
which each CPU was busy with anything, and the time for which the hypervisor ran somebody else
(steal). What this process and its children used is known when they have ended; the rest is other
work. Only the CPUs that this process may use are looked at. A child that nobody waits for counts as
other work, so the share errs on the side of warning.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

# Share of the CPU time taken by other work from which a run is reported as disturbed: it can change
# a ratio by about as much.
WORTH_TELLING = 0.05


@dataclass(frozen=True)
class CpuTimes:
    """Clocks at one instant, in seconds since some instant of their own."""

    wall: float
    busy: float
    """Time for which the CPUs ran anything, in this machine."""
    steal: float
    """Time for which they were ready and the hypervisor ran another machine."""
    ours: float
    """CPU time of this process and of all children that have ended."""


@dataclass(frozen=True)
class Others:
    """What other work took during a run, as shares of the CPU time there was (0 to 1)."""

    busy: float
    steal: float

    @property
    def share(self) -> float:
        """Both together."""
        return self.busy + self.steal


def cpu_times(cpus: Collection[int], stat: str, wall: float, ours: float) -> CpuTimes:
    """Sums the lines of some CPUs in the text of `/proc/stat`."""
    tick = os.sysconf("SC_CLK_TCK")
    busy = steal = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, fields[:8])
            busy += user + nice + system + irq + softirq  # a guest's time is in the user's
            steal += stolen
    return CpuTimes(wall, busy / tick, steal / tick, ours)


def now(cpus: Collection[int]) -> CpuTimes:
    """The clocks as they stand."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ours = sum(u.ru_utime + u.ru_stime for u in used)
    return cpu_times(cpus, Path("/proc/stat").read_text(), time.monotonic(), ours)


def between(begin: CpuTimes, end: CpuTimes, cpus: int) -> Others:
    """What other work took between two readings."""
    there_was = max(1e-9, (end.wall - begin.wall) * cpus)
    busy = (end.busy - begin.busy) - (end.ours - begin.ours)
    return Others(max(0.0, busy) / there_was, (end.steal - begin.steal) / there_was)


def machine_line() -> str:
    """The machine in one line: processor, kernel, load before the runs, date."""
    model = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo")
                  if line.startswith("model name")), platform.machine())
    memory = next((int(line.split()[1]) >> 20 for line in _lines("/proc/meminfo")
                   if line.startswith("MemTotal")), 0)
    return (f"{os.cpu_count()} x {model}, {memory} GiB, Linux {platform.release()}, Python "
            f"{platform.python_version()}, load {os.getloadavg()[0]:.2f}, "
            f"{time.strftime('%Y-%m-%d %H:%M')}")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def load_note(runs: list[tuple[str, Others]]) -> str:
    """One line on other work beside the ratios; says which runs it slowed."""
    slowed = [f"{name} {o.share:.0%}" + (f" ({o.steal:.0%} by the hypervisor)" if o.steal > 0.005
                                         else "") for name, o in runs if o.share > WORTH_TELLING]
    if not slowed:
        return ("conditions: other work took at most "
                f"{max(o.share for _, o in runs):.0%} of the CPU time of any run")
    return ("conditions: OTHER WORK TOOK CPU TIME: " + ", ".join(slowed) + " of what there was; "
            "the ratios compare unequal machines, run it again on a quiet one")
