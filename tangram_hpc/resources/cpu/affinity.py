"""Owns: which cores this process may use, in what order to lend them, and binding trees to them.
Must not decide who gets which core, nor read Slurm's environment.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from .. import tree

_CPUS = Path("/sys/devices/system/cpu")
_PASSES = 8  # a tree that forks faster than this many walks keeps its youngest on the old cores


def _first_cpu(text: str) -> int:
    digits = text.replace(",", "-").split("-", 1)[0].strip()
    return int(digits) if digits.isdigit() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _place(cpu: int) -> tuple[int, int, int, int]:
    """Where a CPU is: (NUMA domain, L3 cache, core, CPU), each named by its lowest member."""
    home = _CPUS / f"cpu{cpu}"
    numa = next((int(p.name[4:]) for p in home.glob("node[0-9]*")), 0)
    l3 = _first_cpu(_read(home / "cache/index3/shared_cpu_list"))
    core = _first_cpu(_read(home / "topology/thread_siblings_list"))
    return numa, l3, core, cpu


def usable() -> tuple[int, ...]:
    """The CPUs this process may run on, neighbours by NUMA domain, L3 cache and core together."""
    return tuple(sorted(os.sched_getaffinity(0), key=_place))


def neighbours(units: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """How many of these CPUs, in this order, share an L3 cache, and how many a NUMA domain: the
    sizes of consecutive groups, level by level."""
    places = [_place(cpu) for cpu in units]
    return tuple(tuple(len(list(same)) for _, same in groupby(places, key=lambda p: p[:depth]))
                 for depth in (2, 1))


def describe(units: Sequence[int], cores: Collection[int] | None = None) -> str:
    """How units are enforced: "affinity" when each is one of this process's `cores`, else
    "counted"."""
    real = frozenset(os.sched_getaffinity(0) if cores is None else cores)
    return "affinity" if units and real.issuperset(units) else "counted"


def apply(pid: int, cores: Collection[int]) -> int:
    """Binds every thread of a process and of all beneath it; returns how many were bound.

    Walks until a walk finds nothing new: a thread that is bound already hands its binding on.
    What ends meanwhile is passed over.
    """
    bound: set[int] = set()
    for _ in range(_PASSES):
        found = [t for p in (pid, *tree.descendants(pid)) for t in tree.threads(p)]
        fresh = [t for t in found if t not in bound]
        if not fresh:
            break
        for tid in fresh:
            with suppress(OSError):
                os.sched_setaffinity(tid, cores)
        bound.update(fresh)
    return len(bound)
