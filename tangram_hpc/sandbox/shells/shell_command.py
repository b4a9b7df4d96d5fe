"""One command that runs in a shell, as the init of its sandbox sees it.

To the init it is a command like any other: it has output, a time limit and an outcome. Two things
differ. It has ended when its shell says so, not when a process ends. And to stop it means SIGINT
first, then SIGKILL for everything in the sandbox but shells, and at last the shell itself.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from ...domain.outcome import Outcome
from ...domain.states import ActionState
from ...protocol.payload import ExecCall, ShellCall
from ...protocol.process_frames import RunAction
from ...resources import process_tree
from ..environment import Grants
from ..process.command import DRAIN_MAX, Command
from ..process.kept_output import KeptOutput
from ..process.resource_usage import ResourceUsage
from ..process.sandbox_processes import SandboxProcesses, memory_kib
from ..process.unstartable import Unstartable
from .shell_process import ShellProcess

_LONG = 1 << 15  # a command text of more bytes reaches the shell in a file
# how long after the first SIGINT it is sent again
_CHASES_NS = (10_000_000, 50_000_000, 250_000_000, 1_000_000_000)
_LEAST_WAIT_NS = 200_000_000  # how long a shell whose processes were killed may take to answer


class _Used(NamedTuple):
    """What the processes of a command used, as `os.wait4` would tell it."""

    ru_utime: float
    ru_stime: float
    ru_maxrss: int


class ShellCommand(Command):
    """A command that runs under a lease in a shell; the opening of a shell is one too.

    Attributes:
        shell: the shell.
        asked: what was asked for.
    """

    __slots__ = ("_chased", "_cpu_began", "_files", "_give_up_at", "_output_max", "_serial",
                 "asked", "shell", "terminal")

    def __init__(self, run: RunAction, call: ShellCall, output_max: int, isolation: str,
                 usage: ResourceUsage, shell: ShellProcess) -> None:
        plain = ExecCall(shell=call.text, stream=call.stream, output_max=call.output_max,
                         keep=call.keep)
        super().__init__(run, plain, output_max, isolation, usage)
        self.shell, self.asked = shell, call
        self.terminal, self._output_max = shell.terminal, output_max
        self._serial = self._give_up_at = 0
        self._cpu_began = self._chased = 0
        self._files: list[str] = []  # of the text and of the standard input

    def start(self, home: str, grants: Grants, devnull: int) -> None:
        """See `Command.start`. A new shell gets its text once it has said that it is there."""
        call, run, shell = self.asked, self.run, self.shell
        if "\0" in call.text:
            raise Unstartable(126, "command: it has a null byte, which no shell can read")
        self.started_ns = time.monotonic_ns()
        if not shell.pid:
            env = grants.adding(call.env, run.units, run.most, run.gpus)
            if call.size != (0, 0):
                env = {"TERM": "xterm-256color", **env}
            shell.start(call, env, home, devnull, self.identity)
        self.pid, self.pipes, self.terminal = shell.pid, shell.pipes, shell.terminal
        self._cpu_began = shell.cpu_ns()
        folder = grants.plain(run.units, run.most, run.gpus)["TMPDIR"]
        text = call.text.encode("utf-8", "surrogateescape")
        for name, data in (("command", text if len(text) > _LONG else b""), ("stdin", call.stdin)):
            self._files.append(_named_file(name, data, folder) if data else "")
            if data and shell.identity is not None:
                os.chown(self._files[-1], shell.identity.uid, shell.identity.gid)
        shell.go_on()
        if shell.inside:
            self._send(grants)
        if run.timeout_ns:
            self.act_at = self.started_ns + run.timeout_ns

    def _send(self, grants: Grants) -> None:
        shell, run = self.shell, self.run
        if self.asked.op == "run":
            file, stdin = self._files
            stdin = stdin or (shell.terminal.path if shell.terminal is not None else os.devnull)
            self._serial = shell.run("" if file else self.asked.text, file, stdin, grants,
                                     (run.units, run.most, run.gpus))
        else:
            self.status = 0

    def look(self, grants: Grants) -> None:
        """Acts on what the shell has said. `status` is set once the command has ended."""
        shell = self.shell
        if self.status is not None:
            return
        if not self._serial:
            if shell.inside:
                self._forget_output()
                self._send(grants)
        elif shell.ended >= self._serial:
            self.status = shell.code << 8

    def _forget_output(self) -> None:
        """Drops what the shell wrote before its first command: it says that it has no terminal."""
        self._read_all()
        most, keep = self.asked.output_max or self._output_max, self.asked.keep
        self._kept = KeptOutput(most, keep), KeptOutput(most, keep)

    # ---- output ----

    def drain(self) -> list[tuple[int, bytes]]:
        """Reads what the pipes hold now; they stay open for the shell's next command."""
        pieces = self._read_all()
        self.shell.pipes = self.pipes
        return pieces

    def _read_all(self) -> list[tuple[int, bytes]]:
        pieces = []
        for fd in self.pipes:
            for _ in range(DRAIN_MAX if fd >= 0 else 0):
                piece = self.read(fd)
                if piece is None or piece == (0, b""):
                    break
                pieces.append(piece)
        return pieces

    # ---- its end ----

    def stop(self, state: ActionState, reason: str, kill_wait_ns: int) -> None:
        """Interrupts it. What has not ended at `act_at` must be killed, see `escalate`."""
        if self.state is not None or self.status is not None:
            return
        self.state, self.reason = state, reason
        self.act_at = time.monotonic_ns() + kill_wait_ns
        self._give_up_at = self.act_at + max(kill_wait_ns, _LEAST_WAIT_NS)
        if state is ActionState.OUT_OF_MEMORY and self._shell_is_full():
            self.shell.kill()
        self.shell.interrupt(signal.SIGINT)

    def _shell_is_full(self) -> bool:
        """Whether the shell itself holds more than half of the memory that it may use."""
        limit_kib = self.run.limits.mem_mib * 1024
        return memory_kib([self.shell.inside], limit_kib) * 2 > limit_kib

    @property
    def chase_at(self) -> int:  # type: ignore[override]
        """When `chase` must be called (monotonic ns); 0 for never."""
        sent = self.shell.interrupted_ns
        if self.status is not None or not sent or self._chased >= len(_CHASES_NS):
            return 0
        return sent + _CHASES_NS[self._chased]

    def chase(self, processes: SandboxProcesses, now: int) -> None:
        """Sends SIGINT again to foreground processes that have missed it: a process that was just
        being started loses it when its program begins. Those that would have ended by it, as they
        neither ignore nor handle it, and still live, have missed it.
        """
        self._chased += 1
        group = self.shell.inside
        missed = [pid for pid in processes.pids() if pid != group and _would_end(pid, group)]
        if missed:
            with suppress(OSError):  # no room for the process that would send it
                processes.signal(missed, signal.SIGINT)

    def escalate(self, now: int) -> None:
        """Kills the shell, if it has not come back although its processes were killed."""
        if self.status is None and self._give_up_at and now >= self._give_up_at:
            self.shell.kill()

    def shell_ended(self, status: int, usage: Any) -> None:
        """Notes that the shell has ended with this wait status, and so the command."""
        if self.status is None:
            self.status = status
        used = max(0.0, usage.ru_utime + usage.ru_stime - self._cpu_began / 1e9)
        self.usage.reaped(self.pid, _Used(used, 0.0, usage.ru_maxrss), False)
        self._cpu_began = -1

    def end(self) -> None:
        """Measures the command and removes its files, after its end."""
        for path in filter(None, self._files):
            with suppress(OSError):
                os.unlink(path)
        if self._cpu_began >= 0:
            used = max(0, self.shell.cpu_ns() - self._cpu_began) / 1e9
            self.usage.reaped(self.pid, _Used(used, 0.0, process_tree.high_water_kib(
                self.shell.inside)), False)
        self.usage.missed()

    def outcome(self) -> Outcome:
        """See `Command.outcome`."""
        outcome = super().outcome()
        if self.shell.status is None or (outcome.reason and self.state is not None):
            return outcome
        return msgspec.structs.replace(
            outcome, reason=f"the shell {how_ended(self.shell.status)} during this command")


def _would_end(pid: int, group: int) -> bool:
    """Whether SIGINT would end this process at once, and it belongs to this process group."""
    stat = process_tree.read(f"/proc/{pid}/stat")
    if not stat or int(stat[stat.rindex(b")") + 2:].split()[2]) != group:
        return False
    bit = 1 << signal.SIGINT - 1
    masks = [int(line.split()[1], 16) for line in (process_tree.read(f"/proc/{pid}/status") or b""
                                                   ).splitlines()
             if line.startswith((b"SigIgn:", b"SigCgt:", b"SigBlk:"))]
    return bool(masks) and not any(mask & bit for mask in masks)


def how_ended(status: int) -> str:
    """How a shell ended, as a part of a sentence."""
    if os.WIFSIGNALED(status):
        return f"was killed by signal {os.WTERMSIG(status)}"
    return f"ended with exit status {os.WEXITSTATUS(status)}"


def _named_file(name: str, data: bytes, folder: str) -> str:
    """Writes a file that a shell can open; returns its path."""
    path = f"{folder}/.tangram-{name}-{os.urandom(8).hex()}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                     0o600)
        with open(fd, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) or 0:]
    except OSError as error:
        raise Unstartable(126, f"{name}: {error.strerror}") from None
    return path
