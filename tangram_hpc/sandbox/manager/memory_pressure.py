"""Owns: what happens on a node whose memory runs out although every session stays within what it
was promised, or was promised nothing. Must not measure memory itself.

Law: who idles gives way first: background processes that had a share stop. When that is not enough,
the action that holds most beyond what it asked for is ended, one a look, and told so. Functions,
which no init watches, are held to what they asked for here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...domain.states import ActionState
from ...protocol.process_frames import RUNNER, FreezeBackground
from ...resources import memory, tree
from ..process.sandbox_processes import memory_kib
from .execution_processes import ExecutionProcess
from .node_attempts import NodeAttempt

LOOK_S = 0.25
_FLOOR = 32  # one part in so many of the memory is kept
_FLOOR_MIB = 512

End = Callable[[int, ActionState, str], None]


class MemoryPressure:
    """One worker's. `look` every LOOK_S while anything runs.

    Args:
        watches: whether functions' memory is enforced by nobody else.
        end: ends a lease with a state and a reason.
    """

    def __init__(self, watches: bool, end: End) -> None:
        self._watches = watches
        self._end = end
        self._floor = min(_FLOOR_MIB, memory.total_mib() // _FLOOR)
        self._frozen = False

    def look(self, attempts: Iterable[tuple[NodeAttempt, int]],
             idle: Callable[[], Iterable[ExecutionProcess]]) -> None:
        """Looks once.

        Args:
            attempts: those that run, with what memory they asked for, in MiB; 0 for none.
            idle: the sandboxes in which nothing runs.
        """
        running = [(attempt, attempt.process, asked) for attempt, asked in attempts
                   if attempt.process is not None]
        if self._watches:
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

    def _relieve(self, running: list[tuple[NodeAttempt, ExecutionProcess, int]]) -> None:
        """Ends the one that holds most beyond what it asked for."""
        over = [(_used_mib(process, asked) - asked, attempt, asked)
                for attempt, process, asked in running if attempt.live]
        beyond, attempt, asked = max(over, key=lambda one: one[0], default=(0, None, 0))
        if attempt is not None and beyond > 0:
            self._end(attempt.order.lease, ActionState.OUT_OF_MEMORY,
                      f"mem: the node ran out of it; {beyond + asked} MiB used, {asked} MiB "
                      "asked for")


def _used_mib(process: ExecutionProcess, asked: int) -> int:
    return memory_kib([process.pid, *tree.descendants(process.pid)], asked * 1024) // 1024
