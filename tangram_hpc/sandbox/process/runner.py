"""Runs users' functions in this process, one at a time, and reports how they ended.

Users' code can do anything to this process, so the worker believes its reports only about the calls
that it was given. How calls are given ahead and taken back is told in `protocol/process_frames.py`,
and how one call is carried out in `function_calls.py`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import select
import signal
import socket
import sys
import time
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from ...domain.outcome import CPU_AT_LEAST, RSS_AT_LEAST, Outcome
from ...domain.service import pushed_by
from ...domain.states import ActionState
from ...protocol.payload import DirectReturn, FunctionCall, Payload, decode, encode
from ...protocol.process_frames import (
    OUTPUT,
    RECEIVE,
    Drop,
    Ended,
    ExitProcess,
    Gone,
    LoadFunction,
    ProcessInbox,
    RunAction,
    Setup,
    frame,
)
from ...resources import process_tree
from ...resources.cpu import cgroupfs
from .. import environment
from ..files import scratch
from .bootstrap import open_of_self
from .function_calls import (
    call_function,
    failure_of,
    forget_output,
    print_into,
    unpickled_function,
)

# A function's children are killed and waited for. After this many seconds the result is sent
# without them, and its CPU time is a lower bound.
_END_S = 1.0
_MUCH_KIB = 1024
_BATCH_NS = 1_000_000  # a result waits at most so long for further ones


class Runner:
    """Serves calls of functions until its worker closes it.

    Attributes:
        _functions: by digest, the pickle of each function, or the function once it was called.
        _calls: calls that were received and not begun.
        _told: the CPUs and GPUs that the environment names.
        _silent: whether results were sent since `_bell` was last written to, at `_rung_ns`.
        _tokens: the counter of calls that may begin.
        _room: polls the control socket for room.
        _arrived: polls the control socket for orders.
        _used: what was used when the last call had ended.
    """

    def __init__(self, control: socket.socket, home: str) -> None:
        self._control = control
        print_into(os.path.join(home, OUTPUT))
        faulthandler.enable()
        sys.modules["__main__"] = types.ModuleType("__main__")
        os.environ["TMPDIR"] = scratch.tmp(home)
        self._inbox = ProcessInbox()
        self._functions: dict[str, bytes | Callable[..., Any]] = {}
        self._calls: deque[RunAction] = deque()
        self._told: tuple[int, str] | None = None  # CPUs and GPUs
        self._enforcement = ""
        self._peak = OwnPeak()
        self._used = Used()
        self._silent = False
        self._rung_ns = 0
        self._room = select.poll()
        self._room.register(control.fileno(), select.POLLOUT)
        self._arrived = select.poll()
        self._arrived.register(control.fileno(), select.POLLIN)
        data, fds, _, _ = socket.recv_fds(control, RECEIVE, 2)
        for fd in fds:
            os.set_inheritable(fd, False)
        self._tokens, self._bell = fds
        self._closed = not self._take(data)

    def serve(self) -> None:
        """Serves until the worker closes it or goes away."""
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
        """Takes in orders; returns False when it is over."""
        for order in self._inbox.feed(data):
            if isinstance(order, RunAction):
                self._calls.append(order)
            elif isinstance(order, LoadFunction):
                self._functions.pop(order.drop, None)
                self._functions[order.digest] = order.blob
            elif isinstance(order, Setup):
                self._enforcement = order.enforcement
                cgroupfs.join(order.joins)
            elif isinstance(order, Drop):
                while self._calls and self._calls[-1].lease in order.leases:
                    self._calls.pop()
            elif isinstance(order, ExitProcess):
                return False
        return bool(data)

    def _may_begin(self) -> bool:
        try:
            os.read(self._tokens, 8)
        except BlockingIOError:
            return False  # it was taken back: a Drop is on its way
        return True

    def _look(self) -> None:
        """Reads what the worker has sent by now."""
        while not self._closed and self._arrived.poll(0):
            self._closed = not self._take(self._control.recv(RECEIVE))

    def _ring(self) -> None:
        self._rung_ns = time.monotonic_ns()
        if self._silent:
            self._silent = False
            with contextlib.suppress(BlockingIOError):  # full: it has been heard
                os.write(self._bell, b"!")

    def _send(self, message: Ended | Gone) -> None:
        """Sends a message at once, so that the next call cannot lose it by ending this process."""
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

    def _run(self, run: RunAction) -> None:
        if self._told != (run.units, run.gpus):
            self._told = (run.units, run.gpus)
            os.environ.update(environment.hints(run.units))
            environment.export_grant(os.environ, run.units, run.units, run.gpus)
        before, pushed, wait_ns, reason = self._used, 0, 0, ""
        cpu_before, began = time.process_time_ns(), time.monotonic_ns()
        try:
            returned = self._call(run.payload)
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            returned, reason = failure_of(error)
            pushed, wait_ns = pushed_by(error)
        exec_ns = time.monotonic_ns() - began
        forget_output()
        left = _children_left() and not _end_children(_END_S)
        self._used = used = Used()
        outcome = Outcome(
            ActionState.FAILED if reason else ActionState.COMPLETED,
            exit_code=1 if reason else 0,
            exec_ns=exec_ns,
            cpu_ns=max(0, used.cpu_ns - cpu_before - before.below_ns),
            maxrss_kib=used.peak_kib(before),
            reason=reason,
            isolation="process",
            enforcement=self._enforcement, pushed=pushed, retry_after_ns=wait_ns,
            at_least=(CPU_AT_LEAST if left else 0) | used.hidden(before),
        )
        if isinstance(returned, DirectReturn):
            outcome = msgspec.structs.replace(outcome, direct_calls=returned.calls,
                                              direct_ns=returned.run_ns)
        self._send(Ended(run.lease, outcome, encode(returned), not left, used.cpu_ns))
        self._peak.forget(used)
        if left:
            self._ring()
            while not _end_children(_END_S):
                pass
            self._used = Used()
            self._send(Gone(run.lease))

    def _call(self, payload: bytes) -> Payload:
        call = decode(payload)
        if not isinstance(call, FunctionCall):
            raise TypeError(f"a runner cannot run a {type(call).__name__}")
        return call_function(self._function(call.digest), call.arguments, call.pickled)

    def _function(self, digest: str) -> Callable[..., Any]:
        known = self._functions[digest]
        if isinstance(known, bytes):
            known = self._functions[digest] = unpickled_function(known)
        return known


class Used:
    """What this process, and those of its children that were waited for, have used so far.

    Attributes:
        cpu_ns: CPU time of all of them; `below_ns` of it is that of the children.
        own_peak_kib: this process's peak memory.
    """

    __slots__ = ("_below_peak_kib", "below_ns", "cpu_ns", "own_peak_kib")

    def __init__(self) -> None:
        below = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.below_ns = round((below.ru_utime + below.ru_stime) * 1e9)
        self._below_peak_kib = below.ru_maxrss
        self.cpu_ns = time.process_time_ns() + self.below_ns
        self.own_peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def peak_kib(self, before: Used) -> int:
        """The largest memory of this process and of its children since `before`. The kernel keeps
        one figure for all children ever, so children smaller than an earlier one stay unknown.
        """
        below = self._below_peak_kib if self._below_peak_kib > before._below_peak_kib else 0
        return max(self.own_peak_kib, below)

    def hidden(self, before: Used) -> int:
        """RSS_AT_LEAST when a child may have been larger than `peak_kib` says, else 0."""
        ran = self.below_ns > before.below_ns
        unknown = ran and self.own_peak_kib < self._below_peak_kib <= before._below_peak_kib
        return RSS_AT_LEAST if unknown else 0


class OwnPeak:
    """Resets this process's peak memory, so that a call does not inherit that of an earlier one."""

    def __init__(self) -> None:
        self._reset_fd = open_of_self("clear_refs")
        self._usual_kib = Used().own_peak_kib

    def forget(self, used: Used) -> None:
        """Resets the peak after a call that used much more than usual."""
        if used.own_peak_kib > self._usual_kib + _MUCH_KIB:
            with contextlib.suppress(OSError):
                os.pwrite(self._reset_fd, b"5", 0)  # of proc(5): the peak is what is held now
            self._usual_kib = Used().own_peak_kib


def _children_left() -> bool:
    """Whether processes of the function are left. Those that have ended are waited for."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _end_children(seconds: float) -> bool:
    """Kills and waits for all descendants; returns whether none is left after so many seconds."""
    until = time.monotonic() + seconds
    while _children_left():
        if time.monotonic() > until:
            return False
        process_tree.kill_beneath(os.getpid())
        time.sleep(0.001)
    return True


def serve(control: socket.socket, home: str) -> None:
    """Becomes a runner; returns when it is closed and has no descendants."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, msgspec.DecodeError):
            Runner(control, home).serve()
    finally:
        while not _end_children(_END_S):
            pass
