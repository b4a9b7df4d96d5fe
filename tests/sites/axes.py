"""How clusters differ from each other, and rows in which each two values of any two axes meet.

Most faults that one configuration of a cluster has and another has not come from one or two of its
settings. So a covering of all pairs finds them with some fifteen clusters instead of some ten
thousand.
"""

from __future__ import annotations

import random
from itertools import combinations

# The first value of each axis is what the other tests of the dev cluster have.
AXES: dict[str, tuple[str, ...]] = {
    "template": ("hetjob", "homogeneous", "single-node"),
    "mpi": ("pmi2", "none"),
    "TaskPlugin": ("none", "affinity", "cgroup,affinity"),
    "ProctrackType": ("linuxproc", "cgroup", "pgid"),
    "SelectTypeParameters": ("CR_Core_Memory", "CR_CPU_Memory", "CR_Core"),
    "threads a core": ("1", "2"),
    "PrologFlags": ("none", "Contain", "Alloc"),
    "/tmp": ("of the host", "of the node"),
    "JobAcctGatherType": ("linux", "cgroup", "none"),
    "slurmdbd": ("yes", "no"),
    "PrivateData": ("none", "jobs,nodes,usage,users"),
}
Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]
CANDIDATES = 300  # random rows of which the one with the most new pairs is taken


def can_be(row: Row) -> bool:
    """Whether a site can have these values together; a row of two axes may be asked for too."""
    # task/cgroup binds to real CPUs, so its nodes have two of them: one core would be all
    return not (row.get("TaskPlugin") == "cgroup,affinity" and row.get("threads a core") == "2")


def pairs_of(row: Row) -> set[Pair]:
    """Returns each two values of a row, with their axes."""
    return set(combinations(row.items(), 2))


def all_pairs() -> set[Pair]:
    """Returns each two values of two axes that a site can have together."""
    return {((one, a), (other, b)) for one, other in combinations(AXES, 2)
            for a in AXES[one] for b in AXES[other] if can_be({one: a, other: b})}


def rows() -> list[Row]:
    """Returns rows that hold all pairs; it is the same list each time.

    Each row is the best of some random ones around a pair that is still missing (greedy, as in
    AETG, Cohen et al. 1997). The first row is that of the other tests.
    """
    rng = random.Random(0)
    found = [{axis: values[0] for axis, values in AXES.items()}]
    missing = all_pairs() - pairs_of(found[0])
    while missing:
        wanted = dict(min(missing))
        made = ({axis: wanted.get(axis) or rng.choice(values) for axis, values in AXES.items()}
                for _ in range(CANDIDATES))
        best = max(filter(can_be, made), key=lambda row: len(pairs_of(row) & missing))
        found.append(best)
        missing -= pairs_of(best)
    return found
