"""Acts when a node runs out of memory although every session stays within its own limit.

At the first check below the floor, background processes are frozen. At each later check the action
is ended that is furthest above the memory it asked for, and its reason says so. Where no cgroup
limits memory, functions, which no init watches, are held to their own request here too. Memory
itself is measured in `resources`.

Where actions have no cgroups of their own, nothing counts for each of them what the kernel kills
for memory. The worker's cgroup, that of its job step, counts the kills of all actions together. So
an action that ends by SIGKILL takes one of these kills, if one came within the last two checks; an
earlier one ended a process whose action went on. A SIGKILL that somebody else sends in that half
second can be taken for the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...domain.states import ActionState
from ...protocol.process_frames import RUNNER, FreezeBackground
from ...resources import memory, process_tree
from ..process.sandbox_processes import memory_kib
from .execution_processes import ExecutionProcess
from .node_attempts import NodeAttempt

LOOK_S = 0.25
# below 1/32 of the node's memory, 512 MiB at most, the node is short of memory
_FLOOR = 32
_FLOOR_MIB = 512
# below a limit by this much, a group's peak shows that the limit was not reached
_BELOW_KIB = 1 << 10

End = Callable[[int, ActionState, str], None]


class MemoryPressure:
    """The memory pressure of one worker's node. Call `begin` when the first action starts, and
    `look` every LOOK_S while anything runs.

    Args:
        watches: whether nothing else limits the memory of functions, or counts kills.
        end: ends a lease with a state and a reason.
    """

    def __init__(self, watches: bool, end: End) -> None:
        self._watches = watches
        self._end = end
        self._floor = min(_FLOOR_MIB, memory.total_mib() // _FLOOR)
        self._kills = 0  # by the kernel in the worker's cgroup, until the last check
        self._taken = 0  # of them, that no action can take any more
        self._frozen = False

    def begin(self) -> None:
        """Call it when an action starts after none has run: kills so far were of none that runs."""
        if self._watches:
            self._kills = self._taken = memory.oom_kills()

    def look(self, attempts: Iterable[tuple[NodeAttempt, int]],
             idle: Callable[[], Iterable[ExecutionProcess]]) -> None:
        """Checks once.

        Args:
            attempts: the running attempts, each with the memory in MiB that it asked for (0: none).
            idle: returns the sandboxes in which no action runs.
        """
        running = [(attempt, attempt.process, asked) for attempt, asked in attempts
                   if attempt.process is not None]
        if self._watches:
            self._taken, self._kills = max(self._taken, self._kills), memory.oom_kills()
            for attempt, process, asked in running:
                if process.kind == RUNNER and asked and (used := _used_mib(process, asked)) > asked:
                    self._end(attempt.order.lease, ActionState.OUT_OF_MEMORY,
                              f"mem: {used} MiB used, {asked} MiB asked for")
        if memory.left_mib() >= self._floor:
            self._frozen = False
        elif not self._frozen:
            self._frozen = True
            for process in idle():
                process.send(FreezeBackground())
        else:
            self._relieve(running)

    def take_kill(self) -> bool:
        """Whether the kernel has just killed a process of this worker's cgroup for memory. Each of
        its kills counts for one action alone.
        """
        if not self._watches or memory.oom_kills() <= self._taken:
            return False
        self._taken += 1
        return True

    def _relieve(self, running: list[tuple[NodeAttempt, ExecutionProcess, int]]) -> None:
        """Ends the action that is furthest above the memory it asked for."""
        over = [(_used_mib(process, asked) - asked, attempt, asked)
                for attempt, process, asked in running if attempt.live]
        beyond, attempt, asked = max(over, key=lambda one: one[0], default=(0, None, 0))
        if attempt is not None and beyond > 0:
            self._end(attempt.order.lease, ActionState.OUT_OF_MEMORY,
                      f"mem: the node ran out of memory; {beyond + asked} MiB used, {asked} MiB "
                      "asked for")


def oom_reason(asked: int, peak_kib: int | None) -> str:
    """Says why the kernel ended a process of an action for want of memory.

    The kernel also ends processes when a limit above the worker is reached, such as that of its job
    step, and then chooses the largest one, whatever its action asked for.

    Args:
        asked: the memory that the action asked for, in MiB; 0 for none.
        peak_kib: the most memory that its group had in use, in KiB; None if it is unknown.
    """
    if asked and (peak_kib is None or peak_kib + _BELOW_KIB >= asked * 1024):
        return f"mem: more than the {asked} MiB asked for"
    used = f"{peak_kib // 1024} MiB used, " if peak_kib else ""
    return (f"mem: the node's or the job step's memory was used up; {used}{asked} MiB asked "
            "for")


def _used_mib(process: ExecutionProcess, asked: int) -> int:
    return memory_kib([process.pid, *process_tree.descendants(process.pid)], asked * 1024) // 1024
