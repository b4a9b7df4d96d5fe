"""Owns: one sandbox's inside - running its commands one at a time, its files, and that nothing of a
command is left when it says so. Must not know of other sandboxes. Runs user's programs only as
children.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from types import FrameType

import msgspec

from ...domain.outcome import Outcome
from ...domain.states import ActionState
from ...wire.payload import ExecCall, FileCall, FileReturn, decode, encode
from ..cpu import affinity
from . import confine, environ, scratch, tree
from .command import Command, Unstartable
from .host import Binding
from .hostwire import Close, Cores, Ended, Gone, HostInbox, Kill, Piece, Run, Setup, frame
from .units_file import UnitsFile

_SOON_NS = 2_000_000  # the pipes of a shorter command are only read at its end
_AGAIN_NS = 20_000_000  # between two tries to end what does not end
_END_S = 5.0
_RECEIVE = 1 << 16


class Init:
    """The init of one sandbox: an event loop over its control socket, SIGCHLD and two pipes."""

    def __init__(self, control: socket.socket, home: str) -> None:
        self._control = control
        self._home = home
        self._devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._base = environ.for_commands(os.environ, home)
        self._binding = Binding()
        self._units = UnitsFile(home)
        self._inbox = HostInbox()
        self._kill_wait_ns = 2_000_000_000
        self._output_max = 1 << 20
        self._command: Command | None = None
        self._watch_at = 0
        self._ending = False
        self._wake, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, where: None)
        signal.signal(signal.SIGTERM, self._on_term)
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def _on_term(self, number: int, where: FrameType | None) -> None:
        self._ending = True

    def serve(self) -> None:
        """Serves until its worker closes it or goes away; then nothing beneath is left."""
        control, wake = self._control.fileno(), self._wake
        try:
            while not self._ending:
                for fd, _ in self._poll.poll(self._wait_ms()):
                    if fd == wake:
                        os.read(wake, 512)
                        self._reap()
                    elif fd == control:
                        self._receive()
                    else:
                        self._read(fd)
                if self._command is not None:
                    self._tick(self._command)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker is gone
        finally:
            self._end()

    def _wait_ms(self) -> int | None:
        command = self._command
        if command is None:
            return None
        times = [t for t in (self._watch_at, command.act_at) if t]
        if not times:
            return None
        return max(0, -((time.monotonic_ns() - min(times)) // 1_000_000))

    # ---- orders ----

    def _receive(self) -> None:
        data = self._control.recv(_RECEIVE)
        if not data:
            self._ending = True
        for order in self._inbox.feed(data):
            if isinstance(order, Run):
                self._run(order)
            elif isinstance(order, Kill):
                self._kill(order)
            elif isinstance(order, Cores):
                self._resize(order)
            elif isinstance(order, Setup):
                self._kill_wait_ns, self._output_max = order.kill_wait_ns, order.output_max
            elif isinstance(order, Close):
                self._ending = True

    def _run(self, run: Run) -> None:
        try:
            call = decode(run.payload)
        except msgspec.DecodeError as error:
            return self._refuse(run, 0, f"payload: not in the protocol ({error})")
        if isinstance(call, FileCall):
            return self._file(run, call)
        if not isinstance(call, ExecCall):
            return self._refuse(run, 0, f"payload: a sandbox cannot run a {type(call).__name__}")
        command = Command(run, call, self._output_max, self._binding.set(run.cores),
                          self._units.path)
        try:
            for path, data in call.files.items():
                confine.write(self._home, path, data, 0o644)
            self._units.write(run.units)
            command.start(self._home, self._base, self._devnull)
        except confine.Refused as error:
            return self._refuse(run, 0, f"files: {error}")
        except Unstartable as error:
            return self._refuse(run, error.code, error.reason)
        self._command = command
        self._watch_at = command.started_ns + _SOON_NS
        if call.stream:
            self._watch(command)

    def _refuse(self, run: Run, code: int, reason: str) -> None:
        outcome = Outcome(ActionState.FAILED, exit_code=code, reason=reason, isolation="process")
        self._send(Ended(run.lease, outcome, None, True))
        if not run.keep:
            self._freshen()

    def _file(self, run: Run, call: FileCall) -> None:
        began = time.monotonic_ns()
        try:
            if call.data is None:
                payload = encode(FileReturn(confine.read(self._home, call.path)))
            else:
                confine.write(self._home, call.path, call.data, call.mode)
                payload = encode(FileReturn())
        except confine.Refused as error:
            return self._refuse(run, 0, str(error))
        spent = time.monotonic_ns() - began
        outcome = Outcome(ActionState.COMPLETED, exec_ns=spent, isolation="process")
        self._send(Ended(run.lease, outcome, payload, True))

    def _kill(self, order: Kill) -> None:
        if self._command is not None and self._command.run.lease == order.lease:
            self._command.stop(order.state, order.reason, self._kill_wait_ns)

    def _resize(self, order: Cores) -> None:
        if self._command is not None and self._command.run.lease == order.lease:
            self._units.write(order.units)
            if order.cores:
                affinity.apply(os.getpid(), order.cores)
                self._binding.moved(order.cores)

    def _send(self, message: Ended | Gone | Piece) -> None:
        self._control.sendall(frame(message))

    # ---- the running command ----

    def _watch(self, command: Command) -> None:
        self._watch_at = 0
        for fd in command.pipes:
            self._poll.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        with suppress(KeyError, ValueError):  # not watched, or closed before
            self._poll.unregister(fd)

    def _read(self, fd: int) -> None:
        command = self._command
        if command is None or fd not in command.pipes:
            return self._unwatch(fd)  # closed in this very turn
        piece = command.read(fd)
        if piece is None:
            self._unwatch(fd)
        elif command.call.stream and piece[1]:
            self._send(Piece(command.run.lease, *piece))

    def _reap(self) -> None:
        """Waits for all that has ended; when the command has, reports it."""
        command, left = self._command, True
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                left = False
                break
            if pid == 0:
                break
            if command is not None:
                command.used(usage)
                if pid == command.pid:
                    command.status = status
        if command is None or command.status is None:
            return
        if not command.reported:
            self._report(command, clean=not left)
            command.act_at = 1  # at once: end what is left
        elif not left:
            self._send(Gone(command.run.lease))
        if not left:
            self._command = None
            self._watch_at = 0
            if not command.run.keep:
                self._freshen()

    def _report(self, command: Command, clean: bool) -> None:
        command.reported = True
        if self._watch_at:
            self._watch_at = 0
        else:
            for fd in command.pipes:
                self._unwatch(fd)
        outcome = command.outcome()
        pieces = command.drain()
        if command.call.stream:
            for stream, data in pieces:
                self._send(Piece(command.run.lease, stream, data))
        self._send(Ended(command.run.lease, outcome, command.result(), clean))

    def _tick(self, command: Command) -> None:
        now = time.monotonic_ns()
        if self._watch_at and now >= self._watch_at:
            self._watch(command)
        if not command.act_at or now < command.act_at:
            return
        if command.state is None and not command.reported:
            limit = command.run.timeout_ns / 1e9
            reason = f"it ran longer than its limit of {limit:g} s"
            command.stop(ActionState.TIMEOUT, reason, self._kill_wait_ns)
        else:
            tree.kill_beneath(os.getpid())
            command.act_at = now + _AGAIN_NS
            self._reap()

    # ---- between and after commands ----

    def _freshen(self) -> None:
        if not scratch.empty(self._home):
            os.chdir(self._home)

    def _end(self) -> None:
        tree.end_beneath(_END_S)
        os.chdir("/")
        self._units.remove()
        if not scratch.remove(self._home):
            print(f"tangram: cannot remove {self._home}", file=sys.stderr)
