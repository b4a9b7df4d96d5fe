"""The cores that this process may use, the order in which they are lent, and binding process trees
to them.

Who gets which core is decided elsewhere, and Slurm's environment is read elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from .. import process_tree

_CPUS = Path("/sys/devices/system/cpu")
# largest number of walks; if a tree forks faster, its youngest threads keep the old cores
_PASSES = 8


def _first_cpu(text: str) -> int:
    digits = text.replace(",", "-").split("-", 1)[0].strip()
    return int(digits) if digits.isdigit() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _place(cpu: int) -> tuple[int, int, int, int]:
    """Returns a CPU's place as (NUMA domain, L3 cache, core, CPU), each named by its lowest CPU.
    """
    home = _CPUS / f"cpu{cpu}"
    numa = next((int(p.name[4:]) for p in home.glob("node[0-9]*")), 0)
    l3 = _first_cpu(_read(home / "cache/index3/shared_cpu_list"))
    core = _first_cpu(_read(home / "topology/thread_siblings_list"))
    return numa, l3, core, cpu


def usable() -> tuple[int, ...]:
    """Returns the CPUs that this process may use, ordered so that CPUs of one core, L3 cache and
    NUMA domain are neighbours.
    """
    return tuple(sorted(os.sched_getaffinity(0), key=_place))


def neighbours(units: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the sizes of consecutive groups of these CPUs: groups that share an L3 cache, and
    groups that share a NUMA domain.
    """
    places = [_place(cpu) for cpu in units]
    return tuple(tuple(len(list(same)) for _, same in groupby(places, key=lambda p: p[:depth]))
                 for depth in (2, 1))


def describe(units: Sequence[int], cores: Collection[int] | None = None) -> str:
    """Returns the enforcement of these CPUs without cgroups: "affinity" when each of them is one of
    this process's `cores`, else "counted".
    """
    real = frozenset(os.sched_getaffinity(0) if cores is None else cores)
    return "affinity" if units and real.issuperset(units) else "counted"


def apply(pid: int, cores: Collection[int]) -> int:
    """Binds every thread of a process and of its descendants; returns how many were bound.

    The tree is walked until a walk finds no new thread. That ends, because a thread that is bound
    already passes its binding on to what it starts. Threads that end meanwhile are left out.
    """
    bound: set[int] = set()
    for _ in range(_PASSES):
        found = [t for p in (pid, *process_tree.descendants(pid)) for t in process_tree.threads(p)]
        fresh = [t for t in found if t not in bound]
        if not fresh:
            break
        for tid in fresh:
            with suppress(OSError):
                os.sched_setaffinity(tid, cores)
        bound.update(fresh)
    return len(bound)
