"""Owns: running users' functions in this process, one at a time, and telling how they ended. The
only place besides the client that unpickles. Must not be believed: what a function does to this
process its worker survives.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import cloudpickle
import msgspec

from ...domain.outcome import Outcome
from ...domain.service import pushed_by
from ...domain.states import ActionState
from ...wire.payload import ErrorReturn, FunctionCall, ValueReturn, decode, encode
from ...wire.value import encode_value
from ..cpu import cgroupfs
from . import environ, scratch, tree
from .hostwire import (
    FRAME_MAX,
    OUTPUT,
    RECEIVE,
    TAIL,
    Close,
    Drop,
    Ended,
    Gone,
    HostInbox,
    Load,
    Run,
    Setup,
    frame,
)

_BATCH_NS = 1_000_000  # a result waits at most so long for the next one's


class Untrusted(Exception):
    """The result can only travel as a pickle, which the caller did not allow."""


class Runner:
    """Serves function calls until its worker closes it."""

    def __init__(self, control: socket.socket, home: str) -> None:
        self._control = control
        self._output = os.open(
            os.path.join(home, OUTPUT), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        for fd in (1, 2):
            os.dup2(self._output, fd)
        faulthandler.enable()
        sys.modules["__main__"] = types.ModuleType("__main__")
        os.environ["TMPDIR"] = scratch.tmp(home)
        self._inbox = HostInbox()
        self._functions: dict[str, bytes | Callable[..., Any]] = {}
        self._calls: deque[Run] = deque()
        self._told: tuple[int, str] | None = None  # units and GPUs in the environment
        self._enforcement = ""
        self._silent = False  # results were sent of which the worker does not know yet
        self._rung_ns = 0
        self._room = select.poll()
        self._room.register(control.fileno(), select.POLLOUT)
        data, fds, _, _ = socket.recv_fds(control, RECEIVE, 2)
        for fd in fds:
            os.set_inheritable(fd, False)
        self._tokens, self._bell = fds
        self._closed = not self._take(data)

    def serve(self) -> None:
        """Runs until closed."""
        calls = self._calls
        while not self._closed:
            if calls and self._may_begin():
                self._look()
                self._run(calls.popleft())
                if time.monotonic_ns() - self._rung_ns > _BATCH_NS:
                    self._ring()
            else:
                self._ring()
                self._closed = not self._take(self._control.recv(RECEIVE))

    def _take(self, data: bytes) -> bool:
        """Takes orders in; False when it is over."""
        for order in self._inbox.feed(data):
            if isinstance(order, Run):
                self._calls.append(order)
            elif isinstance(order, Load):
                self._functions.pop(order.drop, None)
                self._functions[order.digest] = order.blob
            elif isinstance(order, Setup):
                self._enforcement = order.enforcement
                cgroupfs.join(order.joins)
            elif isinstance(order, Drop):
                while self._calls and self._calls[-1].lease in order.leases:
                    self._calls.pop()
            elif isinstance(order, Close):
                return False
        return bool(data)

    def _may_begin(self) -> bool:
        try:
            os.read(self._tokens, 8)
        except BlockingIOError:
            return False  # it was taken back: a Drop is on its way
        return True

    def _look(self) -> None:
        """Reads what the worker has said by now."""
        with contextlib.suppress(BlockingIOError):
            while not self._closed:
                self._closed = not self._take(self._control.recv(RECEIVE, socket.MSG_DONTWAIT))

    def _ring(self) -> None:
        self._rung_ns = time.monotonic_ns()
        if self._silent:
            self._silent = False
            with contextlib.suppress(BlockingIOError):  # full: it has been heard
                os.write(self._bell, b"!")

    def _send(self, message: Ended | Gone) -> None:
        """What is sent is safe whatever the next call does to this process."""
        data: bytes | memoryview = frame(message)
        while data:
            try:
                sent = self._control.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:  # the worker has to read first
                self._ring()
                self._room.poll()
                continue
            self._silent = True
            data = memoryview(data)[sent:]

    def _run(self, run: Run) -> None:
        if self._told != (run.units, run.gpus):
            self._told = (run.units, run.gpus)
            os.environ.update(environ.hints(run.units))
            environ.grant(os.environ, run.units, run.units, run.gpus)
        cpu, pushed, wait_ns = _cpu_ns(), 0, 0
        began = time.monotonic_ns()
        try:
            payload, reason = self._call(run.payload), ""
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            payload, reason = self._failure(error)
            pushed, wait_ns = pushed_by(error)
        exec_ns = time.monotonic_ns() - began
        self._forget_output()
        left = _children_left()
        outcome = Outcome(
            ActionState.FAILED if reason else ActionState.COMPLETED,
            exit_code=1 if reason else 0,
            exec_ns=exec_ns,
            cpu_ns=max(0, _cpu_ns() - cpu),
            maxrss_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            reason=reason,
            isolation="process",
            enforcement=self._enforcement, pushed=pushed, retry_after_ns=wait_ns,
        )
        self._send(Ended(run.lease, outcome, payload, not left))
        if left:
            self._ring()
            _end_children()
            self._send(Gone(run.lease))

    def _call(self, payload: bytes) -> bytes:
        call = decode(payload)
        if not isinstance(call, FunctionCall):
            raise TypeError(f"a runner cannot run a {type(call).__name__}")
        args, kwargs = pickle.loads(call.arguments)
        result = self._function(call.digest)(*args, **kwargs)
        if inspect.iscoroutine(result):
            import asyncio

            result = asyncio.run(result)
        value = _pack(result, call.pickled)
        if len(value.data) > FRAME_MAX - (1 << 20):
            raise OverflowError(f"a result of {len(value.data)} bytes is too large; return a path")
        return encode(value)

    def _function(self, digest: str) -> Callable[..., Any]:
        known = self._functions[digest]
        if isinstance(known, bytes):
            known = self._functions[digest] = pickle.loads(known)
        assert not isinstance(known, bytes)
        return known

    def _failure(self, error: BaseException) -> tuple[bytes, str]:
        kind = "UntrustedResult" if isinstance(error, Untrusted) else type(error).__name__
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 - a user's __str__
            text = "(its text cannot be made)"
        trace = "" if isinstance(error, Untrusted) else _trace(error)
        if tail := self._tail():
            trace += f"\n--- the end of its output ---\n{tail}"
        kind, text, trace = map(_tellable, (kind, text, trace))
        reason = f"{kind}: {text}".splitlines()[0][:200]
        return encode(ErrorReturn(kind, text[: 1 << 16], trace[-(1 << 16) :])), reason

    def _tail(self) -> str:
        _flush_streams()
        size = os.fstat(self._output).st_size
        return os.pread(self._output, TAIL, max(0, size - TAIL)).decode(errors="replace")

    def _forget_output(self) -> None:
        _flush_streams()
        if os.lseek(self._output, 0, os.SEEK_END):
            os.ftruncate(self._output, 0)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _tellable(text: str) -> str:
    """What can go into a message: the name of a file, for one, need not be UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _pack(result: Any, pickled: bool) -> ValueReturn:
    try:
        return ValueReturn(encode_value(result))
    except TypeError as error:
        if not pickled:
            raise Untrusted(
                f"the result holds a {error}, which only a pickle can carry; return plain values "
                "or arrays, or submit with trusted=True"
            ) from None
    return ValueReturn(cloudpickle.dumps(result), True)


def _trace(error: BaseException) -> str:
    """The trace from the user's code on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _cpu_ns() -> int:
    below = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time_ns() + round((below.ru_utime + below.ru_stime) * 1e9)


def _children_left() -> bool:
    """Whether processes of the function are left; those that have ended are waited for."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _end_children() -> None:
    while _children_left():
        tree.kill_beneath(os.getpid())
        time.sleep(0.001)


def serve(control: socket.socket, home: str) -> None:
    """Becomes a runner; returns when closed, with nothing beneath."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, msgspec.DecodeError):
            Runner(control, home).serve()
    finally:
        _end_children()
