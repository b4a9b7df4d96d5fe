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
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import msgspec

from ...domain.outcome import Outcome
from ...domain.states import ActionState
from ...wire.payload import ErrorReturn, FunctionCall, ValueReturn, decode, encode
from ...wire.value import encode_value
from . import environ, scratch, tree
from .hostwire import (
    FRAME_MAX,
    OUTPUT,
    TAIL,
    Close,
    Ended,
    Gone,
    HostInbox,
    Load,
    Ready,
    Run,
    Setup,
    frame,
)

_RECEIVE = 1 << 18
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
        self._ready: list[bytes] = []

    def serve(self) -> None:
        """Runs until closed."""
        while data := self._control.recv(_RECEIVE):
            sent_ns = time.monotonic_ns()
            for order in self._inbox.feed(data):
                if isinstance(order, Run):
                    self._run(order)
                    if time.monotonic_ns() - sent_ns > _BATCH_NS:
                        self._flush()
                elif isinstance(order, Load):
                    self._functions.pop(order.drop, None)
                    self._functions[order.digest] = order.blob
                elif isinstance(order, Setup):
                    self._ready.append(frame(Ready("process")))
                elif isinstance(order, Close):
                    return
            self._flush()

    def _flush(self) -> None:
        if self._ready:
            data, self._ready = b"".join(self._ready), []
            self._control.sendall(data)

    def _run(self, run: Run) -> None:
        os.environ.update(environ.hints(run.units))
        environ.grant(os.environ, run.units, run.units, run.gpus)
        cpu = _cpu_ns()
        began = time.monotonic_ns()
        try:
            payload, reason = self._call(run.payload), ""
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            payload, reason = self._failure(error)
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
        )
        self._ready.append(frame(Ended(run.lease, outcome, payload, not left)))
        if left:
            self._flush()
            _end_children()
            self._ready.append(frame(Gone(run.lease)))

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
        reason = f"{kind}: {text}".splitlines()[0][:200]
        return encode(ErrorReturn(kind, text[: 1 << 16], trace[-(1 << 16) :])), reason

    def _tail(self) -> str:
        _flush_streams()
        size = os.fstat(self._output).st_size
        return os.pread(self._output, TAIL, max(0, size - TAIL)).decode(errors="replace")

    def _forget_output(self) -> None:
        _flush_streams()
        if os.fstat(self._output).st_size:
            os.ftruncate(self._output, 0)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


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
