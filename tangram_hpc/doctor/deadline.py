"""Deadlines: a piece of work in a process of its own, and a command with a limit.

Law: what hangs is left behind, even where the kernel does not let it be killed (a file system that
is gone): the caller never waits longer than it said. Nothing else of ours is left.
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
_REAP_S = 1.0  # how long a killed process may take to go


def with_deadline(act: Callable[[], T], kind: type[T], seconds: float) -> T | None:
    """What `act` returns, from a forked process; None when that takes longer, or when it breaks
    (its traceback is on stderr then). The process and its group end with the call, and the process
    when its parent is killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_the_child(act, writing)
    os.close(writing)
    try:
        data = _read(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        _end(pid)
    found: T | None = reader(kind)(data) if data else None
    return found


def _be_the_child(act: Callable[[], T], writing: int) -> NoReturn:
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
    """All that is announced by its size; empty when it does not come."""
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
        time.sleep(0.005)  # it is on its way out, as a rule
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.005)


@dataclass(frozen=True)
class CommandOutput:
    """What a command said. `code` 127: there is no such command; 124: it was late."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def last(self) -> str:
        """Its last line, of stderr where there is one."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1].strip() if lines else f"exit status {self.code}"


_NO_COMPONENT = "No directives to start application on any available hetjob components"


def run_command(argv: Sequence[str], environ: Mapping[str, str], seconds: float) -> CommandOutput:
    """Runs a command without input. One that is late is asked to end, as `srun` then ends its step,
    and killed 2 s later."""
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


def run_step(words: Sequence[str], environ: Mapping[str, str], seconds: float) -> CommandOutput:
    """`srun` with these words, as a further step of our job. A step of a het job that was started
    from outside of it is told neither of components nor that there are some; without a component
    its own `srun` finds nothing to start. Then the step is the first component's."""
    told = run_command(["srun", *words], environ, seconds)
    if _NO_COMPONENT in told.err:
        told = run_command(["srun", "--het-group=0", *words], environ, seconds)
    return told
