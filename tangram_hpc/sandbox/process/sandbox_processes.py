"""Owns: reaching every process of one sandbox at once from its init - finding, stopping, going on,
ending. Must not wait for one, nor know why.

Two ways: without a pid namespace they are those beneath the init, which is their subreaper; with
one they are all that its /proc shows but the pause process, and `kill(-1)` from within reaches them
in one step that none can outrun.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Protocol

from ...resources import tree

_PASSES = 40  # what still forks after so many walks is stopped by the next one
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


class SandboxProcesses(Protocol):
    """The processes of one sandbox, without its init and its pause process."""

    def pids(self) -> list[int]:
        """As /proc numbers them here."""
        ...

    def alone(self) -> bool:
        """Whether there is none. Children that ended must have been waited for."""
        ...

    def kill(self) -> None:
        """SIGKILL to all; call again until `alone`."""
        ...

    def stop(self) -> None:
        """SIGSTOP to all."""
        ...

    def go_on(self) -> None:
        """SIGCONT to all."""
        ...


class DescendantProcesses:
    """Those beneath this process."""

    def pids(self) -> list[int]:
        """See `SandboxProcesses`."""
        return tree.descendants(os.getpid())

    def alone(self) -> bool:
        """See `SandboxProcesses`."""
        return not tree.children(os.getpid())

    def kill(self) -> None:
        """See `SandboxProcesses`. Stopped first: what is stopped cannot fork away from the walk."""
        self.stop()
        tree.kill_beneath(os.getpid())

    def stop(self) -> None:
        """See `SandboxProcesses`. Walks until a walk finds all stopped: one may have woken
        another."""
        for _ in range(_PASSES):
            awake = [pid for pid in self.pids() if tree.state(pid) not in "TtZX"]
            if not awake:
                return
            _signal(awake, signal.SIGSTOP)

    def go_on(self) -> None:
        """See `SandboxProcesses`."""
        _signal(self.pids(), signal.SIGCONT)


class NamespaceProcesses:
    """Those of the pid namespace that this process starts its children in.

    Args:
        own: the numbers of the pause process's processes in there.
    """

    def __init__(self, own: frozenset[int]) -> None:
        self._own = own

    def pids(self) -> list[int]:
        """See `SandboxProcesses`."""
        try:
            return [int(n) for n in os.listdir("/proc") if n.isdigit() and int(n) not in self._own]
        except OSError:
            return []

    def alone(self) -> bool:
        """See `SandboxProcesses`."""
        return not self.pids()

    def kill(self) -> None:
        """See `SandboxProcesses`."""
        self._to_all(signal.SIGKILL)

    def stop(self) -> None:
        """See `SandboxProcesses`."""
        self._to_all(signal.SIGSTOP)

    def go_on(self) -> None:
        """See `SandboxProcesses`."""
        self._to_all(signal.SIGCONT)

    def _to_all(self, number: signal.Signals) -> None:
        """From a child, as only who is inside can reach all at once.

        Raises:
            OSError: no more processes fit in; only the end of the pause process helps.
        """
        pid = os.fork()
        if pid == 0:
            with suppress(OSError):  # nobody is there
                os.kill(-1, number)
            os._exit(0)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):  # gone meanwhile
            os.kill(pid, number)


def memory_kib(pids: list[int], enough_kib: int) -> int:
    """What these processes hold. Shared pages are counted once each only when the plain sum, which
    is quick, says more than `enough_kib`."""
    total = 0
    for pid in pids:
        fields = tree.read(f"/proc/{pid}/statm")
        total += int(fields.split()[1]) * _PAGE_KIB if fields else 0
    return total if total <= enough_kib else sum(map(_proportional_kib, pids))


def _proportional_kib(pid: int) -> int:
    for line in (tree.read(f"/proc/{pid}/smaps_rollup") or b"").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1])
    fields = tree.read(f"/proc/{pid}/statm")
    return int(fields.split()[1]) * _PAGE_KIB if fields else 0
