"""All shells of one sandbox.

A shell lives as the sandbox's background processes do: it is stopped while no command of it runs,
and ends with the sandbox's init. But it is not one of them: the processes that an action left
behind may be killed after the action, and a shell never is. `SparingProcesses` is a view of the
sandbox's processes that leaves the shells out when processes are to be killed.
"""

from __future__ import annotations

import select
import signal
from collections.abc import Sequence

from ...protocol.payload import ShellCall
from ...protocol.process_frames import RunAction
from ...resources import process_tree
from ..environment import Grants
from ..process.resource_usage import ResourceUsage
from ..process.sandbox_processes import SandboxProcesses
from ..process.unstartable import Unstartable
from .shell_command import ShellCommand, how_ended
from .shell_process import ShellProcess, program_of

_SHELLS_MAX = 64  # of one session
_PASSES = 40  # walks; what still forks then is stopped by the next call
_KEPT = 256  # ends of shells that are remembered


class NoShell(Unstartable):
    """The command's shell is not there."""

    def __init__(self, reason: str) -> None:
        super().__init__(0, reason)


class Shells:
    """The shells of one sandbox.

    Args:
        poll: where their descriptors are waited for.

    Attributes:
        by_fd: the shell of each script and control pipe.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._shells: dict[int, ShellProcess] = {}
        self._closed: list[ShellProcess] = []  # killed, and not yet waited for
        self._ends: dict[int, str] = {}  # number of a shell that has ended or was refused -> why
        self.by_fd: dict[int, ShellProcess] = {}

    def __bool__(self) -> bool:
        return bool(self._shells or self._closed)

    def inside(self) -> frozenset[int]:
        """The process ids of the shells as the sandbox's /proc shows them."""
        return frozenset(shell.inside for shell in self._all() if shell.inside)

    def _all(self) -> list[ShellProcess]:
        return [*self._shells.values(), *self._closed]

    def command(self, run: RunAction, call: ShellCall, output_max: int, isolation: str,
                usage: ResourceUsage, grants: Grants) -> ShellCommand:
        """Makes a command for a shell; a shell that is to be started begins with the command, and
        with an environment of `grants`.

        Raises:
            NoShell: the shell has ended or was never opened.
            Unstartable: the sandbox has too many shells, or no program for this one.
        """
        if not run.keep:
            raise Unstartable(126, "shell: it lives in a session; open one")
        shell = self._shells.get(call.shell)
        if shell is None:
            if not call.start:
                raise NoShell(f"shell: {self._how_ended(call.shell)}")
            if len(self._shells) >= _SHELLS_MAX:
                raise Unstartable(126, f"shell: {_SHELLS_MAX} are open in this session; close one")
            program = program_of(call.program, grants.adding(call.env, 1, 1, ""))
            shell = ShellProcess(call.shell, program)
        return ShellCommand(run, call, output_max, isolation, usage, shell)

    def not_started(self, number: int, error: Unstartable) -> None:
        """Notes why a command could not start, for later commands if it was to open its shell."""
        if number not in self._shells:
            self._remember(number, f"it was not opened ({error})")

    def _how_ended(self, number: int) -> str:
        how = self._ends.get(number)
        if how is None:
            return ("it is not there: it was not opened, or it was lost when the sandbox's init "
                    "ended; open another one, or open it with restart=True")
        return f"{how}; open another one, or open it with restart=True"

    def began(self, command: ShellCommand) -> None:
        """Notes that a command has started, and its shell if that was new."""
        shell = command.shell
        if shell.number not in self._shells:
            self._shells[shell.number] = shell
            self._ends.pop(shell.number, None)
            self.by_fd[shell.control] = self.by_fd[shell.script] = shell
            self._poll.register(shell.control, select.POLLIN)
        self._wait_to_write(shell)

    def ready(self, shell: ShellProcess, fd: int) -> None:
        """Reads what a shell says, or writes what waits of its script."""
        if fd == shell.script:
            shell.write_more()
        elif not shell.listen():
            # it has become another program (`exec`), whose end is that of the shell
            self._forget_fds(shell)
        self._wait_to_write(shell)

    def _wait_to_write(self, shell: ShellProcess) -> None:
        if shell.script in self.by_fd:
            if shell.waits_to_write:
                self._poll.register(shell.script, select.POLLOUT)
            else:
                _unregister(self._poll, shell.script)

    def interrupt(self, command: ShellCommand, number: int) -> None:
        """Sends a signal to what runs in the foreground of a shell."""
        command.shell.interrupt(number)
        self._wait_to_write(command.shell)

    def close(self, number: int) -> None:
        """Ends a shell with its background jobs; what runs in it ends too. From now on no command
        can be sent to it, and its number is free, although its process may live a moment longer.
        """
        shell = self._shells.pop(number, None)
        if shell is not None:
            self._closed.append(shell)
            self._remember(number, "it has ended (it was closed)")
            shell.kill()

    def _remember(self, number: int, how: str) -> None:
        self._ends[number] = how
        while len(self._ends) > _KEPT:
            del self._ends[next(iter(self._ends))]

    def reaped(self, pid: int, status: int) -> ShellProcess | None:
        """Notes the end of a process; returns the shell that it was, if it was one."""
        for shell in self._all():
            if shell.pid == pid:
                shell.status = status
                return shell
        return None

    def ended(self, shell: ShellProcess) -> None:
        """Forgets a shell that has ended, when its last output has been read."""
        self._forget_fds(shell)
        shell.close()
        if shell in self._closed:
            self._closed.remove(shell)
            return
        del self._shells[shell.number]
        assert shell.status is not None
        self._remember(shell.number, f"it has ended ({how_ended(shell.status)})")

    def forget_ended(self) -> None:
        """Forgets all shells that have ended, when no command runs."""
        for shell in [each for each in self._all() if each.status is not None]:
            self.ended(shell)

    def _forget_fds(self, shell: ShellProcess) -> None:
        for fd in (shell.script, shell.control):
            self.by_fd.pop(fd, None)
            _unregister(self._poll, fd)

    def stop(self) -> None:
        """Stops all shells until their next command."""
        for shell in self._shells.values():
            shell.stop()


