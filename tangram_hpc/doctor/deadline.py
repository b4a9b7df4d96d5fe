"""Deadlines: runs a function in a process of its own, or a command, with a time limit.

The caller never waits longer than its time limit. A process that cannot even be killed, because it
hangs in the kernel (as on a file system that is gone), is left behind; nothing else is.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import msgspec

from ..protocol.reading import reader

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_REAP_S = 1.0  # seconds that a killed process may take to end


def with_deadline(act: Callable[[], T], kind: type[T], seconds: float) -> T | None:
    """Runs `act` in a forked process and returns its result, or None if it was late or crashed.

    A crash leaves its traceback on standard error. The process and its process group end with this
    call, and the process ends when its parent is killed.

    Args:
        act: The function.
        kind: The type of its result, which must be one that msgspec can encode.
        seconds: The time limit, seconds.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run_child(act, writing)
    os.close(writing)
    try:
        data = _read(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        _end(pid)
    found: T | None = reader(kind)(data) if data else None
    return found


def _run_child(act: Callable[[], T], writing: int) -> NoReturn:
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        data = msgspec.msgpack.encode(act())
        os.write(writing, len(data).to_bytes(4, "big"))
        while data:
            data = data[os.write(writing, data):]
    except BaseException:  # noqa: BLE001 - a forked child must not go back into its parent's code
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(0)


def _read(fd: int, deadline: float) -> bytes:
    """Returns a message that begins with its size; empty if it does not come in time."""
    data = b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return b""
        more = os.read(fd, 1 << 16)
        if not more:
            return b""
        data += more
    return data[4:]


def _end(pid: int) -> None:
    deadline = time.monotonic() + _REAP_S
    if os.waitpid(pid, os.WNOHANG)[0] == 0:
        time.sleep(0.005)  # a child that has answered usually ends in a moment
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.005)


@dataclass(frozen=True)
class CommandOutput:
    """What a command printed, and how it ended.

    Attributes:
        code: The exit status; 127: there is no such command; 124: it exceeded its time limit.
        out: Standard output.
        err: Standard error, or why the command did not end in order.
        seconds: How long the command took, seconds.
    """

    code: int
    out: str
    err: str
    seconds: float

    @property
    def last(self) -> str:
        """The last line of standard error, or of standard output if standard error is empty."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1].strip() if lines else f"exit status {self.code}"


_NO_COMPONENT = "No directives to start application on any available hetjob components"


def run_command(argv: Sequence[str], environ: Mapping[str, str], seconds: float) -> CommandOutput:
    """Runs a command without input, with a time limit in seconds.

    A command that is late gets SIGTERM, at which `srun` ends its job step, and SIGKILL 2 s later.
    """
    began = time.monotonic()
    try:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True, errors="replace",
                                 env=dict(environ))
    except OSError as error:
        return CommandOutput(127, "", f"{argv[0]}: {error.strerror}", 0.0)
    for limit, end in ((seconds, child.terminate), (2.0, child.kill), (_REAP_S, None)):
        try:
            out, err = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            if end is not None:
                end()
            continue
        late = time.monotonic() - began >= seconds and child.returncode < 0
        return CommandOutput(124 if late else child.returncode, out,
                             f"no answer in {seconds:g} s" if late else err,
                             time.monotonic() - began)
    return CommandOutput(124, "", f"no answer in {seconds:g} s", time.monotonic() - began)


def run_step(arguments: Sequence[str], environ: Mapping[str, str], seconds: float) -> CommandOutput:
    """Runs `srun` with these arguments, as a further job step of our job.

    A process that joined a het job from outside has no variables that name components. Its `srun`
    then finds nothing to start, and the job step is run in the first component instead.
    """
    output = run_command(["srun", *arguments], environ, seconds)
    if _NO_COMPONENT in output.err:
        output = run_command(["srun", "--het-group=0", *arguments], environ, seconds)
    return output
