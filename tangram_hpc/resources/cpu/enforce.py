"""The port by which a worker enforces the limits of sandboxes, and the choice of its adapter.

A worker makes a `Group` for each execution process when it forks that process, which first of all
enters the group. The worker binds the group before each action and at each resize, and removes it
when the process has died. How an adapter enforces a limit is not known here.

An enforcer's `limits` names the limits that no program can exceed: "cores", "quota" (CPU time),
"memory", "pids". Whatever it names, processes are bound to cores if the lent CPUs are real cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...errors import InvalidInput
from . import cgroup1, cgroup2
from .unforced import Unforced
from .usage import GroupUsage

NAMES = ("cgroup2", "cgroup1", "affinity", "counted")


class Group(Protocol):
    """Enforces the limits of one execution process and of all processes that it starts.

    Attributes:
        joins: the files to which the process writes 0 to enter the group; it must have one thread.
    """

    joins: tuple[str, ...]

    @property
    def cpu_file(self) -> str:
        """The file in which the kernel counts the CPU time of the group; empty when nothing does.
        """

    def limit(self, mem_mib: int, pids: int) -> None:
        """Limits memory, in MiB, and processes with their threads; 0 means no limit. Raises
        OSError.
        """

    def bind(self, cores: tuple[int, ...], units: int) -> bool:
        """Binds the execution process before an action, when nothing else runs in the group.

        The group is bound to `cores`, by their numbers on this machine, or, for (), to the CPU time
        of `units` cores (0: all). Returns whether this is enforced. A binding that has not changed
        costs next to nothing.
        """

    def rebind(self, cores: tuple[int, ...], units: int) -> bool:
        """Does the same as `bind` for all processes that already run in the group."""

    def oom_kills(self) -> int:
        """Returns how many of the group's processes the kernel has killed for the memory limit."""

    def usage(self) -> GroupUsage:
        """Returns what the group has used since it was made, as far as that is known."""

    def kill(self, spare: frozenset[int] = frozenset()) -> bool:
        """Kills all processes of the group but `spare`, even if they fork meanwhile. Returns False
        if some may have been missed; the caller then has to walk the process tree.
        """

    def freeze(self, on: bool) -> bool:
        """Stops all processes of the group, including the execution process, or continues them.
        Returns False if it cannot, or if some processes have not stopped yet.
        """

    def remove(self) -> None:
        """Removes everything of the group after its execution process has died. Does not wait."""


class Enforcer(Protocol):
    """How a worker enforces limits.

    Attributes:
        name: one of NAMES.
        limits: the limits that no program in a group can exceed.
    """

    name: str
    limits: frozenset[str]

    def group(self, number: int, pid: int) -> Group:
        """Makes the group of execution process `number`, which then enters it. Raises OSError."""

    def close(self) -> None:
        """Kills and removes all groups of this worker. Blocks for as long as that takes, at most 6
        s.
        """


_CGROUPS: dict[str, Callable[[], Enforcer]] = {"cgroup2": cgroup2.Cgroup2,
                                               "cgroup1": cgroup1.Cgroup1}  # fmt: skip


def probe(pinned: bool, name: str = "") -> Enforcer:
    """Returns the best enforcement that works here, or the named one, after a real test.

    Args:
        pinned: whether the lent CPUs are cores of this machine.
        name: one of NAMES; empty for the best.

    Raises:
        InvalidInput: the named enforcement is unknown, or does not work here.
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
    # the first of those with equally many limits
    best = max(found, key=lambda one: len(one.limits))
    for one in found:
        if one is not best:
            one.close()
    return best


def sweep() -> list[str]:
    """Kills and removes the cgroups that dead workers left; returns their folders.

    A worker that lives, of whichever user, is never touched. Call it when a worker starts, and in a
    process that outlives a worker.
    """
    return cgroup2.sweep() + cgroup1.sweep()