def _unregister(poll: select.poll, fd: int) -> None:
    try:
        poll.unregister(fd)
    except (KeyError, ValueError):  # it is not waited for, or closed
        pass


class SparingProcesses:
    """The processes of one sandbox, of which the shells are neither killed nor counted as left.

    Attributes:
        _earlier: the processes that were there when the latest command began.
        _began: when it began, in clock ticks since boot. A process that started later has a process
            id that was given out again.
    """

    def __init__(self, processes: SandboxProcesses, shells: Shells) -> None:
        self._processes, self._shells = processes, shells
        self._earlier = frozenset[int]()
        self._began = 0

    def pids(self) -> list[int]:
        """See `SandboxProcesses`. The shells are among them, as they use memory too."""
        return self._processes.pids()

    def alone(self) -> bool:
        """See `SandboxProcesses`: whether there is none but shells."""
        return not self._others() if self._shells else self._processes.alone()

    def kill(self) -> None:
        """See `SandboxProcesses`. Shells are spared."""
        if not self._shells:
            return self._processes.kill()
        # stopped first, as a stopped process cannot fork away from the walk
        self._processes.signal(self._others(), signal.SIGSTOP)
        self._processes.signal(self._others(), signal.SIGKILL)

    def command_begins(self, pids: frozenset[int]) -> None:
        """Notes the processes that are there before a command starts its own. Reads nothing of
        them, since most commands are not stopped.
        """
        self._earlier = pids - self._shells.inside()
        self._began = process_tree.ticks_since_boot()

    def stop_latest(self) -> None:
        """Stops what the latest command has started; see `kill_latest`."""
        if not self._earlier and not self._shells:
            return self._processes.stop()
        for _ in range(_PASSES):
            awake = [pid for pid in self._latest() if process_tree.state(pid) not in "TtZX"]
            if not awake:
                return
            self._processes.signal(awake, signal.SIGSTOP)

    def kill_latest(self) -> None:
        """Kills what the latest command has started; repeat it until `latest_gone`. Processes that
        were there before it live on, with those that they start meanwhile; a child whose parent has
        ended counts as the command's.
        """
        if not self._earlier:
            return self.kill()
        self.stop_latest()  # as a stopped process cannot fork away from the walk
        self._processes.signal(self._latest(), signal.SIGKILL)

    def latest_gone(self) -> bool:
        """Whether nothing is left that the latest command has started. Looks twice, as /proc may
        pass over a process while another one of the same parent ends.
        """
        return not self._latest() and not self._latest()

    def _latest(self) -> list[int]:
        others = self._others()
        about = {pid: process_tree.parent_and_start(pid) for pid in others}
        spared, found = set[int](), {pid for pid, (_, start) in about.items()
                                     if pid in self._earlier and start <= self._began}
        while found:
            spared |= found
            found = {pid for pid, (parent, _) in about.items() if parent in found} - spared
        return [pid for pid in others if pid not in spared]

    def _others(self) -> list[int]:
        shells = self._shells.inside()
        return [pid for pid in self._processes.pids()
                if pid not in shells and not process_tree.ended(pid)]

    def stop(self) -> None:
        """See `SandboxProcesses`. Shells are stopped too."""
        self._processes.stop()

    def go_on(self) -> None:
        """See `SandboxProcesses`."""
        self._processes.go_on()

    def signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        """See `SandboxProcesses`."""
        self._processes.signal(pids, number)
