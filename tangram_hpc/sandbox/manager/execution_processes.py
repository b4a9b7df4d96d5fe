"""The worker's side of its fork server and execution processes: sockets, orders and deaths.

A `ForkServerClient` starts the fork server, asks it for execution processes, and reads from
asyncio's loop what they send. It passes everything on to one `Owner` and knows neither sessions nor
pools. What a process sent before it died is always passed on before its death.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

import msgspec

from ...errors import ProtocolError
from ...protocol.process_frames import (
    INIT,
    PACKET_MAX,
    RECEIVE,
    RUNNER,
    BackgroundRunnable,
    Broken,
    CreditInput,
    DescendantsEnded,
    Died,
    Drop,
    Ended,
    Fork,
    Forked,
    Gone,
    HeldStill,
    KillProcess,
    LoadFunction,
    OutputChunk,
    PortBytes,
    PortCredit,
    PortEnded,
    ProcessFrame,
    Ready,
    RemoveDirectory,
    SandboxSpec,
    Setup,
    Unforked,
    WorkerInbox,
    decode_from_fork_server,
    frame,
    packet,
)
from ...resources import open_files, process_tree
from ...resources.cpu.enforce import Group
from ...start_module import module_command
from .. import environment
from ..files import scratch
from .payload_cache import FUNCTIONS_MAX

_LAST_S = 1.0  # the fork server removes its folder last, and ends
_CLOSE_S = 12.0  # for the fork server to end everything


class ExecutionProcess:
    """A forked process that runs actions: an init or a runner.

    Attributes:
        number: by which worker and fork server know it.
        kind: INIT or RUNNER.
        box: how its sandbox is built.
        image_state: which folder the image of its box was when a pool asked for it.
        home: the name of its directory.
        fresh: whether that directory was made for it, and is not that of a dead process.
        origin: a directory whose files it begins with a copy of; empty for none.
        pid: its process id; 0 until it lives.
        up: whether it accepts orders.
        session: the session that owns it; 0 for none.
        isolation: what isolates its sandbox, as it said.
        broken: why its sandbox does not work, if it said so.
        group: what enforces its limits, once it lives.
        leases: the leases that it runs or whose processes it has still to end. In a runner the
            first is the one that it works on, and the others follow.
        functions: the digests of the functions that a runner holds, oldest first.
        tokens: a runner's counter of calls that it may begin, and `bell` the pipe that it writes
            to; see `process_frames`. -1 when closed, and in an init.
        oom_kills: how often the kernel had killed for memory in its group, when that was last read:
            before an action begins that runs alone, and when an action ends that it may have ended.
        process_cpu_ns: CPU time in ns that a runner had used when its present call began.
        kept: whether it is dead and its directory is for the next init of its session.
        control: the worker's end of its socket; None when it is closed.
        inbox: reads what it sends.
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
        "image_state",
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

    def __init__(self, fork_server: ForkServerClient, number: int, kind: str,
                 box: SandboxSpec) -> None:
        self._fork_server = fork_server
        self._loop = fork_server.loop
        self._unsent = bytearray()
        self.number = number
        self.kind = kind
        self.box = box
        self.image_state: tuple[int, ...] = ()
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

    def connect(self, fd: int, setup: ProcessFrame) -> None:
        """Takes over the control socket of the process, which lives now, and sends its setup."""
        self.control = socket.socket(fileno=fd)
        self.control.setblocking(False)
        if self.kind == RUNNER:
            self.tokens = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.bell, rope = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            socket.send_fds(self.control, [frame(setup)], [self.tokens, rope])
            os.close(rope)
        else:
            self.send(setup)

    def call(self, run: ProcessFrame) -> None:
        """Gives a runner one more call. All calls of one turn of the loop leave together at its
        end.
        """
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
        """Takes back the calls that a runner has not begun, and returns their leases in order. The
        first call always counts as begun.
        """
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

    @property
    def congested(self) -> bool:
        """Whether orders wait for room in its socket; until then `take_back` takes only calls that
        were not sent."""
        return bool(self._unsent)

    def send(self, message: ProcessFrame) -> None:
        """Sends or queues an order. Orders to a dead process are dropped."""
        self._call_now()
        self._send(frame(message))

    def load(self, digest: str, blob: bytes) -> None:
        """Gives a runner a function that it does not hold; its oldest one makes room."""
        if digest not in self.functions:
            drop = next(iter(self.functions)) if len(self.functions) >= FUNCTIONS_MAX else ""
            self.functions.pop(drop, None)
            self.functions[digest] = None
            self.send(LoadFunction(digest, blob, drop))

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
        except OSError:  # Died follows
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

    def read(self) -> None:
        """Passes on what it has sent. A runner rings its bell for several results at once, and not
        while it is at a call."""
        self._fork_server.read(self)

    def kill(self) -> None:
        """Sends SIGKILL; the owner hears of the death."""
        self._fork_server.tell(KillProcess(self.number))

    def remove_directory(self) -> None:
        """Removes the directory of this dead process."""
        self._fork_server.tell(RemoveDirectory(self.home))

    @property
    def folder(self) -> str:
        """The path of its directory."""
        return os.path.join(self._fork_server.root, self.home)

    def hang_up(self) -> None:
        """Closes its control socket and its bell, and drops the orders that it has not got."""
        self._unsent.clear()
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
        """Closes the counter of a dead runner, when it is known which calls it had not begun."""
        if self.tokens >= 0:
            os.close(self.tokens)
            self.tokens = -1


