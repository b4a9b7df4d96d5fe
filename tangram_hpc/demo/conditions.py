"""Records a demo run's conditions: the machine, its load, and the CPU time of other work.

A ratio of two runs is meaningful only if the machine gave both the same CPU time. `/proc/stat`
counts the time for which each CPU was busy, and the time for which the hypervisor ran another
machine instead (steal). The CPU time of this process and its children is known once the children
have ended; the rest of the busy time is other work. Only the CPUs that this process may use are
counted. A child that nobody waits for counts as other work, so the measurement warns too often
rather than too seldom.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

# A run is reported as disturbed when other work took more than this fraction of the CPU time. Other
# work changes a ratio of two runs by about the same fraction.
WORTH_TELLING = 0.05


@dataclass(frozen=True)
class CpuTimes:
    """Clocks at one instant, in seconds since an arbitrary origin.

    Attributes:
        wall: Monotonic time.
        busy: Time for which the CPUs ran anything in this machine, summed over the CPUs.
        steal: Time for which the CPUs had work to run but the hypervisor ran another machine.
        ours: CPU time of this process and of all its children that have ended.
    """

    wall: float
    busy: float
    steal: float
    ours: float


@dataclass(frozen=True)
class OtherLoad:
    """The CPU time that other work took during a run, as fractions of the available CPU time.

    Attributes:
        busy: Fraction that other processes of this machine used, at least 0.
        steal: Fraction that the hypervisor gave to other machines.
    """

    busy: float
    steal: float

    @property
    def share(self) -> float:
        """Returns the fraction that other processes and the hypervisor took together."""
        return self.busy + self.steal


def cpu_times(cpus: Collection[int], stat: str, wall: float, ours: float) -> CpuTimes:
    """Returns the clocks, summed over some CPUs from the text of `/proc/stat`."""
    tick = os.sysconf("SC_CLK_TCK")
    busy = steal = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, fields[:8])
            busy += user + nice + system + irq + softirq  # user time includes that of guests
            steal += stolen
    return CpuTimes(wall, busy / tick, steal / tick, ours)


def now(cpus: Collection[int]) -> CpuTimes:
    """Returns the clocks at this instant."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ours = sum(u.ru_utime + u.ru_stime for u in used)
    return cpu_times(cpus, Path("/proc/stat").read_text(), time.monotonic(), ours)


def between(begin: CpuTimes, end: CpuTimes, cpus: int) -> OtherLoad:
    """Returns the CPU time that other work took between two readings on `cpus` CPUs."""
    there_was = max(1e-9, (end.wall - begin.wall) * cpus)
    busy = (end.busy - begin.busy) - (end.ours - begin.ours)
    return OtherLoad(max(0.0, busy) / there_was, (end.steal - begin.steal) / there_was)


def machine_line() -> str:
    """Describes the machine in one line: processor, memory, kernel, Python, load average and date.
    """
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


def load_note(runs: list[tuple[str, OtherLoad]]) -> str:
    """Returns one line about other work, which names the runs that it slowed."""
    slowed = [f"{name} {o.share:.0%}" + (f" ({o.steal:.0%} by the hypervisor)" if o.steal > 0.005
                                         else "") for name, o in runs if o.share > WORTH_TELLING]
    if not slowed:
        return ("conditions: other work took at most "
                f"{max(o.share for _, o in runs):.0%} of the CPU time of any run")
    return ("conditions: OTHER WORK TOOK CPU TIME: " + ", ".join(slowed) + " of what was there;"
            " the ratios compare unequal machines, so run the demo again on a quiet machine")
