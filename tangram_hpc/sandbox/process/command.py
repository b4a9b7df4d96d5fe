"""One command of an action: how it is started, its output, and how it ended.

The init calls this module when something has happened; nothing here waits. A command is stopped by
its process group; the init ends its other processes.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from ...domain.outcome import Outcome
from ...domain.states import ActionState
from ...protocol.payload import ExecCall, ExecReturn, encode
from ...protocol.process_frames import RunAction
from ..environment import DEFAULT_PATH, Grants, beyond_locale
from ..shells.terminal import Terminal
from .kept_output import KeptOutput
from .resource_usage import ResourceUsage
from .sandbox_processes import SandboxProcesses
from .spawn import spawn
from .unstartable import Unstartable
from .users import Identity

_PIECE = 1 << 16
DRAIN_MAX = 32  # reads at the end: background processes may write without end
LOOK_NS = 1_000_000_000  # an init waits no longer than this while its command has a time limit
_STALL_NS = 2_000_000_000  # an init that has not marked the time for longer was stopped
# A command expects the default actions, whatever Python ignores and whoever started the worker
# (`nohup`, a shell's `&`) has ignored. Signals that are handled here become default by themselves.
RESTORED = tuple(number for number in sorted(signal.valid_signals())
                  if signal.getsignal(number) is signal.SIG_IGN)
_SILENCE = encode(ExecReturn())


def changed_signals() -> tuple[int, ...]:
    """The signals whose action here is not the default: they are ignored, or this process handles
    them.
    """
    return tuple(number for number in sorted(signal.valid_signals())
                 if signal.getsignal(number) is not signal.SIG_DFL)


class StartedCommand(Protocol):
    """A command that the fast path has started.

    Attributes:
        pid: its process id.
        out: the pipe of its standard output.
        err: the pipe of its error output.
        ended: whether it has ended; then `status` is its wait status.
        started_ns: when it started (monotonic).
        cpu_ns: CPU time measured so far; `maxrss_kib` is its peak memory.
        hidden: whether its peak memory is unknown, because its init had used more memory before.
        group_ns: the CPU time of its cgroup soon after it started; -1 if that was not read.
    """

    pid: int
    out: int
    err: int
    status: int
    ended: int
    started_ns: int
    cpu_ns: int
    maxrss_kib: int
    hidden: int
    group_ns: int


class Command:
    """A command that runs under a lease.

    Attributes:
        run: the order to run it.
        call: what to run.
        isolation: the isolation of its sandbox, which the outcome names.
        usage: what it has used.
        pid: its process id, which is also its process group.
        pipes: the pipes of its output and of its error output; -1 for a closed pipe.
        status: its wait status; None while it runs.
        state: the state that its outcome will have because someone stopped it, with `reason`; None
            otherwise.
        reported: whether its outcome has been sent.
        terminal: the terminal on which it runs; None for none.
        identity: the numbers of the user that it runs as; None for those of its init.
        chase_at: when `chase` must be called (monotonic ns); 0 for never.
        output_at: when `new_output` must be called (monotonic ns); 0 for never.
        act_at: when its init must look at it again (monotonic ns); 0 for never.
        started_ns: when it started (monotonic).
    """

    terminal: Terminal | None = None
    chase_at = output_at = 0

    __slots__ = (
        "_kept",
        "_marked_cpu_ns",
        "_marked_ns",
        "act_at",
        "call",
        "identity",
        "isolation",
        "pid",
        "pipes",
        "reason",
        "reported",
        "run",
        "started_ns",
        "state",
        "status",
        "usage",
    )

    def __init__(self, run: RunAction, call: ExecCall, output_max: int, isolation: str,
                 usage: ResourceUsage | None = None) -> None:
        self.run = run
        self.usage = usage or ResourceUsage()
        self.call = call
        self.isolation = isolation
        self.identity: Identity | None = None
        self.pid = 0
        self.status: int | None = None
        self.state: ActionState | None = None
        self.reason = ""
        self.reported = False
        self.act_at = 0
        self.started_ns = self._marked_ns = self._marked_cpu_ns = 0
        self.pipes: tuple[int, ...] = ()
        most = call.output_max or output_max
        self._kept = KeptOutput(most, call.keep), KeptOutput(most, call.keep)

    def start(self, home: str, grants: Grants, devnull: int) -> None:
        """Starts the command, with pipes for its output.

        Raises:
            Unstartable: it could not be started.
        """
        call = self.call
        argv, path, env = self.program(grants)
        out, err = os.pipe(), os.pipe()
        stdin = devnull
        try:
            if call.stdin:
                stdin = _as_file(call.stdin, home)
            give(self.identity, (out[1], err[1], *([stdin] if call.stdin else [])))
            self.started_ns = time.monotonic_ns()
            self.pid = start_in(call.cwd, home, path, argv, env, (stdin, out[1], err[1]),
                                identity=self.identity)
        except Unstartable:
            os.close(out[0])
            os.close(err[0])
            raise
        finally:
            os.close(out[1])
            os.close(err[1])
            if stdin != devnull:
                os.close(stdin)
        os.set_blocking(out[0], False)
        os.set_blocking(err[0], False)
        self.pipes = (out[0], err[0])
        if self.run.timeout_ns:
            self.act_at = self.started_ns + self.run.timeout_ns

    def program(self, grants: Grants) -> tuple[list[str], str, dict[str, str]]:
        """What is started: its arguments, its path and its environment.

        Raises:
            Unstartable: there is no such program.
        """
        call = self.call
        argv = ["/bin/sh", "-c", call.shell] if call.shell else list(call.argv)
        if bool(call.shell) == bool(call.argv):
            raise Unstartable(126, "argv or shell: exactly one of them must be set")
        env = self._environment(grants)
        return argv, "/bin/sh" if call.shell else find_program(
            argv[0], env, call.cwd), env

    def _environment(self, grants: Grants) -> dict[str, str]:
        call, run = self.call, self.run
        if not call.clean_env:
            return grants.only(call.env, run.units, run.most, run.gpus)
        if call.env:
            return grants.adding(call.env, run.units, run.most, run.gpus)
        return grants.plain(run.units, run.most, run.gpus)

    def adopt(self, started: StartedCommand) -> None:
        """Takes over a command that the fast path has started."""
        self.pid, self.started_ns = started.pid, started.started_ns
        self.pipes = (started.out, started.err)
        for fd in self.pipes:
            os.set_blocking(fd, False)
        self.usage.counted(started.cpu_ns, started.maxrss_kib, bool(started.hidden),
                           started.group_ns)
        self.status = started.status if started.ended else None
        if self.run.timeout_ns:
            self.act_at = self.started_ns + self.run.timeout_ns

    def mark_time(self) -> None:
        """Moves the time limit by the time since the last mark, if that is long: the job was
        suspended, and the command stood still too. Its init marks it each LOOK_NS, wherever it was
        stopped itself, and before it judges the time limit. What the init itself computed
        meanwhile, as for a check of a million files, is no suspension.
        """
        now, cpu, since = (time.monotonic_ns(), time.thread_time_ns(),
                           max(self._marked_ns, self.started_ns))
        stood = now - since - (cpu - self._marked_cpu_ns)
        self._marked_ns, self._marked_cpu_ns = now, cpu
        if stood > _STALL_NS and self.act_at > since:
            self.act_at += stood

    # ---- output ----

    def read(self, fd: int) -> tuple[int, bytes] | None:
        """Reads what a pipe holds now. Returns the stream's number and the data that is kept, (0,
        b"") when there is none, and None at the end, when the pipe has been closed.
        """
        stream = self.pipes.index(fd)
        try:
            data = os.read(fd, _PIECE)
        except BlockingIOError:
            return 0, b""
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            data = b""  # the last program of a terminal has closed it
        if not data:
            self._close(stream)
            return None
        return stream + 1, self._keep(stream, data)

    def _keep(self, stream: int, data: bytes) -> bytes:
        kept = self._kept[stream]
        return kept.pass_on(data) if self.call.stream else kept.add(data)

    def new_output(self) -> Iterable[tuple[int, bytes]]:
        """Returns output of a command that has no pipes, as `drain` does."""
        return ()

    def drain(self) -> Iterable[tuple[int, bytes]]:
        """Reads what the pipes still hold after the command has ended, and closes them."""
        pieces = []
        for stream, fd in enumerate(self.pipes):
            if fd < 0:
                continue
            for _ in range(DRAIN_MAX):
                try:
                    data = os.read(fd, _PIECE)
                except BlockingIOError:  # background processes may still write
                    break
                if not data:
                    break
                pieces.append((stream + 1, self._keep(stream, data)))
            os.close(fd)
        self.pipes = (-1, -1)
        return pieces

    def _close(self, stream: int) -> None:
        fd = self.pipes[stream]
        if fd >= 0:
            os.close(fd)
            self.pipes = (-1, self.pipes[1]) if stream == 0 else (self.pipes[0], -1)

    # ---- its end ----

    def end(self) -> None:
        """Completes its measurement, after it has ended and before its outcome is made."""

    def chase(self, processes: SandboxProcesses, now: int) -> None:
        """Repeats a signal for processes that have missed it."""

    def escalate(self, now: int) -> None:
        """Does more to end it, after its processes were killed and it has still not ended."""

    def stop(self, state: ActionState, reason: str, kill_wait_ns: int) -> None:
        """Sends SIGTERM to its process group. `act_at` is then when it must be killed."""
        if self.state is not None or self.status is not None:
            return
        self.state, self.reason = state, reason
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGTERM)
            os.killpg(self.pid, signal.SIGCONT)
        self.act_at = time.monotonic_ns() + kill_wait_ns

    def interrupt(self, number: int) -> None:
        """Sends a signal to its process group."""
        if self.status is None:
            with suppress(OSError):
                os.killpg(self.pid, number)

    def limit_processes(self, count: int) -> None:
        """Limits the command to `count` processes at once, for good; 0 for no limit. Processes that
        it has started before keep their earlier limit and may raise it; the cgroup or the meter
        limits them.
        """
        if count:
            with suppress(OSError):  # it has ended
                resource.prlimit(self.pid, resource.RLIMIT_NPROC, (count, count))

    def outcome(self) -> Outcome:
        """Its outcome, after it has ended."""
        assert self.status is not None
        number = code = 0
        if self.status:
            number = os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else 0
            code = os.WEXITSTATUS(self.status) if not number else 0
        state, reason = self.state, self.reason
        if state is None:
            state = ActionState.FAILED if code or number else ActionState.COMPLETED
            reason = f"ended by {_name(number)}" if number else ""
        cpu_ns, maxrss_kib, at_least = self.usage.figures()
        return Outcome(state, code, number, time.monotonic_ns() - self.started_ns, cpu_ns,
                       maxrss_kib, reason, self.isolation, at_least=at_least)

    def result(self) -> bytes:
        """Its encoded result for the client."""
        out, err = (kept.finish() for kept in self._kept)
        cut = self._kept[0].cut, self._kept[1].cut
        return encode(ExecReturn(out, err, cut)) if out or err or any(cut) else _SILENCE


def _name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def find_program(name: str, env: dict[str, str], cwd: str = "") -> str:
    """The path of a program, searched in the command's own PATH. Relative folders in PATH, and the
    path that is returned for them, begin at `cwd`, where the command will run.
    """
    if "\0" in name or "\0" in env.get("PATH", ""):
        raise Unstartable(126, "argv or env: embedded null byte")
    for text in (name, env.get("PATH", ""), cwd):
        try:
            os.fsencode(text)
        except UnicodeEncodeError as error:
            raise Unstartable(126, f"argv, env or cwd: {beyond_locale(error)}") from None
    if "\0" in cwd:
        raise Unstartable(126, f"cwd: {cwd}: embedded null byte")
    if "/" in name:
        return name
    denied = False
    for folder in env.get("PATH", DEFAULT_PATH).split(":") if name else ():
        path = f"{folder or '.'}/{name}"
        there = os.path.join(cwd, path)
        if os.access(there, os.X_OK) and os.path.isfile(there):
            return path
        denied = denied or os.path.isfile(there)
    if denied:
        raise Unstartable(126, f"argv: cannot run {name!r}: Permission denied")
    raise Unstartable(127, f"argv: no program {name!r} in PATH")


def _as_file(data: bytes, home: str) -> int:
    """An unnamed file that holds the data, open at its start."""
    try:
        fd = _unnamed(home)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError as error:
        raise Unstartable(126, f"stdin: {error.strerror}") from None
    return fd


def _unnamed(home: str) -> int:
    # not by `tempfile`, which cannot be imported here: an image has no library of this Python
    with suppress(AttributeError, OSError):  # an old C library, or our filter refuses it
        return os.memfd_create("stdin")
    path = os.path.join(home, f".stdin-{os.urandom(8).hex()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return fd


def give(identity: Identity | None, fds: Iterable[int]) -> None:
    """Makes `identity`, if given, the owner of what a command gets as its input and its outputs. A
    program that opens /dev/stdout or /dev/stderr needs that, as the kernel then compares owners.
    """
    if identity is not None:
        for fd in fds:
            with suppress(OSError):  # what is inherited can be used in any case
                os.fchown(fd, identity.uid, identity.gid)


def start_in(
    cwd: str, home: str, path: str, argv: list[str], env: dict[str, str],
    fds: tuple[int, int, int], terminal: str = "", identity: Identity | None = None,
) -> int:
    """Starts a program in a directory. `terminal` is the path of the terminal that shall control
    the command, if any, and `identity` is its user, if that is not the user of this process.

    Raises:
        Unstartable: it could not be started.
    """
    with in_directory(cwd, home):
        return _start(path, argv, env, fds, terminal, identity)


@contextmanager
def in_directory(cwd: str, home: str) -> Iterator[None]:
    """Lets this process be in a directory, because a spawned process has its parent's. A command
    may have removed `home`, or have made another directory of its name.

    Args:
        cwd: the directory, from `home`.
        home: the directory in which this process is otherwise.

    Raises:
        Unstartable: this process cannot change to the directory.
    """
    try:
        os.chdir(os.path.join(home, cwd))
    except (OSError, ValueError) as error:
        why = (beyond_locale(error) if isinstance(error, UnicodeEncodeError)
               else getattr(error, "strerror", error))
        raise Unstartable(126, f"cwd: {cwd}: {why}" if cwd else
                          f"cwd: the session's own directory: {why}; write a file into it, or name "
                          "another cwd") from None
    try:
        yield
    finally:
        with suppress(OSError):  # it was removed
            os.chdir(home)


def _start(path: str, argv: list[str], env: dict[str, str], fds: tuple[int, int, int],
           terminal: str, identity: Identity | None) -> int:
    numbered = dict(enumerate(fds))
    try:
        try:
            return spawn(identity, path, argv, env, numbered, terminal, RESTORED)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            # a script without an interpreter line: a shell would run it itself
            return spawn(identity, "/bin/sh", ["/bin/sh", path, *argv[1:]], env, numbered, terminal,
                         RESTORED)
    except OSError as error:
        code = 127 if error.errno == errno.ENOENT else 126
        raise Unstartable(code, f"argv: cannot run {argv[0]!r}: {error.strerror}{_elsewhere(path)}",
                          error.errno == errno.EAGAIN) from None
    except UnicodeEncodeError as error:
        raise Unstartable(126, f"argv or env: {beyond_locale(error)}") from None
    except (ValueError, TypeError) as error:
        raise Unstartable(126, f"argv or env: {error}") from None


def _elsewhere(path: str) -> str:
    """Returns what to write instead of a path with `..` that leads over a directory which only the
    caller's machine has, as `sys.executable` of a Python that was started as `../venv/bin/python`.
    """
    plain = os.path.normpath(path)
    if ".." not in path.split("/") or os.path.exists(path) or not os.path.exists(plain):
        return ""
    return f"; a directory before its `..` is not in the sandbox, so name it {plain!r}"
