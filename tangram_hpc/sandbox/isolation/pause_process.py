"""Starts, finds and ends a pause process: the program that keeps a sandbox's namespaces alive.

A container runtime starts it. It reads from a pipe that the sandbox's init keeps, and echoes each
line. So the sandbox ends when its init ends, however that happens. Orphans in the sandbox are
reaped by the kernel (SIGCHLD is ignored), or by a shell's `wait` where a runtime does not pass that
on. The runtimes are known elsewhere, and the sandbox is entered elsewhere.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ...resources import process_tree

CAT = ("cat",)
# for a runtime that gives its program the default action of SIGCHLD
IGNORING_CAT = ("env", "--ignore-signal=CHLD", *CAT)
# dash cannot ignore SIGCHLD: even after `trap "" CHLD` the end of an orphan breaks off its `read`.
# So a `cat` reads, and the shell waits for it.
SHELL = ("/bin/sh", "-c",
         'trap "" HUP INT TERM; exec 3<&0; while :; do cat <&3 & wait $! && exit; done')
_HELLO = b"ready\n"
_SAID_MAX = 1 << 14


class PauseFailed(Exception):
    """The sandbox could not be built; the text is one line that says why."""


class PauseProcess:
    """A sandbox that lives until `end`, or until this process ends.

    Attributes:
        outer: the process id of the program that was started.
        inside: the process id of the sandbox's first process, as seen from outside.
        gone_fd: a descriptor that is readable once the sandbox is gone.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], seconds: float,
                 first: Callable[[], None] | None = None,
                 beside: Callable[[int], None] | None = None) -> None:
        """Starts the sandbox and waits until it is ready.

        Args:
            argv: the runtime's command line.
            env: the runtime's environment.
            seconds: how long to wait at most.
            first: is called in the runtime's process before the runtime starts; what it raises is
                told like a complaint of the runtime. This process must have one thread then.
            beside: is called in this process while `first` runs in the other, with the process id
                of the other, to do what `first` cannot do itself.

        Raises:
            PauseFailed: it is not ready; nothing of it is left beneath this process.
        """
        until = time.monotonic() + seconds
        self._direct = tuple(argv[-1:]) == CAT  # a program that is silent unless it fails
        self._spawn(argv, env, first)
        try:
            if beside is not None:
                beside(self.outer)
            with suppress(BrokenPipeError):
                os.write(self._stdin, _HELLO)
            self._await_hello(until)
            self.inside = _first_inside(self.outer)
            self.gone_fd = self._gone_fd()
        except PauseFailed:
            self.end()
            raise

    def reaps(self) -> bool:
        """Whether the sandbox's first process ignores SIGCHLD, so that the kernel reaps orphans."""
        status = process_tree.read(f"/proc/{self.inside}/status") or b""
        ignored = re.search(rb"^SigIgn:\s*(\w+)$", status, re.MULTILINE)
        return ignored is not None and bool(int(ignored[1], 16) >> (signal.SIGCHLD - 1) & 1)

    def _spawn(self, argv: Sequence[str], env: Mapping[str, str],
               first: Callable[[], None] | None) -> None:
        """Starts the program. It inherits which signals its parent ignores: here SIGCHLD, so that
        the kernel reaps orphans.
        """
        ends = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        theirs = (ends[0][0], ends[1][1], ends[2][1])
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(theirs)]
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            self.outer = (_fork(argv, env, theirs, first) if first is not None else
                          os.posix_spawnp(argv[0], list(argv), dict(env), setsigmask=(),
                                          file_actions=actions))
        except OSError as error:
            for fd in (ends[0][1], ends[1][0], ends[2][0]):
                os.close(fd)
            raise PauseFailed(f"{argv[0]}: {error.strerror}") from None
        finally:
            signal.signal(signal.SIGCHLD, before)
            for fd in theirs:
                os.close(fd)
        self._stdin, self._said_fd, self._wailed_fd = ends[0][1], ends[1][0], ends[2][0]
        self.gone_fd = self._said_fd

    def _await_hello(self, until: float) -> None:
        said = b""
        while _HELLO not in said:
            wait = until - time.monotonic()
            watched = [self._said_fd, *([self._wailed_fd] if self._direct else [])]
            ready = select.select(watched, [], [], max(0.0, wait))[0]
            if not ready:
                raise PauseFailed(f"it was not ready in time{self._last_words()}")
            piece = os.read(self._said_fd, 4096) if self._said_fd in ready else b""
            if not piece or len(said) > _SAID_MAX:
                raise PauseFailed(self._last_words().removeprefix(": ") or "it ended at once")
            said += piece

    def _gone_fd(self) -> int:
        """Opens `gone_fd`. Kernels before 5.3 have only the pipe, which bwrap's outer process holds
        open as well. So do Pythons that were built with the headers of such a kernel.
        """
        try:
            return os.pidfd_open(self.inside)
        except (AttributeError, OSError):
            return self._said_fd

    def _last_words(self) -> str:
        fd, said = self._wailed_fd, b""
        while len(said) < 1 << 20 and select.select([fd], [], [], 0.2)[0]:
            piece = os.read(fd, 1 << 16)
            if not piece:
                break
            said += piece
        lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
        last = [line for line in lines if line][-1:]
        return f": {last[0][:300]}" if last else ""

    def end(self) -> None:
        """Ends the sandbox with everything in it: the first process of a pid namespace takes the
        others along. Its processes outside, such as conmon, are left to `tree.end_beneath`. Call it
        before this process enters the sandbox, or when nothing inside is needed any more.
        """
        for fd in {self._stdin, self._said_fd, self._wailed_fd, self.gone_fd}:
            os.close(fd)
        with suppress(OSError):
            os.kill(self.outer, signal.SIGKILL)
        with suppress(ChildProcessError):  # its init has waited for it
            os.waitpid(self.outer, 0)


def _fork(argv: Sequence[str], env: Mapping[str, str], fds: Sequence[int],
          first: Callable[[], None]) -> int:
    """Forks a process that calls `first` and then becomes the program; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        first()
        os.execvpe(argv[0], list(argv), dict(env))
    except BaseException as error:  # noqa: BLE001 - told to the parent; nothing else may run here
        text = error.strerror if isinstance(error, OSError) and error.strerror else error
        with suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="replace"))
    finally:
        os._exit(1)


def _first_inside(outer: int) -> int:
    """The sandbox's process with the lowest number inside: the shell or cat of the pause process.
    """
    depth = len(_numbers(os.getpid()))
    found = [(numbers[-1], pid) for pid in process_tree.descendants(os.getpid())
             if len(numbers := _numbers(pid)) > depth]
    if not found:
        raise PauseFailed(f"no process of it (pid {outer}) is in a pid namespace of its own")
    return min(found)[1]


def _numbers(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"NSpid:"):
                    return [int(n) for n in line.split()[1:]]
    except OSError:
        pass  # it ended meanwhile
    return []
