"""Owns: the port through which a worker holds its sandboxes to what they were lent, and the choice
of its adapter. Must not know how an adapter does it.

A worker makes a `Group` for each host when it is forked; the host joins it by itself, as its first
deed. The worker binds it before each action and on each resize, and removes it when the host has
died. `limits` names what no program can get around:
"cores", "quota" (CPU time), "memory", "pids". Cores are bound in any case where they are real.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...errors import InvalidInput
from . import cgroup1, cgroup2
from .unforced import Unforced
from .usage import Usage

NAMES = ("cgroup2", "cgroup1", "affinity", "counted")


class Group(Protocol):
    """What holds one host and all that it starts. `joins`: the files that the host writes 0 to, to
    stand in it; it must have one thread only."""

    joins: tuple[str, ...]

    @property
    def cpu_file(self) -> str:
        """The file in which the kernel counts its CPU time; "": nothing does."""

    def limit(self, mem_mib: int, pids: int) -> None:
        """Limits memory, in MiB, and processes with their threads; 0: no limit. Raises OSError."""

    def bind(self, cores: tuple[int, ...], units: int) -> bool:
        """Before an action, with nothing of its own running yet: its cores, by their numbers here,
        or for () CPU time of `units` cores (0: all). Returns whether it holds; what has not
        changed costs next to nothing."""

    def rebind(self, cores: tuple[int, ...], units: int) -> bool:
        """The same for all that runs in it already."""

    def oom_kills(self) -> int:
        """How many of its processes the kernel has killed for its memory limit."""

    def usage(self) -> Usage:
        """What it has used since it was made, as far as it can be told."""

    def kill(self, spare: frozenset[int] = frozenset()) -> bool:
        """SIGKILLs all of its processes but `spare`, without their forking away. False: it could
        not make sure of that, and the caller has to walk the tree."""

    def freeze(self, on: bool) -> bool:
        """Stops all of its processes, the host as well, or lets them go on. False: it cannot, or
        some are not yet."""

    def remove(self) -> None:
        """After the host has died: nothing of it stays. Does not wait."""


class Enforcer(Protocol):
    """What a worker enforces with. `limits`: what no program in a group can get around."""

    name: str
    limits: frozenset[str]

    def group(self, number: int, pid: int) -> Group:
        """Makes what holds host `number`, a process that joins it then. Raises OSError."""

    def close(self) -> None:
        """Ends and removes all groups of this worker. Blocks for as long as that takes, 6 s at
        most."""


_CGROUPS: dict[str, Callable[[], Enforcer]] = {"cgroup2": cgroup2.Cgroup2,
                                               "cgroup1": cgroup1.Cgroup1}  # fmt: skip


def probe(pinned: bool, name: str = "") -> Enforcer:
    """The best enforcement that works here, tried for real; or the one named.

    Args:
        pinned: the units lent are cores of this machine.
        name: "cgroup2", "cgroup1", "affinity" or "counted"; "": the best.

    Raises:
        InvalidInput: the one named is unknown, or does not work here.
    """
    if name and name not in NAMES:
        raise InvalidInput(f"enforcement: {name!r} is none of {', '.join(NAMES)}")
    if name == "affinity" and not pinned:
        raise InvalidInput("enforcement: affinity needs units that are cores of this node; "
                           "use counted, or leave it empty")  # fmt: skip
    if name in ("affinity", "counted"):
        return Unforced(name == "affinity")
    found: list[Enforcer] = []
    for title, make in _CGROUPS.items():
        if name in ("", title):
            try:
                found.append(make())
            except OSError as error:
                if name:
                    raise InvalidInput(f"enforcement: {name} does not work here ({error}); "
                                       "leave it empty to take the best that does") from None
    if not found:
        return Unforced(pinned)
    best = max(found, key=lambda one: len(one.limits))  # of equal ones the first
    for one in found:
        if one is not best:
            one.close()
    return best


def sweep() -> list[str]:
    """Ends and removes the cgroups of workers that died without; returns their folders.

    A worker that lives, of whichever user, is never touched. To be called when a worker starts,
    and by whoever outlives one.
    """
    return cgroup2.sweep() + cgroup1.sweep()
