"""One command that runs on a terminal of its own.

Its output is one stream, since a terminal has one. Its input comes in pieces while it runs; the
init hands them on (`protocol/input_flow.py`).
"""

from __future__ import annotations

import time

from ...protocol.payload import TerminalCall
from ...protocol.process_frames import RunAction
from ..environment import Grants
from ..process.command import DRAIN_MAX, Command, start_in
from ..process.resource_usage import ResourceUsage
from ..process.unstartable import Unstartable
from .terminal import Terminal


class TerminalCommand(Command):
    """A command that runs under a lease on a terminal.

    Attributes:
        asked: what was asked for.
    """

    __slots__ = ("asked", "terminal")

    def __init__(self, run: RunAction, call: TerminalCall, output_max: int, isolation: str,
                 usage: ResourceUsage) -> None:
        super().__init__(run, call.command, output_max, isolation, usage)
        self.asked = call
        self.terminal: Terminal | None = None

    def start(self, home: str, grants: Grants, devnull: int) -> None:
        """See `Command.start`."""
        argv, path, env = self.program(grants)
        env = {"TERM": "xterm-256color", **env}
        terminal = Terminal(self.asked.size, self.asked.echo)
        try:
            self.started_ns = time.monotonic_ns()
            ends = (terminal.program,) * 3
            terminal.give(self.identity)
            self.pid = start_in(self.call.cwd, home, path, argv, env, ends, terminal.path,
                                self.identity)
        except Unstartable:
            terminal.close()
            raise
        terminal.started()
        self.terminal, self.pipes = terminal, (terminal.fd, -1)
        if self.run.timeout_ns:
            self.act_at = self.started_ns + self.run.timeout_ns

    def interrupt(self, number: int) -> None:
        """Sends a signal to the foreground process group of the terminal."""
        if self.status is None and self.terminal is not None:
            self.terminal.interrupt(number, self.pid)

    def _close(self, stream: int) -> None:
        """Does nothing, unlike `Command._close`: the terminal stays open until `drain`. A program
        that has closed its side may live on, and would get SIGHUP if this side were closed too.
        """

    def drain(self) -> list[tuple[int, bytes]]:
        """See `Command.drain`. The terminal is closed here."""
        pieces = []
        for _ in range(DRAIN_MAX):
            piece = self.read(self.pipes[0]) if self.pipes[0] >= 0 else None
            if piece is None or not piece[0]:
                break
            pieces.append(piece)
        if self.terminal is not None:
            self.terminal.close()
        self.pipes = (-1, -1)
        return pieces