class Owner(Protocol):
    """Receives what execution processes do and say."""

    def process_born(self, process: ExecutionProcess) -> Setup:
        """A process lives. Returns the first message for it.

        Raises:
            OSError: it cannot be used, and is killed.
        """
        ...

    def process_up(self, process: ExecutionProcess) -> None:
        """A process accepts orders."""
        ...

    def process_failed(self, process: ExecutionProcess, text: str) -> None:
        """A process could not be forked."""
        ...

    def process_died(self, process: ExecutionProcess, status: int, none_left: bool,
                     tail: str) -> None:
        """A process ended with this wait status (-1: unknown). `none_left`: its descendants have
        ended too.
        """
        ...

    def descendants_ended(self, process: ExecutionProcess) -> None:
        """The last descendants of a dead process have ended."""
        ...

    def fork_server_lost(self) -> None:
        """The fork server ended by itself; `process_died` follows for every process."""
        ...

    def ended(self, process: ExecutionProcess, message: Ended) -> None:
        """An action ended."""
        ...

    def gone(self, process: ExecutionProcess, message: Gone) -> None:
        """No process of an action is left."""
        ...

    def output_chunk(self, process: ExecutionProcess, message: OutputChunk) -> None:
        """A part of an action's streamed output."""
        ...

    def background_runnable(self, process: ExecutionProcess) -> None:
        """Background processes in the sandbox of a session could run and hold no CPUs."""
        ...

    def credit(self, process: ExecutionProcess, message: CreditInput) -> None:
        """More input may be sent to an action."""
        ...

    def held_still(self, process: ExecutionProcess, why: str) -> None:
        """Reports the answer to HoldStill: nothing runs in the sandbox now, or `why` says in one
        line why something may."""
        ...

    def port_report(self, process: ExecutionProcess,
                    message: PortBytes | PortCredit | PortEnded) -> None:
        """Reports that a port stream of an init has brought bytes or credit, or has ended."""
        ...

    def settled(self) -> None:
        """All that was received in this turn has been passed on; the last call of each turn."""
        ...


