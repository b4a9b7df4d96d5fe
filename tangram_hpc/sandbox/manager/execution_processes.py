"""Owns: a worker's side of its fork server and processes - their sockets on asyncio's loop, and
their death certificates. Must not know of sessions or pools: it tells whoever owns it what each
process said.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

import msgspec

from ...errors import ProtocolError
from ...protocol.process_frames import (
    PACKET_MAX,
    RECEIVE,
    RUNNER,
    Box,
    Broken,
    DescendantsEnded,
    Died,
    Drop,
    End,
    Ended,
    Fork,
    Forked,
    Frame,
    Gone,
    Load,
    Piece,
    Ready,
    RemoveDirectory,
    Setup,
    Unforked,
    WorkerInbox,
    decode_from_fork_server,
    frame,
    packet,
)
from ...resources import tree
from ...resources.cpu.enforce import Group
from .. import environ
from ..files import scratch
from .payload_cache import FUNCTIONS_MAX

_CLOSE_S = 12.0


class ExecutionProcess:
    """A forked process that runs actions.

    Attributes:
        leases: those it runs or has still to clean; in a runner the first is the one it is at, the
            others follow.
        box: what it was built as.
        home: the name of its directory; `fresh`: made for it, and of no process before.
        group: what its units are enforced by, once it lives.
        oom_kills: how often memory ran out in it, as far as that was told.
        kept: dead, and its directory is for the next process of its session.
        broken: why its sandbox does not stand, when it said so.
        process_cpu_ns: of a runner, the CPU time that it had used when its present call began.
    """

    __slots__ = (
        "_fork_server",
        "_loop",
        "_soon",
        "_unsent",
        "bell",
        "box",
        "broken",
        "control",
        "fresh",
        "functions",
        "group",
        "home",
        "inbox",
        "isolation",
        "kept",
        "kind",
        "leases",
        "number",
        "oom_kills",
        "origin",
        "pid",
        "process_cpu_ns",
        "session",
        "tokens",
        "up",
    )

    def __init__(self, fork_server: ForkServerClient, number: int, kind: str, box: Box) -> None:
        self._fork_server = fork_server
        self._loop = fork_server.loop
        self._unsent = bytearray()
        self.number = number
        self.kind = kind
        self.box = box
        self.home, self.fresh = "", True
        self.group: Group | None = None
        self.broken = ""
        self.isolation = ""
        self.origin = ""
        self.up = self.kept = False
        self.oom_kills = self.process_cpu_ns = 0
        self.pid = 0
        self.control: socket.socket | None = None
        self.inbox = WorkerInbox()
        self.leases: dict[int, None] = {}
        self.functions: dict[str, None] = {}  # the digests it holds, oldest first
        self.session = 0
        self.tokens = self.bell = -1  # of a runner, see `process_frames`
        self._soon: list[bytes] = []

    def connect(self, fd: int, setup: Frame) -> None:
        """It lives, and listens at the other end of this socket."""
        self.control = socket.socket(fileno=fd)
        self.control.setblocking(False)
        if self.kind == RUNNER:
            self.tokens = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.bell, rope = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            socket.send_fds(self.control, [frame(setup)], [self.tokens, rope])
            os.close(rope)
        else:
            self.send(setup)

    def call(self, run: Frame) -> None:
        """Gives a runner one more call; it leaves at the end of this turn of the loop."""
        if self.control is None:
            return
        if not self._soon:
            self._loop.call_soon(self._call_now)
        self._soon.append(frame(run))

    def _call_now(self) -> None:
        if self._soon and self.control is not None:
            os.eventfd_write(self.tokens, len(self._soon))
            calls, self._soon = self._soon, []
            self._send(b"".join(calls))

    def take_back(self) -> list[int]:
        """The leases that a runner has not begun and now never will, in order; its first counts as
        begun."""
        most = len(self.leases) - 1
        taken = min(most, len(self._soon))
        del self._soon[len(self._soon) - max(0, taken) :]
        with suppress(OSError):
            while not self._unsent and self.tokens >= 0 and taken < most:
                os.read(self.tokens, 8)
                taken += 1
        leases = list(self.leases)[len(self.leases) - taken :] if taken > 0 else []
        if leases:
            self.send(Drop(tuple(leases)))
        return leases

    def send(self, message: Frame) -> None:
        """Sends or queues an order; after its death orders go nowhere."""
        self._call_now()
        self._send(frame(message))

    def load(self, digest: str, blob: bytes) -> None:
        """Gives a runner a function that it does not hold; its oldest makes room for it."""
        if digest not in self.functions:
            drop = next(iter(self.functions)) if len(self.functions) >= FUNCTIONS_MAX else ""
            self.functions.pop(drop, None)
            self.functions[digest] = None
            self.send(Load(digest, blob, drop))

    def _send(self, data: bytes) -> None:
        if self.control is None:
            return
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self.control.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # its end comes by Died
            return
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self.control.fileno(), self._send_more)

    def _send_more(self) -> None:
        assert self.control is not None
        try:
            sent = self.control.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self.control.fileno())

    def kill(self) -> None:
        """SIGKILLs it; its owner hears of its death."""
        self._fork_server.tell(End(self.number))

    def remove_directory(self) -> None:
        """It is dead, and nobody needs its directory."""
        self._fork_server.tell(RemoveDirectory(self.home))

    @property
    def folder(self) -> str:
        """Its directory."""
        return os.path.join(self._fork_server.root, self.home)

    def hang_up(self) -> None:
        """Forgets its control socket."""
        if self.control is not None:
            self._loop.remove_reader(self.control.fileno())
            self._loop.remove_writer(self.control.fileno())
            self.control.close()
            self.control = None
        if self.bell >= 0:
            self._loop.remove_reader(self.bell)
            os.close(self.bell)
            self.bell = -1

    def forget(self) -> None:
        """It is dead, and what it had not begun is known."""
        if self.tokens >= 0:
            os.close(self.tokens)
            self.tokens = -1


class Owner(Protocol):
    """Who is told what processes do."""

    def process_born(self, process: ExecutionProcess) -> Setup:
        """It lives; what it must be told first.

        Raises:
            OSError: it cannot be used; it is killed.
        """
        ...

    def process_up(self, process: ExecutionProcess) -> None:
        """It waits for orders."""
        ...

    def process_failed(self, process: ExecutionProcess, text: str) -> None:
        """It could not be forked."""
        ...

    def process_died(self, process: ExecutionProcess, status: int, none_left: bool,
                     tail: str) -> None:
        """It ended with this wait status (-1: not known)."""
        ...

    def descendants_ended(self, process: ExecutionProcess) -> None:
        """What it left when it died has ended too."""
        ...

    def fork_server_lost(self) -> None:
        """The fork server ended by itself; `process_died` follows for every process."""
        ...

    def ended(self, process: ExecutionProcess, message: Ended) -> None:
        """An action's outcome."""
        ...

    def gone(self, process: ExecutionProcess, message: Gone) -> None:
        """Nothing of an action is left."""
        ...

    def piece(self, process: ExecutionProcess, message: Piece) -> None:
        """A piece of an action's output."""
        ...

    def settled(self) -> None:
        """All that was heard in this turn has been told; the last word of each turn."""
        ...


