"""Commands that begin as an action and can go on as background processes of their session.

A detachable command is started like any other, as the leader of a process session, but its output
goes to files (`output_files`). While it is an action, its init passes on what the files have: 20 ms
after the start, then 10 ms after each new output, and otherwise at pauses that double up to 250 ms.
So a short command costs no look besides the one at its end, and no process besides itself.

The first line of its output is not its own: it has the command's process id in the sandbox and the
beginning of the paths of its files. When the command gets `DETACH`, its action ends by this signal,
the command does not get the signal, and the init writes the exit code to a file when it has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Set
from contextlib import suppress

import msgspec

from ...domain.outcome import Outcome
from ...domain.states import ActionState
from ...protocol.input_flow import DETACH, DETACHED
from ...protocol.payload import DetachableCall
from ...protocol.process_frames import RunAction
from ...resources import process_tree
from ..environment import Grants
from ..process.command import Command, start_in
from ..process.isolation_setup import SandboxIsolation
from ..process.resource_usage import ResourceUsage
from ..process.unstartable import Unstartable
from .output_files import OutputFiles, OutputFolder

_SOON_NS = 20_000_000  # a command that ends sooner is passed on as a whole
_FIRST_NS, _LAST_NS = 10_000_000, 250_000_000  # between two looks at the files
_PIECE = 1 << 16  # bytes of one read
_LOOK_MAX = 1 << 20  # bytes of one stream that one look passes on


class DetachableCommand(Command):
    """A command that runs under a lease and can go to the background.

    Attributes:
        asked: what was asked for.
        detached: whether it goes on in the background.
        inside: its process id in its sandbox.
        output_at: when `new_output` must be called (monotonic ns).
    """

    __slots__ = ("_all", "_files", "_line", "_others", "_pause_ns", "asked", "detached", "inside",
                 "output_at")

    def __init__(self, run: RunAction, call: DetachableCall, output_max: int, isolation: str,
                 usage: ResourceUsage, commands: DetachableCommands,
                 others: frozenset[int]) -> None:
        super().__init__(run, call.command, output_max, isolation, usage)
        self.asked, self._all, self._others = call, commands, others
        self.detached = False
        self.inside, self.output_at, self._pause_ns = 0, 0, _FIRST_NS
        self._line = b""  # the first line, until it was passed on
        self._files: OutputFiles

    def start(self, home: str, grants: Grants, devnull: int) -> None:
        """See `Command.start`."""
        argv, path, env = self.program(grants)
        files = self._all.folder.create(self.asked.reads_input, self.identity)
        try:
            self.started_ns = time.monotonic_ns()
            ends = (devnull if files.stdin < 0 else files.stdin, *files.out)
            self.pid = start_in(self.call.cwd, home, path, argv, env, ends, identity=self.identity)
        except Unstartable:
            self._all.folder.retire(files)
            raise
        files.close_stdin()
        self._files, self.inside = files, self._all.begun(self.pid, files, self._others)
        self._line = f"{self.inside} {files.path}\n".encode()
        self.output_at = self.started_ns + _SOON_NS
        if self.run.timeout_ns:
            self.act_at = self.started_ns + self.run.timeout_ns

    def new_output(self) -> Iterator[tuple[int, bytes]]:
        """Yields what the command has written since the last look, in part if that is much."""
        before = self._files.passed[:]
        yield from self._pass_on(_LOOK_MAX)
        moved = self._files.passed != before
        self._pause_ns = _FIRST_NS if moved else min(2 * self._pause_ns, _LAST_NS)
        more = any(self._files.unread(stream) > 0 for stream in (0, 1))
        self.output_at = time.monotonic_ns() + (0 if more else self._pause_ns)

    def _pass_on(self, most: int = sys.maxsize) -> Iterator[tuple[int, bytes]]:
        """Yields up to `most` bytes of each stream, and no more than its file has now."""
        data, self._line = self._line, b""
        for stream in (0, 1):
            left, kept = min(self._files.unread(stream), most), self._kept[stream]
            while left > 0:
                if self.call.stream and kept.passes_no_more:  # a file may have a size at no cost
                    kept.cut += left
                    self._files.passed[stream] += left
                    break
                if not (piece := self._files.read(stream, min(left, _PIECE))):
                    break
                left -= len(piece)
                data += self._keep(stream, piece)
                yield stream + 1, data
                data = b""
            if data:
                yield 1, data
                data = b""

    def drain(self) -> Iterator[tuple[int, bytes]]:
        """See `Command.drain`. If the command goes on, only a part is passed on of much output, and
        its files are left to others."""
        self.output_at = 0
        yield from self._pass_on(_LOOK_MAX if self.detached else sys.maxsize)
        if self.detached:
            self._files.close_output()
        else:
            self._all.ended(self.pid)

    def interrupt(self, number: int) -> None:
        """See `Command.interrupt`. With `DETACH` the command goes to the background instead, and
        its action has then ended."""
        if number != DETACH:
            return super().interrupt(number)
        if self.status is None and self.state is None:
            self.status, self.detached = number, True
            self._all.detach(self.pid)

    def end(self) -> None:
        """See `Command.end`. Death by `DETACH` is told as a shell tells it, by an exit code, since
        an outcome with this signal means that the command goes on."""
        if not self.detached and self.status is not None and (
                os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == DETACH):
            self.status = (128 + DETACH) << 8

    def outcome(self) -> Outcome:
        """See `Command.outcome`. The worker reports an end with the reason `DETACHED` at once, and
        not as an end that Slurm may have caused."""
        outcome = super().outcome()
        return msgspec.structs.replace(outcome, reason=DETACHED) if self.detached else outcome

    def stop(self, state: ActionState, reason: str, kill_wait_ns: int) -> None:
        """Kills its process group at once, unlike `Command.stop`."""
        super().stop(state, reason, kill_wait_ns)
        if self.status is None:
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)


class DetachableCommands:
    """The detachable commands of one sandbox, in the foreground and in the background.

    Args:
        home: the session's directory.
        isolation: the isolation of the sandbox.

    Attributes:
        folder: makes their files.
    """

    def __init__(self, home: str, isolation: SandboxIsolation) -> None:
        self._home, self._isolation = home, isolation
        self.folder = OutputFolder(home, isolation.tmp)
        self._files: dict[int, OutputFiles] = {}  # by process id
        self._inside: dict[int, int] = {}  # process ids -> those in the sandbox
        self._detached: set[int] = set()

    def begun(self, pid: int, files: OutputFiles, others: frozenset[int]) -> int:
        """Notes that a command has started; returns its process id in the sandbox.

        Args:
            pid: its process id here.
            files: its files.
            others: processes in the sandbox that this process has started otherwise.
        """
        inside = pid
        if self._isolation.pause is not None:
            known = self._isolation.own | others | set(self._inside.values())
            inside = _newest_child(self._isolation.processes.pids(), known)
        self._files[pid], self._inside[pid] = files, inside
        return inside

    def ended(self, pid: int) -> None:
        """Notes that a command has ended in the foreground."""
        del self._inside[pid]
        self.folder.retire(self._files.pop(pid))

    def detach(self, pid: int) -> None:
        """Notes that a command goes to the background."""
        self._detached.add(pid)
        self._files[pid].detach(self._home)

    def reaped(self, pid: int, status: int) -> bool:
        """Notes the end of a process; returns whether it was a command in the background."""
        if pid not in self._detached:
            return False
        self._detached.remove(pid)
        del self._inside[pid]
        code = os.waitstatus_to_exitcode(status)
        self._files.pop(pid).ended(code if code >= 0 else 128 - code)
        return True

    def removed(self, path: str) -> None:
        """Ends the input of the command whose FIFO was removed."""
        for files in self._files.values():
            if path == f"{files.path}.in":
                files.close_input()


def _newest_child(pids: list[int], known: Set[int]) -> int:
    """Returns the process that was started last of those whose parent is outside of the pid
    namespace of this process's /proc. A process that has ended is among them until it was waited
    for."""
    found = (0, 0)
    for pid in pids:
        if pid not in known and (text := process_tree.read(f"/proc/{pid}/stat")):
            fields = text[text.rindex(b")") + 2:].split()
            if fields[1] == b"0":
                found = max(found, (int(fields[19]), pid))
    return found[1]