class ForkServerClient:
    """Starts the fork server and talks to it; an executor has one at a time."""

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
                module_command("tangram_hpc.sandbox.process.fork_server", str(there.fileno())),
                pass_fds=(there.fileno(),),
                env=environment.for_child_processes(os.environ),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        open_files.limit_as_started(self._server.pid)  # before it makes any process
        self._socket = here
        here.send(os.fsencode(root))
        here.setblocking(False)
        self.loop.add_reader(here.fileno(), self._turn, self._on_packet)

    @property
    def pid(self) -> int:
        """The fork server's process id."""
        return self._server.pid

    def ends(self) -> bool:
        """Whether the fork server has ended by itself, or does so within a second."""
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(_LAST_S)
        return self._server.returncode is not None

    def fork(self, kind: str, box: SandboxSpec, home: str = "") -> ExecutionProcess:
        """Asks for a process in the directory `home` of a dead one, or in a fresh one.
        `process_up`, `process_failed` or `process_died` follows.
        """
        process = ExecutionProcess(self, next(self._numbers), kind, box)
        process.home, process.fresh = home or scratch.new_name(), not home
        self._processes[process.number] = process
        self.tell(Fork(process.number, kind, process.home, process.fresh))
        return process

    def tell(self, message: ProcessFrame) -> None:
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
            except OSError:  # the reader will notice
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
            self._forked(message, fds[0] if fds else -1)
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
        if fd < 0 or (process.kind == INIT and open_files.is_spare(fd)):
            process.broken = open_files.refusal()
            if fd >= 0:
                os.close(fd)
            return process.kill()
        try:
            process.connect(fd, self._owner.process_born(process))
        except OSError as error:
            process.broken = f"enforcement: {error.strerror or error}"
            return process.kill()
        if process.kind == RUNNER:
            self.loop.add_reader(process.bell, self._turn, self._on_bell, process)
            process.up, process.isolation = True, "process"
            process.process_cpu_ns = process_tree.cpu_ns(process.pid)
            self._owner.process_up(process)
        else:
            self.loop.add_reader(fd, self._turn, self._on_data, process)

    def _on_bell(self, process: ExecutionProcess) -> None:
        rung = os.read(process.bell, 64)
        self._read_all(process)
        if not rung and process.control is not None:  # the runner closed its bell
            process.hang_up()
            process.kill()

    def read(self, process: ExecutionProcess) -> None:
        """Passes on what a process has sent, as if it had woken its worker."""
        self._turn(self._read_all, process)

    def _read_all(self, process: ExecutionProcess) -> None:
        while self._on_data(process):
            pass

    def _died(self, message: Died) -> None:
        process = self._processes.get(message.number)
        if process is None:
            return
        self._read_all(process)  # what it sent before it died comes first
        process.hang_up()
        del self._processes[message.number]
        if not message.none_left:
            self._lingering[message.number] = process
        self._owner.process_died(process, message.status, message.none_left, message.tail)

    def _lost(self) -> None:
        """Handles the death of the fork server: its processes get a signal from the kernel and end.
        """
        self.loop.remove_reader(self._socket.fileno())
        self.loop.remove_writer(self._socket.fileno())
        processes, self._processes = list(self._processes.values()), {}
        lingering, self._lingering = list(self._lingering.values()), {}
        for process in processes:
            self._read_all(process)
            process.hang_up()
        self._owner.fork_server_lost()  # before the deaths, each of which asks for a process
        for process in processes:
            self._owner.process_died(process, -1, True, "")
        for process in lingering:
            self._owner.descendants_ended(process)

    def _on_data(self, process: ExecutionProcess) -> bool:
        """Handles what a process sent; returns whether there may be more."""
        if process.control is None:
            return False
        try:
            data = process.control.recv(RECEIVE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:  # Died follows; but a runner may only have closed its socket
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
                elif isinstance(message, BackgroundRunnable):
                    self._owner.background_runnable(process)
                elif isinstance(message, HeldStill):
                    self._owner.held_still(process, message.why)
                elif isinstance(message, CreditInput):
                    self._owner.credit(process, message)
                elif isinstance(message, PortBytes | PortCredit | PortEnded):
                    self._owner.port_report(process, message)
                else:
                    self._owner.output_chunk(process, message)
        except (ProtocolError, msgspec.DecodeError):
            process.hang_up()
            process.kill()
            return False
        return len(data) == RECEIVE  # a shorter read has emptied the socket

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