class ForkServerClient:
    """StartLimiter the fork server process and speaks to it; at most one per executor."""

    def __init__(self, owner: Owner, root: str, numbers: Iterator[int]) -> None:
        self.loop = asyncio.get_running_loop()
        self.root = root
        self._owner = owner
        self._numbers = numbers
        self._processes: dict[int, ExecutionProcess] = {}
        self._lingering: dict[int, ExecutionProcess] = {}
        self._unsent: list[bytes] = []
        self._closed = False
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tangram_hpc.sandbox.process.fork_server",
                 str(there.fileno())],
                pass_fds=(there.fileno(),),
                env=environ.for_child_processes(os.environ),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = here
        here.send(os.fsencode(root))
        here.setblocking(False)
        self.loop.add_reader(here.fileno(), self._turn, self._on_packet)

    @property
    def pid(self) -> int:
        """The fork server's process id."""
        return self._server.pid

    def fork(self, kind: str, box: Box, home: str = "") -> ExecutionProcess:
        """Asks for a process, in the directory of one that died or a fresh one; `process_up`,
        `process_failed` or `process_died` follows."""
        process = ExecutionProcess(self, next(self._numbers), kind, box)
        process.home, process.fresh = home or scratch.new_name(), not home
        self._processes[process.number] = process
        self.tell(Fork(process.number, kind, process.home, process.fresh))
        return process

    def tell(self, message: Frame) -> None:
        """Sends or queues an order to the fork server."""
        self._unsent.append(packet(message))
        if len(self._unsent) == 1:
            self._tell_more()

    def _tell_more(self) -> None:
        while self._unsent:
            try:
                self._socket.send(self._unsent[0])
            except BlockingIOError:
                self.loop.add_writer(self._socket.fileno(), self._tell_more)
                return
            except OSError:  # it is gone, as its reader will see
                self._unsent.clear()
                return
            del self._unsent[0]
        self.loop.remove_writer(self._socket.fileno())

    # ---- what it says ----

    def _turn(self, hear: Callable[..., object], *what: ExecutionProcess) -> None:
        hear(*what)
        self._owner.settled()

    def _on_packet(self) -> None:
        try:
            size = array.array("i").itemsize
            data, more, _, _ = self._socket.recvmsg(
                PACKET_MAX, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, more = b"", []
        if not data:
            return self._lost()
        fds = array.array("i", b"".join(bytes(item[2]) for item in more))
        message = decode_from_fork_server(data)
        if isinstance(message, Forked):
            self._forked(message, fds[0])
        elif isinstance(message, Unforked):
            self._owner.process_failed(self._processes.pop(message.number), message.text)
        elif isinstance(message, Died):
            self._died(message)
        elif isinstance(message, DescendantsEnded):
            process = self._lingering.pop(message.number, None)
            if process is not None:
                self._owner.descendants_ended(process)

    def _forked(self, message: Forked, fd: int) -> None:
        process = self._processes[message.number]
        process.pid = message.pid
        try:
            process.connect(fd, self._owner.process_born(process))
        except OSError as error:
            process.broken = f"enforcement: {error.strerror or error}"
            return process.kill()
        if process.kind == RUNNER:
            self.loop.add_reader(process.bell, self._turn, self._on_bell, process)
            process.up, process.isolation = True, "process"
            process.process_cpu_ns = tree.cpu_ns(process.pid)
            self._owner.process_up(process)
        else:
            self.loop.add_reader(fd, self._turn, self._on_data, process)

    def _on_bell(self, process: ExecutionProcess) -> None:
        rung = os.read(process.bell, 64)
        while self._on_data(process):
            pass
        if not rung and process.control is not None:  # it has closed what it needs
            process.hang_up()
            process.kill()

    def _died(self, message: Died) -> None:
        process = self._processes.get(message.number)
        if process is None:
            return
        while process.control is not None and self._on_data(process):
            pass  # what it said before it died comes first
        process.hang_up()
        del self._processes[message.number]
        if not message.none_left:
            self._lingering[message.number] = process
        self._owner.process_died(process, message.status, message.none_left, message.tail)

    def _lost(self) -> None:
        """The fork server itself died: its processes end by their own signal."""
        self.loop.remove_reader(self._socket.fileno())
        self.loop.remove_writer(self._socket.fileno())
        processes, self._processes = list(self._processes.values()), {}
        lingering, self._lingering = list(self._lingering.values()), {}
        for process in processes:
            while self._on_data(process):
                pass
            process.hang_up()
        self._owner.fork_server_lost()  # first, as a death asks for a new process
        for process in processes:
            self._owner.process_died(process, -1, True, "")
        for process in lingering:
            self._owner.descendants_ended(process)

    def _on_data(self, process: ExecutionProcess) -> bool:
        """Handles what a process said; returns whether there may be more."""
        if process.control is None:
            return False
        try:
            data = process.control.recv(RECEIVE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:  # its death certificate follows; a runner may only have closed its socket
            process.hang_up()
            process.kill()
            return False
        try:
            for message in process.inbox.feed(data):
                if isinstance(message, Ended):
                    self._owner.ended(process, message)
                elif isinstance(message, Gone):
                    self._owner.gone(process, message)
                elif isinstance(message, Ready):
                    if not process.up:
                        process.up, process.isolation = True, message.isolation
                        self._owner.process_up(process)
                elif isinstance(message, Broken):
                    process.broken = message.text
                else:
                    self._owner.piece(process, message)
        except (ProtocolError, msgspec.DecodeError):
            process.hang_up()
            process.kill()
            return False
        return True

    def close(self) -> None:
        """Ends the fork server and with it every process; returns when they are gone."""
        if self._closed:
            return
        self._closed = True
        for process in self._processes.values():
            process.hang_up()
            process.forget()
        self.loop.remove_reader(self._socket.fileno())
        self.loop.remove_writer(self._socket.fileno())
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(_CLOSE_S)
        if self._server.returncode is None:
            self._server.kill()
            self._server.wait()
